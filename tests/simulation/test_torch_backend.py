"""Virtual devices trained by PyTorch end where boards end that run the exported graphs on
onnxruntime.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_runtime.training.backends import ForwardSession, TrainSession
from device_runtime.training.epochs import train
from device_runtime.training.hooks import Hooks
from device_runtime.training.measuring import Statistics, measure
from device_runtime.training.schedule import TrainingSchedule, batches
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import ConfigError, DataError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import TrainSettings
from models import Architecture, Registry, Tier, build
from simulation.torch_backend import trainer as torch_backend
from simulation.torch_backend.batches import TorchJob, equal_steps
from simulation.torch_backend.rows import Layout
from simulation.torch_backend.steppers import GroupStepper, SingleStepper
from simulation.torch_backend.trainer import TorchResult, TorchTrainer
from tests.adapted import adapted
from tests.trainer_export.helpers import TINY, shaken
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

ROOT = Path(__file__).parents[2]
SETTINGS = TrainSettings(learning_rate=0.02, epochs=2, batch_size=4, seed=11)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Exported:
    """An artifact set with what it was made from."""

    arch: Architecture
    settings: dict[str, Any]
    manifest: Manifest
    folder: Path

    def graph(self, key: str) -> Path:
        return self.folder / self.manifest.graphs[key].path

    def trainer(self, **options) -> TorchTrainer:
        return TorchTrainer(self.arch, self.settings, self.manifest, **options)

    def job(self, seed: int, count: int = 18, *, labels: int | None = None, **changes) -> TorchJob:
        """Weights, samples and settings of a device; the training samples are all but every
        ninth.
        """
        draw = np.random.default_rng(seed)
        shape = (count, *self.manifest.input_shape)
        x = draw.standard_normal(shape).astype(np.float32)
        if self.manifest.input_dtype == "int64":
            x = draw.integers(0, self.settings.get("vocab", self.settings["classes"]), shape)
        y = draw.integers(
            0, labels or self.settings["classes"], (count, *self.manifest.label_shape)
        )
        if self.manifest.label_shape:
            y[draw.random(y.shape) < 0.3] = -1
            y[0] = -1
        torch.manual_seed(seed)
        module = shaken(
            build(self.arch, Tier(self.manifest.width, self.manifest.depth), settings=self.settings)
        )
        weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
        data = make_dataset(f"device{seed}", x, y, scale=0.9, mean=0.1, std=1.1)
        chosen = np.flatnonzero(np.arange(count) % 9 != 8)
        settings = SETTINGS.model_copy(update={"seed": seed, **changes})
        return TorchJob(weights, TrainingSchedule(data, chosen, settings, round=3))

    def on_a_board(self, job: TorchJob) -> TorchResult:
        """What a device computes."""
        session = TrainSession(self.manifest, self.graph("onnx/train"))
        session.load(job.weights, job.schedule.settings.proximal_mu)
        session.turn_knobs(job.schedule.settings.knobs)
        result = train(session, self.manifest, job.schedule, Hooks())
        return TorchResult(
            {name: value.copy() for name, value in session.parameters().items()}, result
        )

    def statistics_on_a_board(self, job: TorchJob) -> tuple[Statistics, int]:
        """What a device measures."""
        session = ForwardSession(self.manifest, self.graph("onnx/stats"), job.weights)
        return measure(session, self.manifest, job.schedule, Hooks())


def export(name: str, folder: Path, *, recipe: Recipe | None = None, **settings) -> Exported:
    arch = Registry.zoo().get(name)
    depth = 2 if "blocks" in TINY[name] and name != "preresnet18" else 1
    settings = {**TINY[name], **settings}
    export_architecture(
        ExportRequest(arch, settings, [Tier(0.5, depth)], recipe or Recipe()),
        folder,
        ExportOptions(formats=("onnx",)),
    )
    path = next((folder / name).glob("*/manifest.json"))
    return Exported(arch, settings, parse_manifest(path.read_bytes()), path.parent)


@pytest.fixture(scope="module")
def conv(tmp_path_factory) -> Exported:
    """Static batch norm and Scaler."""
    return export("conv", tmp_path_factory.mktemp("conv"))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory) -> Exported:
    """Another recipe, with a proximal term."""
    return export(
        "mlp",
        tmp_path_factory.mktemp("mlp"),
        recipe=Recipe(Sgd(momentum=0.5, weight_decay=0.01), clip_norm=0.5, proximal=True),
    )


@pytest.fixture(scope="module")
def next_word(tmp_path_factory) -> Exported:
    """Dropout, tokens, and a label per token; neither momentum nor decay nor clipping."""
    return export(
        "next_word",
        tmp_path_factory.mktemp("next_word"),
        recipe=Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None),
        dropout=0.3,
    )


def assert_alike(found: TorchResult, expected: TorchResult, tolerance: float = TOLERANCE) -> None:
    assert list(found.tensors) == list(expected.tensors)
    for name, value in expected.tensors.items():
        assert found.tensors[name].dtype == np.float32
        assert found.tensors[name].flags.c_contiguous
        np.testing.assert_allclose(found.tensors[name], value, rtol=0, atol=tolerance, err_msg=name)
    assert found.result.steps == expected.result.steps
    assert found.result.loss == pytest.approx(expected.result.loss, abs=tolerance)
    assert found.result.mean_loss == pytest.approx(expected.result.mean_loss, abs=tolerance)


def moved(job: TorchJob, result: TorchResult) -> float:
    return max(
        float(np.abs(value - job.weights[name]).max()) for name, value in result.tensors.items()
    )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["conv", "mlp", pytest.param("next_word", marks=pytest.mark.slow)])
def test_devices_end_where_boards_end(request, name, together):
    """Two epochs with short last batches, one of a single sample: parameters, steps and losses
    agree.
    """
    exported: Exported = request.getfixturevalue(name)
    jobs = [
        exported.job(seed, count)
        for seed, count in ((1, 18), (2, 27), (3, 15), (4, 14), (5, 18), (6, 3))
    ]
    assert {len(job.schedule.chosen) % SETTINGS.batch_size for job in jobs} == {0, 1, 2, 3}
    results = exported.trainer(together=together).train(jobs)
    for job, result in zip(jobs, results, strict=True):
        expected = exported.on_a_board(job)
        assert moved(job, expected) > 100 * TOLERANCE
        assert_alike(result, expected)


@pytest.mark.slow
def test_devices_with_a_frozen_base_end_where_boards_end(tmp_path):
    """Adapters beside frozen layers: the same file of frozen tensors, which neither changes nor
    returns.
    """
    export_architecture(
        ExportRequest(adapted, None, [Tier(0.5, 1)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    folder = next((tmp_path / "adapted").glob("*/manifest.json")).parent
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    exported = Exported(adapted, dict(adapted.settings()), manifest, folder)
    base = open_tensors(folder / "base.safetensors")
    jobs = [exported.job(seed, 18 + seed) for seed in (1, 2, 3)]
    before = {name: value.copy() for name, value in base.items()}
    assert before
    own = {spec.name for spec in manifest.parameters}
    jobs = [replace(job, weights={name: job.weights[name] for name in own}) for job in jobs]
    for together in (False, True):
        for job, result in zip(
            jobs, exported.trainer(together=together, base=base).train(jobs), strict=True
        ):
            session = TrainSession(manifest, exported.graph("onnx/train"), base=base)
            session.load(job.weights, 0.0)
            expected = TorchResult({}, train(session, manifest, job.schedule, Hooks()))
            expected.tensors.update(
                {name: value.copy() for name, value in session.parameters().items()}
            )
            assert moved(job, expected) > 100 * TOLERANCE
            assert_alike(result, expected)
    assert all(np.array_equal(value, before[name]) for name, value in base.items())


@pytest.mark.parametrize("together", [False, True])
def test_images_change_as_on_a_board(conv, together):
    """Random crops and mirror images are those of the same step of the same device, in statistics
    too.
    """
    jobs = [conv.job(1), conv.job(2, 14)]
    images = [
        replace(job.schedule.data, augment=("crop", "flip"), black=np.float32(-0.5)) for job in jobs
    ]
    changed = [
        replace(job, schedule=replace(job.schedule, data=data))
        for job, data in zip(jobs, images, strict=True)
    ]
    trainer = conv.trainer(together=together)
    plain = trainer.train(jobs)
    for job, result, without in zip(changed, trainer.train(changed), plain, strict=True):
        assert_alike(result, conv.on_a_board(job))
        assert abs(result.result.loss - without.result.loss) > 100 * TOLERANCE
        for name, value in conv.statistics_on_a_board(job)[0].items():
            np.testing.assert_allclose(
                trainer.measure(job)[0][name], value, rtol=0, atol=TOLERANCE, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["preresnet18", "transformer_mlm", "text_encoder", "har_cnn", "lenet5"]
)
def test_the_rest_of_the_zoo_ends_where_boards_end(tmp_path, name):
    """Residual streams, token masks, convolutions over time."""
    exported = export(name, tmp_path)
    jobs = [exported.job(seed, count) for seed, count in ((1, 18), (2, 27))]
    for together in (False, True):
        for job, result in zip(jobs, exported.trainer(together=together).train(jobs), strict=True):
            assert_alike(result, exported.on_a_board(job))


@pytest.mark.parametrize("together", [False, True])
def test_every_device_has_its_own_settings(conv, mlp, together):
    """Learning rates, seeds, batch sizes, epochs, masks, proximal terms, and passes cut off after
    some steps.
    """
    jobs = [
        mlp.job(1, proximal_mu=3.0, learning_rate=0.05),
        mlp.job(2, proximal_mu=0.0, labels=2),
        mlp.job(3, proximal_mu=0.5, labels=2, mask_labels=False),
        mlp.job(4, batch_size=5, epochs=1),
    ]
    for job, result in zip(jobs, mlp.trainer(together=together).train(jobs), strict=True):
        assert_alike(result, mlp.on_a_board(job))
    counted = [mlp.job(seed, count, steps=7) for seed, count in ((7, 9), (8, 18), (9, 50), (10, 3))]
    for job, result in zip(counted, mlp.trainer(together=together).train(counted), strict=True):
        assert result.result.steps == 7
        assert_alike(result, mlp.on_a_board(job))
    without = mlp.trainer(together=together).train(
        [replace(jobs[0], schedule=replace(jobs[0].schedule, settings=jobs[1].schedule.settings))]
    )[0]
    assert (
        np.abs(
            without.tensors["head.weight"] - mlp.on_a_board(jobs[0]).tensors["head.weight"]
        ).max()
        > 1e-3
    )
    masked = [conv.job(5, labels=3), conv.job(6, labels=2, mask_labels=False)]
    for job, result in zip(masked, conv.trainer(together=together).train(masked), strict=True):
        assert_alike(result, conv.on_a_board(job))


@pytest.mark.parametrize("together", [False, True])
def test_a_bad_device_spoils_nobody(conv, together):
    """A loss or data that is no good costs one device its update; the others' are those they would
    have had alone.
    """
    good = [conv.job(1), conv.job(2, 27)]
    exploding = conv.job(3, learning_rate=1e30)
    flat = make_dataset("elsewhere", np.zeros((18, 7), np.float32), np.zeros(18))
    foreign = replace(conv.job(4), schedule=replace(conv.job(4).schedule, data=flat))
    pulled = conv.job(6, proximal_mu=0.1)
    trainer = conv.trainer(together=together)
    results = trainer.train([good[0], exploding, foreign, good[1], pulled])
    alone = [trainer.train([job])[0] for job in good]
    for found, expected in zip((results[0], results[3]), alone, strict=True):
        assert_alike(found, expected, 1e-6)
    assert isinstance(results[1], RefusedError)
    assert results[1].reason is RefusalReason.FAILED
    with pytest.raises(RefusedError) as board:
        conv.on_a_board(exploding)
    assert str(results[1]) == str(board.value)
    assert isinstance(results[2], DataError)
    assert "elsewhere" in str(results[2])
    assert "has no proximal term" in str(results[4])


def test_parameters_that_are_not_finite_are_refused(conv):
    """A last step may leave finite losses behind and parameters that are not."""
    job = conv.job(1, batch_size=18, epochs=1, learning_rate=3e38)
    # A shift of all logits leaves the loss alone, while weight decay times the learning rate is too
    # large a number.
    weights = {**job.weights, "head.bias": job.weights["head.bias"] + np.float32(1e4)}
    result = conv.trainer().train([replace(job, weights=weights)])[0]
    assert (
        str(result)
        == "parameter head.bias is not finite after round 3, step 1; lower the learning rate"
    )


def test_the_same_job_gives_the_same_bits(conv):
    """A trainer keeps nothing of what it did before, and leaves weights and data as they were."""
    job = conv.job(1)
    other = conv.job(2)
    before = {name: value.copy() for name, value in job.weights.items()}
    trainer = conv.trainer()
    first = trainer.train([job])[0]
    trainer.train([other])
    again = conv.trainer(together=False).train([other, job])[1]
    once_more = trainer.train([job])[0]
    for name, value in first.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], value)
        np.testing.assert_array_equal(once_more.tensors[name], value)
        np.testing.assert_array_equal(job.weights[name], before[name])


def test_batch_norm_statistics_are_those_of_a_board(conv):
    """Means over the batches, a last batch of one sample left out; training afterwards is as
    before.
    """
    job = conv.job(1, 27 + 1, batch_size=6)
    assert len(job.schedule.chosen) % 6 == 1
    trainer = conv.trainer()
    trained = trainer.train([job])[0]
    found, count = trainer.measure(job)
    expected, measured = conv.statistics_on_a_board(job)
    assert count == measured == 4
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
    assert_alike(trainer.train([job])[0], trained, 0)
    with pytest.raises(DataError, match="two samples"):
        trainer.measure(replace(job, schedule=replace(job.schedule, chosen=np.arange(1))))


def test_small_steps_are_done_together(conv, monkeypatch):
    """Several jobs of small steps are mapped over one module; one job, or larger steps, run
    eagerly.
    """
    used = []
    for kind in (SingleStepper, GroupStepper):
        monkeypatch.setattr(
            torch_backend, kind.__name__, lambda *a, kind=kind: used.append(kind) or kind(*a)
        )
    jobs = [conv.job(1), conv.job(2, 27), conv.job(3, epochs=1)]
    conv.trainer().train(jobs)
    assert used == [GroupStepper, SingleStepper]
    used.clear()
    monkeypatch.setattr(torch_backend, "_SMALL_STEP_FLOPS", 10.0)
    conv.trainer().train(jobs)
    assert used == [SingleStepper] * 3


def test_a_model_that_is_not_the_manifests_is_refused(conv):
    """Other settings build other parameters."""
    with pytest.raises(ConfigError, match=r"parameter units\.1.* in the set; export the set again"):
        TorchTrainer(conv.arch, {**conv.settings, "channels": (8, 14, 16)}, conv.manifest)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_an_error(conv):
    """The message says what to set instead."""
    with pytest.raises(ConfigError, match='set device = "cpu"'):
        conv.trainer(device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("together", [False, True])
def test_a_gpu_ends_where_boards_end(conv, together):
    """The same numbers on a GPU, which sums in another order."""
    jobs = [conv.job(1), conv.job(2, 27)]
    for job, result in zip(
        jobs, conv.trainer(device="cuda", together=together).train(jobs), strict=True
    ):
        assert_alike(result, conv.on_a_board(job), 1e-4)


def test_torch_is_left_as_it_was(conv):
    """Threads and random state of the process are not the trainer's."""
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        conv.trainer(threads=1).train([conv.job(1)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    conv.trainer()
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    size=st.integers(1, 9),
    most=st.integers(1, 9),
)
def test_stretches_hold_every_batch_once(counts, size, most):
    """Each device's steps come in order with the sizes of its batches, though some devices stop
    early or not start.
    """
    plans = [[len(piece) for piece in batches(np.arange(count), size)][:most] for count in counts]
    seen: list[list[tuple[int, int]]] = [[] for _ in plans]
    for stretch in equal_steps(plans, size):
        assert stretch.devices.stop > stretch.devices.start
        for device in range(len(plans))[stretch.devices]:
            seen[device] += [(step, stretch.size) for step in range(stretch.first, stretch.stop)]
    assert seen == [list(enumerate(plan)) for plan in plans]


def test_sorted_devices_share_their_steps():
    """With the largest first there is one stretch for each number of full batches, and one for each
    short batch.
    """
    plans = [[4, 4, 4, 1], [4, 4, 4, 1], [4, 3], [2]]
    assert equal_steps(plans, 4) == [
        (slice(0, 3), 0, 1, 4),
        (slice(0, 2), 1, 3, 4),
        (slice(0, 2), 3, 4, 1),
        (slice(2, 3), 1, 2, 3),
        (slice(3, 4), 0, 1, 2),
    ]


@pytest.mark.parametrize(("channels", "wanted"), [(8, False), (16, True)])
def test_a_point_over_few_channels_is_not_laid_channels_last(channels, wanted):
    """With a stride, torch's gradient of it destroys memory where a processor's vectors are
    wider.
    """
    shapes = {"first": (channels, 3, 3, 3), "down": (32, channels, 1, 1)}
    layout = Layout.arrange(shapes, frozenset(shapes), channels_last=True)
    assert [place.channels_last for place in layout.places] == [wanted] * 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_rows_hold_every_parameter_once(channels_last):
    """Filling and reading back changes nothing; what the loss does not depend on stands last."""
    shapes = {"idle": (3,), "conv": (4, 2, 3, 3), "bias": (4,), "scale": ()}
    layout = Layout.arrange(shapes, frozenset(shapes) - {"idle"}, channels_last=channels_last)
    draw = np.random.default_rng(0)
    weights = [
        {name: draw.random(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)
    ]
    rows = layout.fill_rows(weights)
    assert layout.trained == layout.entries - 3
    np.testing.assert_array_equal(rows[1, -3:].numpy(), weights[1]["idle"])
    assert [place.name for place in layout.trained_places] == ["conv", "bias", "scale"]
    for row, expected in zip(rows, weights, strict=True):
        found = layout.tensors(row, list(shapes))
        assert list(found) == list(shapes)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
    for place in layout.places:
        np.testing.assert_array_equal(
            place.row(place.view(rows)), rows[:, place.start : place.stop]
        )


def test_partitions_need_no_torch():
    """A simulation on another backend does not pay for this one."""
    code = (
        "import sys, simulation.data.partition, simulation.data.datasets; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"
