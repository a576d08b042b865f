"""A task of mutual learning on a device: whole memes, trunks with an adaptor of their own, and what
does not fit.
"""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from device_runtime.training.hooks import Hooks
from device_runtime.training.own_model import OwnModel
from device_runtime.training.routines import may_join
from device_runtime.training.schedule import batches, sample_order
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import (
    BlobError,
    ConfigError,
    DataError,
    PlanError,
    RefusalReason,
    RefusedError,
)
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.weights import encode_weights
from models import Registry, build
from models.tier import Tier
from models.zoo.initial_state import initial_weights
from models.zoo.layers import StaticBatchNorm, set_mode
from trainer_export.pair_set import Pair, PairModel, export_pairs
from trainer_export.recipe import Recipe

ZOO = Registry.zoo()
RECIPE = Recipe()
IMAGE = {"input_shape": (1, 8, 8)}
TRUNK = IMAGE | {"channels": (4, 4), "scaler": False}  # of the fleet's CNN2, which has 10 classes
NORMED = IMAGE | {"channels": (4, 6)}
HEAD = ("head.weight", "head.bias")
SEED = 4


def model(name, **settings):
    return PairModel(ZOO.get(name), Tier(1.0, 1), ZOO.get(name).settings(settings))


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    """A set for a trunk of CNN2 with a head of 100 classes, and a personal model with static batch
    norm.
    """
    pair = Pair(
        model("cnn2", **TRUNK, classes=100), model("conv", **NORMED, classes=100), ("head",)
    )
    (report,) = export_pairs([pair], RECIPE, tmp_path_factory.mktemp("sets"), seed=SEED)
    return report.folder


@pytest.fixture(scope="module")
def whole(hundred, tmp_path_factory):
    """The same set for a fleet whose model has the 100 classes, so that the meme is all of it."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    shutil.copytree(hundred, folder)
    pair = OwnModel(folder, folder).manifest()
    (folder / "manifest.json").write_bytes(pair.model_copy(update={"adaptor": None}).to_bytes())
    return folder


@pytest.fixture
def board(hundred, tmp_path):
    """Does one round in a fleet whose model has 10 classes."""
    meme = OwnModel(hundred, tmp_path).manifest().sent
    ten = changed(meme, {"head.weight": (10, 16), "head.bias": (10,)})
    blobs = BlobStore(tmp_path / "blobs")

    def work(number=1, stays=HEAD, rate=0.05, classes=10, folder=hundred, manifest=None, **changes):
        weights = encode_weights(sent(classes))
        blobs.put(weights)
        instructions = Instructions(
            routine="mutual",
            settings={"alpha": 0.6, "beta": 0.6},
            train=TrainSettings(learning_rate=rate, epochs=2, batch_size=8, seed=3),
            stays=stays,
        )
        device_setup = DeviceSetup(
            data=changes.get("data", images((20, 40))),
            blobs=blobs,
            backend="onnx",
            threads=1,
            holdout=0.0,
            own_model=changes.get("own", OwnModel(folder, tmp_path)),
            parts=(
                changes.get("chosen", np.arange(30)),
                changes.get("held_out", np.arange(30, 50)),
            ),
        )
        task = Task(
            run="r",
            round=number,
            id="t",
            version=0,
            tier="w1.00-d1",
            instructions=instructions,
            manifest=manifest or (ten if classes == 10 else meme),
            weights=blob_ref(weights, 1024),
        )
        return may_join(instructions, device_setup).run(task, device_setup, Hooks())

    return work


def sent(classes=10):
    """The fleet's weights."""
    return initial_weights(
        ZOO.get("cnn2"), ZOO.get("cnn2").settings(TRUNK | {"classes": classes}), seed=SEED
    )


def changed(manifest, shapes):
    """A manifest with other shapes of some parameters."""
    specs = tuple(
        s.model_copy(update={"shape": shapes.get(s.name, s.shape)}) for s in manifest.parameters
    )
    return manifest.model_copy(update={"parameters": specs})


def images(labels, count=50):
    """Noise around one picture per label."""
    draw = np.random.default_rng(7)
    pictures = draw.normal(size=(100, 1, 8, 8))
    y = draw.integers(*labels, count)
    return make_dataset(
        "images.npz", (pictures[y] + 0.3 * draw.normal(size=(count, 1, 8, 8))).astype(np.float32), y
    )


def left_by(tmp_path, number):
    return tensors_in((tmp_path / f"own-model-r-{number}.safetensors").read_bytes())


def test_a_trunk_gets_an_adaptor_of_another_shape(board, hundred, tmp_path):
    """A board of 100 classes in a fleet of 10 sends the trunk alone; its adaptor starts from its
    set and stays.
    """
    weights = sent()
    still = board(1, rate=1e-12)
    trunk = {name: value.shape for name, value in weights.items() if name not in HEAD}
    assert {name: value.shape for name, value in still.tensors.items()} == trunk
    for name in trunk:
        np.testing.assert_allclose(still.tensors[name], weights[name], atol=1e-6)
    first = tensors_in((hundred / "adaptor-init.safetensors").read_bytes())
    kept = left_by(tmp_path, 1)
    assert (
        {name.removeprefix("adaptor/") for name in kept if name.startswith("adaptor/")}
        == set(HEAD)
        == set(first)
    )
    for name in HEAD:
        assert first[name].shape[0] == 100
        np.testing.assert_allclose(kept[f"adaptor/{name}"], first[name], atol=1e-6)
    # The next round trains it; the one after that starts from what that left, with the trunk as it
    # is sent.
    moved = board(2)
    assert all(not np.allclose(moved.tensors[name], weights[name], atol=1e-4) for name in trunk)
    trained = left_by(tmp_path, 2)
    assert all(not np.allclose(trained[f"adaptor/{name}"], first[name], atol=1e-4) for name in HEAD)
    again = board(3, rate=1e-12)
    for name in trunk:
        np.testing.assert_allclose(again.tensors[name], weights[name], atol=1e-6)
    for name in HEAD:
        np.testing.assert_allclose(
            left_by(tmp_path, 3)[f"adaptor/{name}"], trained[f"adaptor/{name}"], atol=1e-6
        )


def test_a_round_that_is_computed_twice_gives_the_same_update(board, tmp_path):
    """As after a power cut between training and upload: personal model and adaptor start where they
    did before.
    """
    board(1)
    once = board(2)
    left = left_by(tmp_path, 2)
    again = board(2)
    for name, value in once.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], value)
    for name, value in left_by(tmp_path, 2).items():
        np.testing.assert_array_equal(value, left[name])
    assert again.evaluation == once.evaluation


def test_an_adaptor_of_the_same_shape_starts_from_what_is_sent(board, whole, tmp_path):
    """A set without an adaptor of its own needs none; with nothing that stays, everything is
    sent.
    """
    weights = sent(100)
    board(1, folder=whole, classes=100, rate=1e-12)
    for name in HEAD:
        np.testing.assert_allclose(
            left_by(tmp_path, 1)[f"adaptor/{name}"], weights[name], atol=1e-6
        )
    assert set(board(2, folder=whole, classes=100, stays=()).tensors) == set(weights)


def test_a_personal_model_with_static_batch_norm_is_evaluated(board, tmp_path):
    """Its statistics come from the board's own training samples, as PyTorch finds them."""
    found = board(1).evaluation
    data = images((20, 40))
    kept = left_by(tmp_path, 1)
    module = build(ZOO.get("conv"), 1.0, settings=NORMED | {"classes": 100})
    weights = {n.removeprefix("model/"): torch.tensor(v) for n, v in kept.items() if "model/" in n}
    module.load_state_dict({**module.state_dict(), **weights})
    norms = [layer for layer in module.modules() if isinstance(layer, StaticBatchNorm)]
    set_mode(module, "statistics")
    seen = []
    with torch.no_grad():
        for rows in batches(sample_order(3, 1, 0, 30), 8):
            module(torch.from_numpy(data.x[rows]))
            seen.append([(norm.last_mean, norm.last_var) for norm in norms])
        for at, norm in enumerate(norms):
            norm.running_mean, norm.running_var = (
                torch.stack([batch[at][part] for batch in seen]).mean(0) for part in (0, 1)
            )
        logits = set_mode(module, "eval")(torch.from_numpy(data.x[30:]))
        y = torch.from_numpy(data.y[30:])
    assert found.examples == 20
    assert found.loss == pytest.approx(float(functional.cross_entropy(logits, y)), rel=1e-4)
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()), abs=1e-6)


def test_a_board_that_keeps_nothing_back_reports_no_accuracy(board):
    """Without held-out samples, or with one training sample, there is nothing to evaluate or no
    variance.
    """
    assert board(1, held_out=np.arange(0)).evaluation is None
    assert board(2, chosen=np.arange(1)).evaluation is None


def test_a_set_that_does_not_go_with_the_run_is_refused(board, whole):
    """The message names both memes and the first parameter that differs."""
    with pytest.raises(
        RefusedError, match=r"needs a personal model; name its set in \[own_model\]"
    ) as raised:
        board(own=None)
    assert raised.value.reason is RefusalReason.UNSUPPORTED
    with pytest.raises(
        RefusedError, match=r"head\.weight is float32 \[10.* and not shared in the set's.*--adaptor"
    ):
        board(stays=())
    with pytest.raises(
        RefusedError, match=r"trunk\.0\.weight is not shared in the run's cnn2 w1.00-d1 and float32"
    ):
        board(stays=("trunk.0.weight", *HEAD))
    wider = changed(OwnModel(whole, whole).manifest().sent, {"trunk.0.weight": (8, 1, 3, 3)})
    with pytest.raises(
        RefusedError, match=r"trunk\.0\.weight is float32 \[8, .* and float32 \[4, 1, 3, 3\] in the"
    ):
        board(manifest=wider)
    turned = [s.model_copy(update={"axes": s.axes[::-1]}) for s in wider.parameters]
    with pytest.raises(
        RefusedError, match=r"\[4, 1, 3, 3\] over fixed.3, fixed.3, .* and .* over conv1, "
    ):
        board(
            manifest=changed(
                wider.model_copy(update={"parameters": turned}), {"trunk.0.weight": (4, 1, 3, 3)}
            )
        )
    with pytest.raises(
        RefusedError, match=r"head\.weight is float32 \[10, 16\].* and float32 \[100, 16\]"
    ):
        board(folder=whole)


def test_a_pair_for_another_routine_is_refused(board, hundred, tmp_path):
    """A set is made for one way to train two models."""
    other = tmp_path / "other"
    shutil.copytree(hundred, other)
    pair = OwnModel(hundred, tmp_path).manifest()
    (other / "manifest.json").write_bytes(pair.model_copy(update={"routine": "duel"}).to_bytes())
    with pytest.raises(RefusedError, match=r"is for the routine duel, not for mutual"):
        board(folder=other)


def test_data_must_fit_the_models_of_the_set(board):
    """The classes are those of the set, not those of the fleet."""
    with pytest.raises(DataError, match=r"label 1\d\d .* is outside 0 to 99"):
        board(data=dataclasses.replace(images((20, 40)), y=images((20, 40)).y + 100))


def test_another_set_in_the_middle_of_a_run_is_refused(board, hundred, tmp_path):
    """What the last round left is neither thrown away nor trained in a model it was not made
    for.
    """
    board(1)
    pair = OwnModel(hundred, tmp_path).manifest()
    other = tmp_path / "other"
    shutil.copytree(hundred, other)
    personal = changed(pair.own, {"head.weight": (100, 5)})
    (other / "manifest.json").write_bytes(pair.model_copy(update={"own": personal}).to_bytes())
    with pytest.raises(
        RefusedError, match=r"own-model-r-1.*another pair: model/head\.weight is float32 \[100, 6\]"
    ):
        board(2, folder=other)
    assert board(2).batches == 8


def test_a_set_that_is_not_whole_is_named(board, hundred, tmp_path):
    """At the start of the board and in a task: a file that is missing, damaged, or no mutual set at
    all.
    """
    OwnModel(hundred, tmp_path).check()
    broken = tmp_path / "set"
    for name in (
        "mutual.onnx",
        "adaptor-init.safetensors",
        "own-init.safetensors",
        "own/stats.onnx",
    ):
        shutil.copytree(hundred, broken)
        (broken / name).unlink()
        with pytest.raises(ConfigError, match=rf"set/{name} is missing.*copy all of it"):
            OwnModel(broken, tmp_path).check()
        if name != "own/stats.onnx":
            with pytest.raises(ConfigError, match=name):
                board(own=OwnModel(broken, tmp_path / "state"))
        shutil.rmtree(broken)
    shutil.copytree(hundred, broken)
    (broken / "mutual.onnx").write_bytes((broken / "mutual.onnx").read_bytes() + b" ")
    with pytest.raises(ConfigError, match=r"mutual\.onnx is damaged"):
        OwnModel(broken, tmp_path).check()
    with pytest.raises(ConfigError, match="that the export of the pair printed"):
        OwnModel(tmp_path / "nowhere", tmp_path).check()
    (broken / "manifest.json").write_bytes(OwnModel(hundred, tmp_path).manifest().sent.to_bytes())
    with pytest.raises(BlobError, match="not a manifest of a pair"):
        OwnModel(broken, tmp_path).check()


def test_an_adaptor_is_a_part_of_the_meme_and_not_all_of_it(tmp_path):
    """Both are errors before anything is traced."""
    pair = Pair(model("mlp", **IMAGE), model("mlp", **IMAGE, hidden=(4,)))
    with pytest.raises(
        PlanError, match=r"mlp has neither a block nor a module hed; its blocks are head, stem"
    ):
        export_pairs([dataclasses.replace(pair, adaptor=("hed",))], RECIPE, tmp_path)
    with pytest.raises(
        ConfigError, match=r"adaptor stem, head covers all of mlp.*name fewer parts"
    ):
        export_pairs([dataclasses.replace(pair, adaptor=("stem", "head"))], RECIPE, tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


def test_a_personal_model_of_the_fleets_own_kind_would_not_be_its_twin(hundred):
    """The same architecture and seed start apart on the two sides, or they would have nothing to
    teach each other.
    """
    personal = tensors_in((hundred / "own-init.safetensors").read_bytes())
    settings = ZOO.get("conv").settings(NORMED | {"classes": 100})
    fleet = initial_weights(ZOO.get("conv"), settings, seed=SEED)
    assert {name: value.shape for name, value in personal.items()} == {
        n: v.shape for n, v in fleet.items()
    }
    assert not np.allclose(personal["head.weight"], fleet["head.weight"])
