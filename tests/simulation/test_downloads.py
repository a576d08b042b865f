"""Weights that are rounded on their way to devices: fewer bytes, and a global model that loses
nothing by it.
"""

import numpy as np
import pytest

from broker_server.store import Store
from broker_server.store.queries import log
from fleet_protocol.errors import PlanError
from simulation.runner import simulate
from tests.broker_server.update_work import count_update_work
from tests.marking import mostly_slow
from tests.simulation.simulations import settings, tensors

TINY = {
    "model": {"arch": "mlp", "settings": {"hidden": (32,)}, "widths": (1.0, 0.5)},
    "devices": {"count": 2},
    "round": {"rounds": 2, "fraction": 1.0},
    "tiers": {"assign": "fix", "levels": "a1-b1"},
    "engine": {"workers": 1},
}


def sent(folder, run):
    store = Store(folder / "store", read_only=True)
    try:
        notes = [line.detail for line in log(store, run) if line.kind == "download"]
        return sum(task.weights.size for task in store.tasks(run, 1, "train")), notes
    finally:
        store.close()


@pytest.mark.parametrize(
    ("encoding", "share", "upload"),
    mostly_slow(
        [
            ("fp16", 0.55, "fp32"),
            ("fp16", 0.55, "int8"),
            ("int8", 0.32, "fp32"),
            ("int8", 0.32, "int8"),
        ],
        lambda case: case == ("int8", 0.32, "int8"),
    ),
)
def test_what_rounding_takes_is_given_back(tmp_path, encoding, share, upload, cache, monkeypatch):
    """Devices that learn almost nothing leave the global model where it was, however coarse what
    they were sent. Each of their updates is decoded once, read once and folded once.
    """
    work_done = count_update_work(monkeypatch)
    still = TINY | {"train": {"learning_rate": 1e-12}, "upload": {"encoding": upload}}
    runs = {}
    for name in ("fp32", encoding):
        runs[name] = simulate(
            settings(tmp_path / name, cache, **still, download={"encoding": name})
        )
    updates = 2 * TINY["devices"]["count"] * TINY["round"]["rounds"]  # of both runs
    steps = ["parsed", "measured", "read", "folded"]
    if upload != "fp32":
        steps += ["decoded", "serialised"]
    assert {step: work_done[step] for step in steps} == dict.fromkeys(steps, updates)
    first, *_, last = tensors(tmp_path / encoding, runs[encoding].run)
    for name, value in first.items():
        np.testing.assert_allclose(last[name], value, rtol=0, atol=1e-7)
    whole, notes_in_fp32 = sent(tmp_path / "fp32", runs["fp32"].run)
    size, notes = sent(tmp_path / encoding, runs[encoding].run)
    assert size < share * whole
    assert not notes_in_fp32
    assert [line.partition(",")[0] for line in notes] == [
        f"weights are sent in {encoding}"
    ] * 2  # one a round


def test_methods_that_do_not_average_changes_refuse(tmp_path, cache):
    """Nothing would give back to a median what rounding took."""
    tables = TINY | {"download": {"encoding": "int8"}, "robust": {"merge": "median"}}
    with pytest.raises(PlanError, match=r"download\.encoding"):
        simulate(settings(tmp_path, cache, **tables))
