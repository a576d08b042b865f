"""Other artifact sets for a run in progress: which may take the place of its own, for which boards,
and how long.
"""

import json
import shutil
import time
from dataclasses import replace

import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.other_sets import load_other_sets
from broker_server.rounds.run_context import prepare_run
from broker_server.service.authority import found_fleet
from broker_server.service.new_fleet import NewFleet
from broker_server.service.rollout import read_rollout, start_rollout, store_rollout
from broker_server.service.rollout_service import RolloutService
from broker_server.store import Store
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import DeviceProfile, DeviceStatus
from tests.broker_server.artifacts import ARCH
from tests.broker_server.peer import profile


@pytest.fixture
def others(artifacts, tmp_path):
    """Write the sets once more, with manifests that were changed."""

    def write(change):
        shutil.copytree(artifacts, tmp_path / "others")
        for path in (tmp_path / "others").glob("*/*/manifest.json"):
            document = json.loads(path.read_bytes())
            change(document)
            path.write_text(json.dumps(document))
        return tmp_path / "others"

    return write


def clipped(document):
    document["recipe"]["clip_norm"] = 0.5


def test_another_recipe_may_take_the_place_in_the_chunks_of_the_run(config, others):
    """What is computed is another thing; what the numbers of an update mean is not."""
    found = load_other_sets(config(), others(clipped))
    assert {item.ref.chunk_bytes for item in found.tiers.values()} == {1024}


@pytest.mark.parametrize(
    ("change", "train", "words"),
    [
        (
            lambda d: d["settings"].update(more=1),
            {},
            "settings of w1.00-d1 differ from those in the run in progress",
        ),
        (lambda d: d["parameters"][0].update(axes=["x", "y"]), {}, "parameters of w1.00-d1"),
        (lambda d: d["recipe"]["loss"].update(name="other"), {}, "recipe.loss of w1.00-d1"),
        (lambda d: d["graphs"].pop("onnx/stats"), {}, "graph onnx/stats of w1.00-d1"),
        (
            lambda d: d["states"].append({"name": "m", "shape": []}),
            {"optimizer_state": "keep"},
            "states of w1.00-d1",
        ),
        (clipped, {"micro_batch": 2}, "supports only whole batches"),
    ],
)
def test_what_would_not_add_up_is_refused(config, others, change, train, words):
    """Before anything is signed."""
    with pytest.raises((ConfigError, PlanError), match=words):
        load_other_sets(config(train=train), others(change))


def test_a_tier_that_is_missing_is_named(config, others, artifacts):
    """The boards that train it would have none."""
    folder = others(clipped)
    (least,) = {path.name for path in (folder / ARCH).glob("w0.5*")}
    shutil.rmtree(folder / ARCH / least)
    with pytest.raises(ConfigError, match=f"no tier {least}, which the run in progress trains"):
        load_other_sets(config(), folder)


class Blobs:
    """What is offered."""

    def forget(self, device):
        """A device that is away needs nothing."""

    def serve(self, files, chunk_bytes=None):
        self.files = files
        self.chunk_bytes = chunk_bytes


def test_tasks_name_them_for_boards_that_have_passed(  # noqa: PLR0915  (one story)
    config, others, artifacts, tmp_path, monkeypatch
):
    """Until a board fails, or the rollout stops; never in a run of another model."""
    folder = tmp_path / "lab"
    settings = config()
    found_fleet(folder, NewFleet("lab", "h"))
    new = load_other_sets(settings, others(clipped))
    start_rollout(folder, {}, 90, new, stages=(1.0,), within_seconds=60.0, most_failed=0.5, gate=1)
    number = read_rollout(folder).release.number
    service = RolloutService(folder, lambda: dict.fromkeys("ab", b'{"revoked": "00"}'))
    blobs = Blobs()
    monkeypatch.setattr("broker_server.service.rollout_service._LOOK_SECONDS", 0.0)
    context = prepare_run("r", settings, load_artifacts(artifacts, ARCH, chunk_bytes=1024))
    context = replace(context, sets=service.sets)
    (item, *_), other = context.tiers, new.tiers

    def named(store, **lines):
        fleet = Fleet()
        for name, line in lines.items():
            fleet.receive(DeviceStatus(fleet="lab", device=name, online=True, state="idle"))
            fleet.receive(DeviceProfile(fleet="lab", device=name, profile=profile(sets=line)))
        service.update(fleet, blobs, store)
        return {name for name in lines if context.set_of(name, item) == other[item.tier.id].ref}

    begun = "running 0 0 0"
    passed = f"running {number} 0 0"
    store = Store(tmp_path / "store")
    try:
        assert named(store, a=begun, b=begun) == set()
        assert set(read_rollout(folder).asked) == {"a", "b"}
        assert {
            spec.digest for spec in other[item.tier.id].manifest.graphs.values()
        } <= blobs.files.keys()
        assert blobs.chunk_bytes == 1024
        assert named(store, a=begun, b=passed) == {"b"}
        assert named(store, a=passed, b=passed) == {"a", "b"}
        judged = read_rollout(folder).model_copy(update={"judged": {"a": "in a round: it died"}})
        store_rollout(folder, lambda: judged)
        assert named(store, a=passed, b=passed) == {"b"}
        service._began = 0.0  # who was asked before has its time again
        assert named(store, a=passed, b=passed) == {"b"}
        late = {"asked": {"a": time.time() - 61, "b": time.time()}, "judged": {}}
        store_rollout(folder, lambda: judged.model_copy(update=late))
        assert named(store, a=passed, b=passed) == {"b"}  # silent since
        strange = replace(item, manifest=item.manifest.model_copy(update={"arch": "another"}))
        assert context.set_of("b", strange) == item.ref
        store_rollout(folder, lambda: judged.model_copy(update={"stopped": "too many failed"}))
        assert named(store, a=passed, b=passed) == set()
        store_rollout(folder, lambda: judged)
        members = {"b"}
        service = RolloutService(folder, lambda: {"b": b'{"revoked": "00"}'}, lambda: members)
        fleet = Fleet()
        for name in "ab":
            store.record_device(DeviceStatus(fleet="lab", device=name, online=True, state="idle"))
            fleet.receive(DeviceStatus(fleet="lab", device=name, online=True, state="idle"))
        service.update(fleet, blobs, store)
        assert set(read_rollout(folder).asked) == {
            "b"
        }  # a was revoked, and is waited for no longer
        assert fleet.online == ("b",)
        assert [(device.id, device.online, device.state) for device in store.devices()] == [
            ("a", False, "revoked"),
            ("b", True, "idle"),
        ]
        store.record_device(DeviceProfile(fleet="lab", device="a", profile=profile()))
        assert (
            Fleet(store.devices()).limit_to_members({"b"}) == []
        )  # which a server that starts again need not say once more
        members.add(
            "a"
        )  # as after a time of a wrong clock: a board that is connected says nothing new
        service.update(fleet, blobs, store)
        assert fleet.online == ("a", "b")
        assert [(device.online, device.state) for device in store.devices()] == [(True, "idle")] * 2
    finally:
        store.close()
