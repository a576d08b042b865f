"""A rollout of artifact sets brings their plans: a board with little memory takes one of these."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from broker_server.service.rollout import read_rollout
from broker_server.settings.fleet import FleetConfig, ModelConfig
from device_runtime.agent.memory import Load
from fleet_protocol.blobs import blob_ref
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.memory_plans import PLAN_FILES, plan_text
from models.registry import Registry
from models.tier import Tier
from simulation.data.datasets import load_dataset
from tests.brokers import without_mosquitto
from tests.fleet.boards import until
from tests.fleet.conftest import Ground
from tests.fleet.test_rollout_sets import named, shoal
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), without_mosquitto]

TIER = Tier(1.0, 1)
SETTINGS = {"channels": [16, 32], "input_shape": [1, 8, 8]}


@dataclass(frozen=True)
class PlannedGround(Ground):
    """Sets of a convolutional model, whose step a plan can bound."""

    def config(self, broker: str, **rounds: object) -> FleetConfig:
        """As of any ground, with that model."""
        model = ModelConfig(artifacts=self.artifacts, arch="conv")
        return super().config(broker, **rounds).model_copy(update={"model": model})


def read(artifacts, pattern):
    """The manifest of the tier with such a name, and the digest by which tasks name it."""
    (path,) = (artifacts / "conv" / TIER.id).glob(pattern)
    data = path.read_bytes()
    return parse_manifest(data), blob_ref(data).digest


@pytest.fixture
def ground(tmp_path):
    """Digits of two boards, the sets of a run, and others that clip earlier; all have a plan."""
    data = load_dataset("digits")
    for index in range(2):
        part = slice(index * 100, (index + 1) * 100)
        np.savez(tmp_path / f"device-{index}.npz", x=data.train_x[part], y=data.train_y[part])
    np.savez(tmp_path / "test.npz", x=data.test_x, y=data.test_y)
    options = ExportOptions(formats=("onnx",))
    request = ExportRequest(Registry.zoo().get("conv"), SETTINGS, [TIER], Recipe())
    export_architecture(request, tmp_path / "without-plans", options)
    whole, _ = read(tmp_path / "without-plans", "manifest.json")
    request = replace(request, memory=(0.9 * whole.peak_memory_bytes,))
    export_architecture(request, tmp_path / "artifacts", options)
    request = replace(request, recipe=Recipe(clip_norm=0.5))
    export_architecture(request, tmp_path / "others", options)
    return PlannedGround(tmp_path, tmp_path / "artifacts", tmp_path, (TIER.id,))


def remember_kill(state, peak):
    """Write the record of a board whose step with such a peak was killed, and is not tried again.

    A board that cannot measure its free memory does not try again as soon as it has more.
    """
    killed = Load(phase="training", tier=TIER.id, peak=peak, free=0, kills=0)
    state.mkdir(parents=True)
    learnt = {"too_large": killed.model_dump(), "rest": 10**6, "times": 1}
    (state / "memory.json").write_text(json.dumps(learnt))


def test_a_board_with_little_memory_takes_the_plan_of_a_new_set(lab, ground):
    """Its tasks name the plan, those of the other board the set, and the rollout succeeds."""
    folder, up, board = lab
    whole, _ = read(ground.artifacts, "manifest.json")
    new, new_digest = read(ground.folder / "others", "manifest.json")
    plan, plan_digest = read(ground.folder / "others", PLAN_FILES)
    peak = min(whole.peak_memory_bytes, new.peak_memory_bytes)
    assert plan.peak_memory_bytes < peak
    remember_kill(ground.folder / "board-1" / "state", peak)
    server = up(rounds=100_000)
    roomy = board(0)
    small = board(1)
    until(lambda: "state=uploading" in small.log(), small.log)
    until(lambda: len(server._devices.releases(sets=True)) == 2, roomy.log, small.log)
    begun = shoal(ground.folder, "--artifacts", "others", "--stage", "100")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(
        lambda: read_rollout(folder).stopped or len(read_rollout(folder).judged) == 2,
        roomy.log,
        small.log,
    )
    ended = read_rollout(folder)
    assert (ended.stopped, dict(ended.judged)) == ("", {"device-0": "", "device-1": ""})
    tested = {"device-0": new_digest, "device-1": plan_digest}
    until(lambda: named(ground) == tested, lambda: named(ground), tested)
    assert plan_text(plan) in small.log()
