"""Artifact sets over the air in the middle of a run: others of the same model, and ones that a
board cannot train.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import pytest

from broker_server.service.rollout import read_rollout
from broker_server.store import Store
from device_runtime.agent.cache import read_index
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from models.registry import Registry, infer_layout
from shoal.local_fleet import LocalFleet
from tests.brokers import embedded_broker, without_mosquitto
from tests.fleet.boards import until
from tests.fleet.conftest import WIDTHS, Watcher, run
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    without_mosquitto,
]


@pytest.fixture
def others(ground):
    """The model of `ground` exported again, to be clipped earlier."""
    architecture = Registry.zoo().get("mlp")
    settings = architecture.settings({"input_shape": (1, 8, 8)})
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(width) for width in WIDTHS)
    recipe = Recipe(clip_norm=0.5)
    export_architecture(
        ExportRequest(architecture, settings, tiers, recipe),
        ground.folder / "others",
        ExportOptions(formats=("onnx",)),
    )
    return ground.folder / "others"


def spoilt(artifacts, to):
    """The same where every training graph but the last is that of the next smaller tier, and
    manifests agree.
    """
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
    command = [
        sys.executable,
        "-m",
        "shoal",
        "rollout",
        "start",
        "--folder",
        "lab",
        "--store",
        "store",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def named(ground):
    """The artifact sets that tasks of the newest round name, by device."""
    store = Store(ground.folder / "store", read_only=True)
    try:
        (run, *_) = store.runs()
        last = store.last_round(run.id)
        tasks = store.tasks(run.id, last.number, "train") if last is not None else []
        return {task.device: task.artifact_set.digest for task in tasks}
    finally:
        store.close()


def manifests(artifacts):
    return {
        blob_ref(path.read_bytes()).digest for path in (artifacts / "mlp").glob("*/manifest.json")
    }


def test_sets_change_in_a_run_and_one_that_does_not_pass_changes_nothing(lab, ground, others):
    """Fetched beforehand and tested, then named in the tasks of each board that has passed; the run
    goes on.
    """
    folder, up, board = lab
    server = up(rounds=100_000)
    boards = [board(index) for index in range(2)]
    logs = [each.log for each in boards]
    until(lambda: all("state=uploading" in log() for log in logs), *logs)
    until(lambda: len(server._devices.releases(sets=True)) == 2, *logs)
    assert set(named(ground).values()) <= manifests(ground.artifacts)
    begun = shoal(ground.folder, "--artifacts", "others", "--canary", "50%")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(
        lambda: list(read_rollout(folder).judged.values()) == ["", ""],
        *logs,
        lambda: read_rollout(folder),
    )
    until(
        lambda: len(named(ground)) == 2 and {*named(ground).values()} <= manifests(others),
        lambda: named(ground),
    )
    asked = read_rollout(folder).asked
    assert len(set(asked.values())) == 2  # one after the other
    number = read_rollout(folder).release.number
    said = server._devices.releases(sets=True)
    assert {line.split(" ")[1] for line in said.values()} == {str(number)}
    assert all(each.starts == 1 for each in boards)  # nobody starts anew for it
    kept = {entry.manifest for entry in read_index(boards[0].folder / "state").sets}  # side by side
    assert kept & manifests(ground.artifacts)
    assert kept & manifests(others)

    spoilt(others, ground.folder / "bad")
    begun = shoal(ground.folder, "--artifacts", "bad", "--stage", "100")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    until(lambda: read_rollout(folder).stopped, *logs, lambda: read_rollout(folder))
    assert "differ from the manifest's" in read_rollout(folder).stopped, read_rollout(
        folder
    ).stopped
    until(
        lambda: (
            len(named(ground)) == 2 and {*named(ground).values()} <= manifests(ground.artifacts)
        ),
        *logs,
    )
    trained = [log().count("state=uploading") for log in logs]
    until(
        lambda: all(
            log().count("state=uploading") > n for log, n in zip(logs, trained, strict=True)
        ),
        *logs,
    )


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


def relabelled(artifacts, to):
    """The same sets where every training graph says that another program wrote it: other digests,
    the same numbers.
    """
    shutil.copytree(artifacts, to)
    for path in (to / "mlp").glob("*/manifest.json"):
        found = json.loads(path.read_bytes())
        spec = found["graphs"]["onnx/train"]
        model = onnx.load(path.parent / spec["path"])
        model.producer_version = to.name
        data = model.SerializeToString()
        (path.parent / spec["path"]).write_bytes(data)
        ref = blob_ref(data)
        found["graphs"]["onnx/train"] |= {"digest": ref.digest, "size": ref.size}
        path.write_text(json.dumps(found))
    return to


def learnt(store, number):
    """The global weights after a round of the newest run; None where it has not ended yet."""
    with contextlib.closing(Store(store)) as opened:
        version = opened.version(opened.runs()[0].id, number)
    return version and open_tensors(BlobStore(store / "blobs").path(version.digest))


def test_power_cuts_while_sets_are_staged_change_no_bit(lab, ground):
    """Killed at moments drawn over the staging, half of what it fetched lost: it comes back, takes
    the set, and what it trains is what a board trains which nothing happened to.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"SEED={seed}")
    draw = random.Random(seed)
    span = 0.0
    folder, up, board = lab
    up(rounds=100_000)
    one = board(0)
    until(lambda: "state=uploading" in one.log(), one.log)
    blobs = BlobStore(one.folder / "state")

    def half_written():
        for path in (one.folder / "state" / "parts").glob("*"):
            os.truncate(path, path.stat().st_size // 2)
        for digest in new - old:
            if blobs.path(digest).exists():
                os.truncate(blobs.path(digest), blobs.path(digest).stat().st_size // 2)
        (one.folder / "state" / ".index.json.a1b2c3d4").write_bytes(b"{")

    old = manifests(ground.artifacts)
    for number in range(4):
        sets = relabelled(ground.artifacts, ground.folder / f"sets-{number}")
        new = manifests(sets)
        new |= {
            parse_manifest(path.read_bytes()).graphs["onnx/train"].digest
            for path in sets.glob("mlp/*/manifest.json")
        }
        begun = shoal(ground.folder, "--artifacts", sets.name, "--stage", "100")
        assert begun.returncode == 0, begun.stdout + begun.stderr
        began = time.monotonic()
        if number:  # the first one says how long it takes
            threading.Event().wait(draw.uniform(0, span))
            one.left = half_written if number % 2 else None
            one.cut()
        until(
            lambda: read_rollout(folder).judged == {"device-0": ""},
            one.log,
            lambda: read_rollout(folder),
        )
        span = span or time.monotonic() - began
        until(lambda new=new: {*named(ground).values()} <= new and named(ground), one.log)
    print(f"staged undisturbed in {span:.1f} s; ends: {one.codes}")
    until(lambda: one.starts == 4, one.log)  # also where the last cut came after it was judged
    assert one.codes.count(-9) == 3
    with contextlib.closing(Store(ground.folder / "store")) as store:
        (disturbed, *_) = store.runs()
        rounds = store.last_round(disturbed.id).number
    until(lambda: learnt(ground.folder / "store", rounds), one.log)
    seed = json.loads(disturbed.config)["seed"]
    with embedded_broker(ground.folder) as broker:
        config = ground.config(broker.url, rounds=rounds, min_devices=1)
        config = config.model_copy(update={"seed": seed, "store": ground.folder / "alone"})
        devices = ground.devices()[:1]
        with LocalFleet(
            ground.folder / "devices", fleet="test", broker=broker.url, devices=devices, holdout=0.1
        ):
            assert run(config, Watcher()).status == "finished"
    found = learnt(ground.folder / "store", rounds)
    expected = learnt(ground.folder / "alone", rounds)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
