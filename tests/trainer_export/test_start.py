"""Starting from a file: exact, renamed and partial names, every kind of file, and what is said of
those that misfit.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from broker_server.rounds.artifacts import load_artifacts
from fleet_protocol.errors import ConfigError
from fleet_protocol.mapped_tensors import open_tensors
from models import architecture, infer_layout
from models.zoo.initial_state import further_names, initial_weights
from tests.adapted import BASE, adapted
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe
from trainer_export.start import Start, read_start

DRAWN = {"a.weight": np.zeros((2, 3), np.float32), "b.weight": np.zeros((4,), np.float32)}
GIVEN = {"a.weight": torch.ones(2, 3), "b.weight": torch.full((4,), 2.0)}


@pytest.mark.parametrize("kind", ["safetensors", "pt", "bin", "checkpoint.pt", "half.safetensors"])
def test_every_kind_of_file_is_read(kind, tmp_path):
    """Tensors as they are, under state_dict beside other things, and of half precision."""
    path = tmp_path / f"weights.{kind}"
    if "half" in kind:
        save_file({name: value.bfloat16() for name, value in GIVEN.items()}, path)
    elif kind.endswith("safetensors"):
        save_file(GIVEN, path)
    else:
        torch.save({"state_dict": GIVEN, "epoch": 3} if "check" in kind else GIVEN, path)
    found = Start(read_start(path), str(path)).put_into(DRAWN)
    for name, value in GIVEN.items():
        np.testing.assert_array_equal(found[name], value.numpy())
        assert found[name].dtype == np.float32


def test_names_are_mapped_by_patterns_and_the_first_that_matches_counts():
    """A star stands for the same text on both sides."""
    there = {"model.x.a.weight": np.ones((2, 3), np.float32), "last": np.ones(4, np.float32)}
    names = [("model.x.*", "*"), ("model.*", "wrong.*"), ("last", "b.weight")]
    found = Start(there, "file", names).put_into(DRAWN)
    assert all((value == 1).all() for value in found.values())


def test_what_does_not_fit_is_said_and_partly_taken_if_asked():
    """Without partial everything must fit; with it the rest keeps what was drawn, and something
    must fit.
    """
    there = {"a.weight": np.ones((2, 3), np.float32), "b.weights": np.ones(4, np.float32)}
    said = (
        r"file: 1 tensors of the model are not there \(b\.weight\); 1 are not the model's "
        r"\(b\.weights\).*did you mean"
    )
    with pytest.raises(ConfigError, match=said):
        Start(there, "file").put_into(DRAWN)
    found = Start(there, "file", partial=True).put_into(DRAWN)
    assert (found["a.weight"] == 1).all()
    assert (found["b.weight"] == 0).all()
    with pytest.raises(ConfigError, match=r"a\.weight is \[5\] and should be \[2, 3\]"):
        Start({"a.weight": np.ones(5, np.float32)}, "file", partial=True).put_into(DRAWN)
    with pytest.raises(ConfigError, match="two tensors would be a"):
        Start({"a": np.ones(1), "b": np.ones(1)}, "file", [("b", "a")]).put_into(DRAWN)


class Tied(nn.Module):
    """An embedding that is the head, a module under two names, and a buffer."""

    def __init__(self, dim, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, dim)
        self.head = nn.Linear(dim, classes, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Linear(dim, dim)
        self.again = self.one
        self.register_buffer("places", torch.arange(6.0))


def test_a_state_with_a_tensor_under_two_names_or_a_buffer_is_the_model_s():
    """What its own state_dict has is no misfit; what is one tensor in the model must be one
    there.
    """

    @architecture(input_dtype="int64")
    def arch(cut, *, input_shape=(6,), classes=3):
        return Tied(cut.width("dim", 4), cut.classes(classes))

    drawn = initial_weights(arch)
    further = further_names(arch)
    places = further.pop("places")
    assert further == {
        "head.weight": "embed.weight",
        "again.weight": "one.weight",
        "again.bias": "one.bias",
    }
    assert (places == np.arange(6)).all()
    further["places"] = places
    there = {name: value.numpy() for name, value in Tied(4, 3).state_dict().items()}
    found = Start(there, "file").put_into(drawn, further)
    assert {name: (value == there[name]).all() for name, value in found.items()} == dict.fromkeys(
        drawn, True
    )
    alone = {name: value for name, value in there.items() if name != "embed.weight"}
    assert (
        Start(alone, "file").put_into(drawn, further)["embed.weight"] == there["embed.weight"]
    ).all()
    with pytest.raises(ConfigError, match=r"file: head\.weight is not embed\.weight there"):
        Start({**there, "head.weight": there["head.weight"] + 1}, "file").put_into(drawn, further)
    with pytest.raises(
        ConfigError,
        match=r"file: the buffer places is another than the model's.*requires_grad=False",
    ):
        Start({**there, "places": there["places"] + 1}, "file", partial=True).put_into(
            drawn, further
        )
    nearly = {**there, "places": there["places"] * (1 + 1e-6)}  # as another machine computes it
    assert Start(nearly, "file").put_into(drawn, further).keys() == drawn.keys()
    longer = {**there, "places": np.arange(7.0)}
    assert Start(longer, "file", partial=True).put_into(drawn, further).keys() == drawn.keys()
    with pytest.raises(ConfigError, match="the buffer places is another"):
        Start(longer, "file").put_into(drawn, further)


def test_files_of_anything_else_are_refused_and_run_nothing(tmp_path):
    """Objects, no tensors, and files that are not there."""
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    for name in ("missing.bin", "missing.safetensors"):
        with pytest.raises(
            ConfigError, match=r"cannot read the tensors in .*give a \.safetensors file"
        ):
            read_start(tmp_path / name)
    with pytest.raises(ConfigError, match="no float tensors by name"):
        read_start(tmp_path / "empty.pt")


def test_an_export_starts_from_it_with_its_frozen_tensors(tmp_path):
    """The base is the file's, and so are the weights of version 0, as far as the file has them."""
    drawn = initial_weights(adapted)
    there = {name: drawn[name] + 1 for name in (*BASE, "5.weight")}
    layout = infer_layout(adapted)
    start = Start(there, "file", partial=True)
    export_architecture(
        adapted, None, [layout.tier(0.25)], Recipe(), tmp_path, formats=("onnx",), start=start
    )
    artifacts = load_artifacts(tmp_path, "adapted", chunk_bytes=1024)
    (only,) = artifacts.tiers.values()
    base = open_tensors(only.folder / "base.safetensors")
    weights = artifacts.initial_weights()
    for name in BASE:
        np.testing.assert_array_equal(base[name], there[name])
    np.testing.assert_array_equal(weights["5.weight"], there["5.weight"])
    np.testing.assert_array_equal(weights["1.down"], drawn["1.down"])


def test_numbers_of_numpy_beside_the_tensors_do_no_harm(tmp_path):
    """A checkpoint of a training loop: an epoch, an accuracy of numpy, an array, an optimizer."""
    state = {"w": torch.ones(2, 3)}
    checkpoint = {
        "epoch": np.int64(3),
        "best_acc": np.float64(0.93),
        "curve": np.zeros(3, np.float32),
        "model_state_dict": state,
        "optimizer": {"momentum": torch.ones(1)},
        "loss": torch.ones(1),
    }
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert list(read_start(tmp_path / "checkpoint.pt")) == ["w"]
    torch.save({"net": state, "acc": 93.1}, tmp_path / "net.pt")  # the one dictionary with tensors
    assert list(read_start(tmp_path / "net.pt")) == ["w"]
    torch.save({"net": state, "ema": state}, tmp_path / "two.pt")
    with pytest.raises(ConfigError, match=r"under several keys, 'net', 'ema'; save those of"):
        read_start(tmp_path / "two.pt")


def test_a_whole_model_is_named_and_what_to_save_instead(tmp_path):
    """In one line, without the colours of PyTorch's own message; nothing of it is run."""
    torch.save(torch.nn.Linear(2, 3), tmp_path / "whole.pt")
    with pytest.raises(ConfigError) as caught:
        read_start(tmp_path / "whole.pt")
    assert "\x1b" not in str(caught.value)
    assert "it holds a torch.nn.modules.linear.Linear" in str(caught.value)
    assert "torch.save(model.state_dict(), FILE)" in str(caught.value)
    (tmp_path / "text.pt").write_bytes(b"hello")
    with pytest.raises(ConfigError, match="it is damaged, or no file of"):
        read_start(tmp_path / "text.pt")


def test_names_behind_a_prefix_get_the_option_that_removes_it():
    start = Start({"module.a": np.ones(2, np.float32)}, "ddp.pt")
    with pytest.raises(ConfigError, match=r"such as 'module\.\*=\*'"):
        start.put_into({"a": np.zeros(2, np.float32)})
