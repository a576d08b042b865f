"""Starting from a file: exact, renamed and partial names, every kind of file, and what is said of
those that misfit.
"""

import json

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
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe
from trainer_export.start import InitialWeights
from trainer_export.start_files import read_start

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
    found = InitialWeights(read_start(path), str(path)).put_into(DRAWN)
    for name, value in GIVEN.items():
        np.testing.assert_array_equal(found[name], value.numpy())
        assert found[name].dtype == np.float32


def test_names_are_mapped_by_patterns_and_the_first_that_matches_counts():
    """A star stands for the same text on both sides."""
    there = {"model.x.a.weight": np.ones((2, 3), np.float32), "last": np.ones(4, np.float32)}
    names = [("model.x.*", "*"), ("model.*", "wrong.*"), ("last", "b.weight")]
    found = InitialWeights(there, "file", names).put_into(DRAWN)
    assert all((value == 1).all() for value in found.values())


def test_what_does_not_fit_is_said_and_partly_taken_if_asked():
    """Without partial everything must fit; with it the rest keeps what was drawn, and something
    must fit.
    """
    there = {"a.weight": np.ones((2, 3), np.float32), "b.weights": np.ones(4, np.float32)}
    said = (
        r"file: 1 tensors of the model are missing \(b\.weight\); 1 do not belong to the model "
        r"\(b\.weights\).*did you mean"
    )
    with pytest.raises(ConfigError, match=said):
        InitialWeights(there, "file").put_into(DRAWN)
    found = InitialWeights(there, "file", partial=True).put_into(DRAWN)
    assert (found["a.weight"] == 1).all()
    assert (found["b.weight"] == 0).all()
    with pytest.raises(ConfigError, match=r"a\.weight is \[5\] and should be \[2, 3\]"):
        InitialWeights({"a.weight": np.ones(5, np.float32)}, "file", partial=True).put_into(DRAWN)
    with pytest.raises(ConfigError, match="two tensors would be a"):
        InitialWeights({"a": np.ones(1), "b": np.ones(1)}, "file", [("b", "a")]).put_into(DRAWN)


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
    found = InitialWeights(there, "file").put_into(drawn, further)
    assert {name: (value == there[name]).all() for name, value in found.items()} == dict.fromkeys(
        drawn, True
    )
    alone = {name: value for name, value in there.items() if name != "embed.weight"}
    assert (
        InitialWeights(alone, "file").put_into(drawn, further)["embed.weight"]
        == there["embed.weight"]
    ).all()
    with pytest.raises(ConfigError, match=r"file: head\.weight and embed\.weight differ"):
        InitialWeights({**there, "head.weight": there["head.weight"] + 1}, "file").put_into(
            drawn, further
        )
    with pytest.raises(
        ConfigError,
        match=r"file: the buffer places differs from the model's.*requires_grad=False",
    ):
        InitialWeights({**there, "places": there["places"] + 1}, "file", partial=True).put_into(
            drawn, further
        )
    nearly = {**there, "places": there["places"] * (1 + 1e-6)}  # as another machine computes it
    assert InitialWeights(nearly, "file").put_into(drawn, further).keys() == drawn.keys()
    longer = {**there, "places": np.arange(7.0)}
    assert (
        InitialWeights(longer, "file", partial=True).put_into(drawn, further).keys() == drawn.keys()
    )
    with pytest.raises(ConfigError, match="the buffer places differs from"):
        InitialWeights(longer, "file").put_into(drawn, further)


def test_files_of_anything_else_are_refused_and_run_nothing(tmp_path):
    """Objects, no tensors, and files that are not there."""
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    for name in ("missing.bin", "missing.safetensors"):
        with pytest.raises(
            ConfigError, match=r"cannot read the tensors in .*use a \.safetensors file"
        ):
            read_start(tmp_path / name)
    with pytest.raises(ConfigError, match="does not contain float tensors by name"):
        read_start(tmp_path / "empty.pt")


def test_an_export_starts_from_it_with_its_frozen_tensors(tmp_path):
    """The base is the file's, and so are the weights of version 0, as far as the file has them."""
    drawn = initial_weights(adapted)
    there = {name: drawn[name] + 1 for name in (*BASE, "5.weight")}
    layout = infer_layout(adapted)
    start = InitialWeights(there, "file", partial=True)
    export_architecture(
        ExportRequest(adapted, None, [layout.tier(0.25)], Recipe(), start=start),
        tmp_path,
        ExportOptions(formats=("onnx",)),
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
    with pytest.raises(ConfigError, match=r"under several keys, 'net', 'ema'; save only those of"):
        read_start(tmp_path / "two.pt")


def test_a_whole_model_is_named_and_what_to_save_instead(tmp_path):
    """In one line, without the colours of PyTorch's own message; nothing of it is run."""
    torch.save(torch.nn.Linear(2, 3), tmp_path / "whole.pt")
    with pytest.raises(ConfigError) as caught:
        read_start(tmp_path / "whole.pt")
    assert "\x1b" not in str(caught.value)
    assert "it contains a torch.nn.modules.linear.Linear" in str(caught.value)
    assert "torch.save(model.state_dict(), FILE)" in str(caught.value)
    (tmp_path / "text.pt").write_bytes(b"hello")
    with pytest.raises(ConfigError, match="it is damaged, or was not written by"):
        read_start(tmp_path / "text.pt")


def test_names_behind_a_prefix_get_the_option_that_removes_it():
    start = InitialWeights({"module.a": np.ones(2, np.float32)}, "ddp.pt")
    with pytest.raises(ConfigError, match=r"such as 'module\.\*=\*'"):
        start.put_into({"a": np.zeros(2, np.float32)})


def layered(prefix="", count=4):
    """Tensors of a small encoder of equal layers."""
    names = ["embed.weight"]
    for number in range(count):
        names += [f"encoder.layer.{number}.query.weight", f"encoder.layer.{number}.value.weight"]
    return {f"{prefix}{name}": np.ones((3, 3), np.float32) for name in [*names, "head.weight"]}


def test_a_pattern_that_matches_nothing_is_an_error_with_the_likely_one():
    """Also with --start-partial, where most of the model would silently stay random."""
    zeros = {name: value * 0 for name, value in layered().items()}
    pairs = [("bert.embed.*", "embed.*"), ("bert.encodr.*", "encoder.*")]
    with pytest.raises(ConfigError, match=r"matches no tensor.*did you mean 'bert\.encoder\.\*'"):
        InitialWeights(layered("bert."), "file", pairs, partial=True).put_into(zeros)
    pairs[1] = ("bert.encoder.*", "encodr.*")
    with pytest.raises(ConfigError, match=r"no tensor encodr\.layer.*did you mean 'encoder\.\*'"):
        InitialWeights(layered("bert."), "file", pairs, partial=True).put_into(zeros)
    with pytest.raises(ConfigError, match=r"wrong way round.*--start-name '\*=net\.\*'"):
        InitialWeights(layered(), "file", [("net.*", "*")], partial=True).put_into(layered("net."))


def test_a_small_share_is_an_error_unless_it_is_stated():
    """Of tensors and of entries: a large embedding does not make up for layers without values."""
    there = {**layered("old.", 8), "embed.weight": np.ones((1000, 3), np.float32)}
    zeros = {name: value * 0 for name, value in layered().items()}
    zeros["embed.weight"] = np.zeros((1000, 3), np.float32)
    with pytest.raises(
        ConfigError, match=r"takes 1 of its 10 tensors.*encoder\.layer\.\*.*--start-share 0\.10"
    ):
        InitialWeights(there, "file", partial=True).put_into(zeros)
    found = InitialWeights(there, "file", partial=True, least_share=0.1).put_into(zeros)
    assert (found["embed.weight"] == 1).all()
    assert not found["head.weight"].any()


def test_tensors_of_other_shapes_need_other_sizes_and_no_other_names():
    wide = {name: np.ones((6, 6), np.float32) for name in layered()}
    wide["embed.weight"] = np.ones((3, 3), np.float32)
    words = r"9 have another shape \(encoder\.layer\.0\.query\.weight is \[6, 6\] and should be"
    with pytest.raises(ConfigError, match=words) as caught:
        InitialWeights(wide, "file", partial=True).put_into(layered())
    assert "correct --start-name" not in str(caught.value)
    with pytest.raises(ConfigError, match="build the model with the sizes of the source") as caught:
        InitialWeights(wide, "file").put_into(layered())
    assert "--start-name" not in str(caught.value)


def test_what_was_taken_left_and_random_is_reported():
    """Equal blocks are one row; tensors may be left out on purpose."""
    there = layered()
    zeros = {name: value * 0 for name, value in layered().items()}
    zeros["head.weight"] = np.zeros((5, 3), np.float32)
    zeros["new.weight"] = np.zeros(1, np.float32)
    reports = []
    pairs = [("embed.*", "")]
    InitialWeights(there, "file", pairs, partial=True, report=reports.append).put_into(zeros)
    groups = reports[0].groups()
    assert [(group.name, group.tensors) for group in groups["taken"]] == [
        ("encoder.layer.*.query.weight", 4),
        ("encoder.layer.*.value.weight", 4),
    ]
    assert {group.name: group.reason for group in groups["left"]} == {
        "head.weight": "[3, 3] and should be [5, 3]",
        "embed.weight": "--start-name leaves it out",
    }
    assert {group.name for group in groups["random"]} == {
        "embed.weight",
        "head.weight",
        "new.weight",
    }


def test_the_suggested_pair_is_the_right_way_round():
    """The file's name first, whichever of the two has more before it."""
    with pytest.raises(ConfigError, match=r"such as '\*=net\.\*'"):
        InitialWeights(layered(), "file").put_into(layered("net."))
    with pytest.raises(ConfigError, match=r"such as 'net\.\*=\*'"):
        InitialWeights(layered("net."), "file").put_into(layered())


@pytest.mark.attack(
    "file",
    "The index of a checkpoint names files outside its folder, by relative or absolute paths or "
    "with escape sequences",
    "refused with an error that shows the name; nothing outside the checkpoint's folder is opened",
    "2026-11-29",
)
@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a\x1b[2J", "", "a//b"])
def test_an_index_names_files_of_its_folder(name, tmp_path):
    """A checkpoint from somebody else is a folder, and not a list of paths."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="only files beside the index are read") as refused:
        read_start(folder)
    assert str(refused.value).isprintable()


def test_a_checkpoint_in_several_files_is_read_from_its_folder(tmp_path):
    """By its index, which names the file of each tensor; a file that is missing is named."""
    first = {"a.weight": torch.ones(2, 3), "count": torch.ones(1, dtype=torch.int64)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.full((4,), 2.0)}, tmp_path / "model-2.safetensors")
    files = {"a.weight": "model-1.safetensors", "count": "model-1.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**files, "b.weight": "model-2.safetensors"}}))
    for path in (tmp_path, index):
        found = InitialWeights(read_start(path), str(path)).put_into(DRAWN)
        assert (found["b.weight"] == 2).all()
    index.write_text(json.dumps({"weight_map": {**files, "c": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"1 of its tensors are not in their files, c is not in"):
        read_start(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-2\.safetensors.*download all 2 files"):
        read_start(tmp_path)
    for content in ("[]", "[" * 99_999):
        index.write_text(content)
        with pytest.raises(ConfigError, match="is not the index of a checkpoint"):
            read_start(tmp_path)
    index.unlink()
    found = read_start(tmp_path)  # the one file that is left
    assert list(found) == ["a.weight"]
    with pytest.raises(ConfigError, match="neither a store nor the folder of a checkpoint"):
        read_start(tmp_path / "..")


def test_names_of_a_package_replace_those_of_its_checkpoints():
    """A pair of the user's comes first: its tensors keep the names that it is about."""
    tensors = {name: np.zeros(1, np.float32) for name in ("old.a", "old.b", "kept")}
    start = InitialWeights(tensors, "file", [("old.b", "new.b")])
    renamed = start.with_names({"old.a": "new.a", "old.b": "other"})
    assert list(renamed.tensors) == ["new.a", "old.b", "kept"]
    weights = {name: np.ones(1, np.float32) for name in ("new.a", "new.b", "kept")}
    assert all(not value.any() for value in renamed.put_into(weights).values())
