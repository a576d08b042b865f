"""Models of several inputs and heads: the same on both backends and in a fleet, from files with
named arrays.
"""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fleet_protocol.errors import DataError
from simulation.runner import simulate
from tests.simulation.simulations import as_a_fleet, settings, tensors

FILE = """
import torch
from torch import nn
from torch.nn import functional
from shoal import Cut, architecture, loss, metric

class Halves(nn.Module):
    def __init__(self, hidden, classes):
        super().__init__()
        self.top, self.words = nn.Linear(32, hidden), nn.Embedding(17, hidden)
        self.label, self.ink = nn.Linear(hidden, classes), nn.Linear(hidden, 2)

    def forward(self, top, bottom):
        hidden = (self.top(top.flatten(1)) + self.words(bottom).mean(1)).relu()
        return self.label(hidden), self.ink(hidden)

@architecture(input_dtype={"bottom": "int64"})
def halves(cut: Cut, *, input_shape={"top": (1, 4, 8), "bottom": (32,)}, classes=10) -> nn.Module:
    return Halves(cut.width("hidden", 12), cut.classes(classes))

@loss({"label": "int64", "ink": "float32"}, {"ink": (2,)})
def both(outputs, targets, *, weight=1.0):
    label, ink = outputs
    square = (ink - targets["ink"]).pow(2).mean(1)
    return functional.cross_entropy(label, targets["label"], reduction="none") + weight * square

@metric()
def right(outputs, targets):
    return outputs[0].argmax(1) == targets["label"]
"""


def write_halves(path, first, last, **changes):
    """Digits as tokens and pixels, with their label and the mean of their halves."""
    x, y = load_digits(return_X_y=True)
    x = x[first:last]
    y = y[first:last]
    top = x[:, :32].reshape(-1, 1, 4, 8) / 16
    bottom = x[:, 32:].astype(np.uint8)
    ink = np.stack([x[:, :32].mean(1), x[:, 32:].mean(1)], 1) / 16
    np.savez(path, **{"top": top, "bottom": bottom, "label": y, "ink": ink} | changes)
    return {"kind": "npz", "path": path, "x_key": ("top", "bottom"), "y_key": ("label", "ink")}


@pytest.fixture
def tables(tmp_path):
    """A simulation of the user's own files."""
    (tmp_path / "my_models.py").write_text(FILE)
    return {
        "model": {
            "arch": "halves",
            "models": tmp_path / "my_models.py",
            "settings": {"classes": 10},
            "widths": (1.0, 0.5),
            "recipe": {"loss": {"name": "both", "weight": 0.5}, "metrics": ["right"]},
        },
        "data": {
            "name": "",
            "train": write_halves(tmp_path / "train.npz", 0, 300),
            "test": write_halves(tmp_path / "test.npz", 300, 400),
            "train_limit": None,
            "test_limit": None,
        },
        "partition": {"kind": "iid"},
        "devices": {"count": 2},
        "round": {"rounds": 2, "fraction": 1.0},
        "tiers": {"assign": "fix", "levels": "a1-b1"},
        "train": {"learning_rate": 0.1, "epochs": 2},
        "evaluation": {"holdout": 0.2},
        "engine": {"workers": 1},
    }


@pytest.mark.slow
def test_backends_and_fleet_end_alike_and_learn(tables, tmp_path):
    """Both heads: accuracy beyond chance on the server's test set, and a loss that falls; torch
    holds nothing back.
    """

    def ends(name, holdout=0.0, **engine):
        changes = {"engine": {"workers": 1, **engine}, "evaluation": {"holdout": holdout}}
        config = settings(tmp_path / name, tmp_path / "cache", **tables | changes)
        result = simulate(config)
        assert result.finished.status == "finished", result.finished.error
        return tensors(config.out, result.run)[-1]

    def apart(one, other):
        return max(float(np.abs(one[name] - other[name]).max()) for name in one)

    onnx = ends("onnx")
    assert apart(ends("torch", backend="torch"), onnx) <= 1e-5
    assert apart(ends("grouped", backend="torch", group=2), onnx) <= 1e-5
    finished = as_a_fleet(
        settings(tmp_path / "as", tmp_path / "cache", **tables), tmp_path, holdout=0.2
    )
    assert finished.status == "finished", finished.error
    held = tensors(tmp_path / "fleet", finished.run)[-1]
    assert apart(ends("held", holdout=0.2), held) <= 1e-5 < apart(onnx, held)
    (right,) = finished.evaluation.metrics
    assert right.value > 0.3
    assert np.abs(held["ink.weight"]).max() > 0


@pytest.mark.slow
def test_arrays_in_another_order_are_refused(tables, tmp_path):
    """Both orders have as many numbers, so only the names tell."""
    data = tables["data"]
    model = tables["model"] | {"widths": (1.0,)}
    swapped = data | {side: data[side] | {"x_key": ("bottom", "top")} for side in ("train", "test")}
    with pytest.raises(
        DataError, match=r"has the inputs bottom \(32\), top \(32\); name top .*in this order"
    ):
        simulate(
            settings(
                tmp_path / "out",
                tmp_path / "cache",
                **tables | {"data": swapped, "model": model, "tiers": {"levels": "a1"}},
            )
        )
