"""Plans of a tier: which of them a device gets, and what the server refuses to read."""

import shutil
from dataclasses import replace

import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.new_version import first_version
from broker_server.rounds.planning import plan_round
from broker_server.rounds.run_context import ReleasedSet, prepare_run
from broker_server.rounds.tier_assignment import assign, why_unfit
from broker_server.settings.fleet import FleetConfig, TiersConfig
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.memory_plans import plan_file
from tests.broker_server.artifacts import ARCH
from tests.broker_server.peer import profile

WIDE = "w1.00-d1"
PLANS = {"60MB": (60_000_000, 0.1), "40MB": (40_000_000, 0.5)}
"""Peaks and repeated work; the tiers of the tiny set need 100 and 50 MB."""


def write_plans(artifacts, **changes):
    """Add plans to the wide tier."""
    folder = artifacts / ARCH / WIDE
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    for name, (peak, share) in PLANS.items():
        update = {"peak_memory_bytes": peak, "recomputed_share": share, **changes}
        plan = manifest.model_copy(update=update)
        (folder / plan_file(name)).write_bytes(plan.to_bytes())


@pytest.fixture
def copied(artifacts, tmp_path):
    """A copy of the set that all tests of the session share."""
    return shutil.copytree(artifacts, tmp_path / "artifacts")


@pytest.fixture
def loaded(copied):
    write_plans(copied)
    return load_artifacts(copied, ARCH, chunk_bytes=1024)


def given(loaded, tmp_path, **profiles):
    """Tier and peak of what the devices with these profiles are offered."""
    text = {"fleet": "lab", "model": {"artifacts": tmp_path, "arch": ARCH}}
    context = prepare_run("run", FleetConfig.model_validate(text), loaded)
    assigned = assign(profiles, context.tiers, TiersConfig())
    blobs = BlobStore(tmp_path / "blobs")
    tasks = plan_round(context, list(assigned.values()), first_version(context, blobs), 1, blobs)
    found = {}
    for task in tasks.tasks:
        path = loaded.files[task.artifact_set.digest]
        found[task.device] = (task.tier, parse_manifest(path.read_bytes()).peak_memory_bytes)
    return found


def test_a_device_gets_the_fastest_plan_within_its_memory(loaded, tmp_path):
    """The bound is the share 0.8 of the free memory, or what killed the device before."""
    wide = loaded.tiers[WIDE].manifest.peak_memory_bytes
    assert given(
        loaded,
        tmp_path,
        roomy=profile(),
        unmeasured=profile(free_ram_bytes=0),
        exact=profile(free_ram_bytes=int(wide / 0.8)),
        middle=profile(free_ram_bytes=int((wide - 1) / 0.8)),
        small=profile(free_ram_bytes=51_000_000),
        killed=profile(memory_below=wide),
        twice=profile(memory_below=60_000_000),
    ) == {
        "roomy": (WIDE, wide),
        "unmeasured": (WIDE, wide),
        "exact": (WIDE, wide),
        "middle": (WIDE, 60_000_000),
        "small": (WIDE, 40_000_000),
        "killed": (WIDE, 60_000_000),
        "twice": (WIDE, 40_000_000),
    }


def test_a_device_without_the_memory_for_any_plan_is_refused(loaded):
    """The message names the tier with the smallest plan, and what that needs."""
    tiers = list(loaded.tiers.values())
    reason = why_unfit(profile(free_ram_bytes=30_000_000), tiers, TiersConfig())
    assert f"30000000 bytes of free memory, of which 80% may be used; {WIDE} needs 40" in reason


def test_a_device_without_the_memory_for_a_tested_set_keeps_its_plan(loaded, tmp_path):
    """A rollout replaces the set of a device only where that has the memory for the new one."""
    text = {"fleet": "lab", "model": {"artifacts": tmp_path, "arch": ARCH}}
    context = prepare_run("run", FleetConfig.model_validate(text), loaded)
    tier_set = loaded.tiers[WIDE]
    new = blob_ref(b"new", 1024)
    tested = {WIDE: [ReleasedSet(tier_set.manifest, new)]}
    context = replace(context, sets=lambda _device: tested)
    assert context.set_of("a", tier_set) == new
    assert context.set_of("a", tier_set, tier_set.manifest.peak_memory_bytes) == new
    assert context.set_of("a", tier_set, 61_000_000) == tier_set.plans[0].ref
    # Nothing fits, so the tested set is as good as any.
    assert context.set_of("a", tier_set, 1_000) == new


def test_a_device_gets_the_fastest_plan_of_a_tested_set_within_its_memory(loaded, tmp_path):
    """As of the run's set; a rollout brings the plans of its sets."""
    text = {"fleet": "lab", "model": {"artifacts": tmp_path, "arch": ARCH}}
    context = prepare_run("run", FleetConfig.model_validate(text), loaded)
    tier_set = loaded.tiers[WIDE]
    tested = []
    for variant in tier_set.variants:
        name = f"new {variant.manifest.peak_memory_bytes}".encode()
        tested.append(ReleasedSet(variant.manifest, blob_ref(name, 1024)))
    context = replace(context, sets=lambda _device: {WIDE: tested})
    whole, fast, small = (variant.ref for variant in tested)
    assert context.set_of("a", tier_set) == whole
    assert context.set_of("a", tier_set, 61_000_000) == fast
    assert context.set_of("a", tier_set, 41_000_000) == small


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"tier": "w0.50-d1"}, "tier differs"), ({"parameters": ()}, "parameters differs")],
)
def test_a_plan_of_another_set_is_not_read(copied, changes, says):
    """Its updates could have another meaning."""
    write_plans(copied, **changes)
    with pytest.raises(ConfigError, match=rf"plan-40MB.json: {says} from manifest.json"):
        load_artifacts(copied, ARCH, chunk_bytes=1024)
