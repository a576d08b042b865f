"""Artifact sets over the air in the middle of a run: others of the same model, and ones that a board cannot train."""

import itertools
import json
import os
import shutil
import subprocess
import sys

import pytest

from broker_server.service.rollout import read_rollout
from broker_server.store import Store
from device_runtime.agent.cache import read_index
from fleet_protocol.blobs import blob_ref
from fleet_protocol.manifest import parse_manifest
from models.registry import Registry, infer_layout
from tests.fleet.boards import until
from tests.fleet.conftest import WIDTHS
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin"), reason="mosquitto is not installed"
    ),
]


@pytest.fixture
def others(ground):
    """The model of `ground` exported again, to be clipped earlier."""
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (1, 8, 8)})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(width) for width in WIDTHS)
    recipe = Recipe(clip_norm=0.5)
    export_architecture(architecture, settings, tiers, recipe, ground.folder / "others", formats=("onnx",))
    return ground.folder / "others"


def spoilt(artifacts, to):
    """The same where every training graph but the last is that of the next smaller tier, and manifests agree."""
    shutil.copytree(artifacts, to)
    folders = sorted(path.parent for path in (to / "mlp").glob("*/manifest.json"))
    for smaller, larger in itertools.pairwise(folders):
        paths = artifacts / "mlp" / smaller.name, larger
        found = [json.loads((each / "manifest.json").read_bytes()) for each in paths]
        spec = found[0]["graphs"]["onnx/train"]
        found[1]["graphs"]["onnx/train"] |= {"digest": spec["digest"], "size": spec["size"]}
        shutil.copy(artifacts / "mlp" / smaller.name / spec["path"], larger / spec["path"])
        (larger / "manifest.json").write_text(json.dumps(found[1]))
    return to


def shoal(folder, *arguments):
    command = [sys.executable, "-m", "shoal", "rollout", "start", "--folder", "lab", "--store", "store", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def named(ground):
    """The artifact sets that tasks of the newest round name, by device."""
    store = Store(ground.folder / "store")
    try:
        (run, *_) = store.runs()
        last = store.last_round(run.id)
        tasks = store.tasks(run.id, last.number, "train") if last is not None else []
        return {task.device: task.artifact_set.digest for task in tasks}
    finally:
        store.close()


def manifests(artifacts):
    return {blob_ref(path.read_bytes()).digest for path in (artifacts / "mlp").glob("*/manifest.json")}


def test_sets_change_in_a_run_and_one_that_does_not_pass_changes_nothing(lab, ground, others):
    """Fetched beforehand and tested, then named in the tasks of each board that has passed; the run goes on."""
    folder, up, board = lab
    server = up(rounds=100_000)
    boards = [board(index) for index in range(2)]
    logs = [each.log for each in boards]
    until(lambda: all("state=uploading" in log() for log in logs), *logs)
    until(lambda: len(server._known.releases(sets=True)) == 2, *logs)
    assert set(named(ground).values()) <= manifests(ground.artifacts)
    begun = shoal(ground.folder, "--artifacts", "others", "--canary", "50%")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(lambda: list(read_rollout(folder).judged.values()) == ["", ""], *logs, lambda: read_rollout(folder))
    until(lambda: len(named(ground)) == 2 and {*named(ground).values()} <= manifests(others), lambda: named(ground))
    asked = read_rollout(folder).asked
    assert len(set(asked.values())) == 2  # one after the other
    number = read_rollout(folder).release.number
    said = server._known.releases(sets=True)
    assert {line.split(" ")[1] for line in said.values()} == {str(number)}
    assert all(each.starts == 1 for each in boards)  # nobody starts anew for it
    kept = {entry.manifest for entry in read_index(boards[0].folder / "state").sets}  # side by side
    assert kept & manifests(ground.artifacts)
    assert kept & manifests(others)

    spoilt(others, ground.folder / "bad")
    begun = shoal(ground.folder, "--artifacts", "bad", "--stage", "100")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(lambda: read_rollout(folder).stopped, *logs, lambda: read_rollout(folder))
    assert "not as the manifest says" in read_rollout(folder).stopped, read_rollout(folder).stopped
    until(lambda: len(named(ground)) == 2 and {*named(ground).values()} <= manifests(ground.artifacts), *logs)
    trained = [log().count("state=uploading") for log in logs]
    until(lambda: all(log().count("state=uploading") > n for log, n in zip(logs, trained, strict=True)), *logs)


def test_sets_of_another_model_are_not_begun(lab, ground, others):
    """Their updates would not add up; nothing is signed."""
    folder, up, _ = lab
    up(rounds=100_000)
    until(lambda: Store(ground.folder / "store").runs())
    for path in (others / "mlp").glob("*/manifest.json"):
        changed = json.loads(path.read_bytes())
        changed["settings"]["hidden"] = 5
        path.write_text(json.dumps(changed))
        parse_manifest(path.read_bytes())
    done = shoal(ground.folder, "--artifacts", "others")
    assert done.returncode == 2
    assert "settings of w1.00" in done.stdout + done.stderr
    assert not (folder / "rollout.json").exists()
