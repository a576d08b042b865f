"""Who is asked, with which tier; strategies; configuration; artifacts."""

import json
import shutil
from dataclasses import replace

import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.collection_end import ClosingRule
from broker_server.rounds.fleet import Fleet
from broker_server.rounds.new_version import first_version
from broker_server.rounds.planning import open_collection, plan_round, task_id
from broker_server.rounds.run_context import prepare_run
from broker_server.rounds.tier_assignment import (
    Assignment,
    assign,
    usable_tiers,
    why_unfit,
)
from broker_server.service.outbox import Outbox
from broker_server.settings.fleet import FleetConfig, TiersConfig
from broker_server.stages.selection import choose, count_wanted
from broker_server.strategies.registry import STRATEGIES
from broker_server.strategies.strategy import PlanRequest
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.configuration import parse_config
from fleet_protocol.errors import BlobError, ConfigError, PlanError
from fleet_protocol.messages import DeviceProfile, DeviceStatus, parse_server_message
from fleet_protocol.topics import Topics
from tests.broker_server.artifacts import ARCH, export_tiny, tiny_layout
from tests.broker_server.methods import built
from tests.broker_server.peer import profile

CHUNK = 1024


@pytest.fixture
def tiers(artifacts):
    return load_artifacts(artifacts, ARCH, chunk_bytes=CHUNK).tiers


def usable(tiers, settings):
    """The artifact sets of the tiers that a configuration allows."""
    allowed = usable_tiers([tier_set.tier for tier_set in tiers.values()], settings)
    return [tiers[tier.id] for tier in allowed]


def given(profiles, tiers, **config):
    settings = TiersConfig(**config)
    found = assign(profiles, usable(tiers, settings), settings)
    return {device: item.tier.tier.id for device, item in found.items()}


def test_a_device_gets_the_largest_tier_it_declares(tiers):
    """Width and free memory both bound it; who has no data, no backend or no room stays out."""
    profiles = {
        "big": profile(),
        "narrow": profile(max_width=0.5),
        "odd": profile(max_width=0.7),
        "full-memory": profile(free_ram_bytes=70_000_000),
        "tiny-memory": profile(free_ram_bytes=10_000_000),
        "unmeasured": profile(free_ram_bytes=0),
        "idle": profile(examples=0),
        "bare": profile(backends={}),
        "thin": profile(max_width=0.25),
        "lowered": profile(
            memory_below=tiers["w1.00-d1"].manifest.peak_memory_bytes, lowered="out of memory"
        ),
        "tiny": profile(
            memory_below=tiers["w0.50-d1"].manifest.peak_memory_bytes, lowered="out of memory"
        ),
    }
    assert given(profiles, tiers) == {
        "big": "w1.00-d1",
        "narrow": "w0.50-d1",
        "odd": "w0.50-d1",
        "full-memory": "w0.50-d1",
        "unmeasured": "w1.00-d1",
        "lowered": "w0.50-d1",
    }


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({}, {}, ""),
        (
            {"unable": "onnxruntime 1 does not work on this board"},
            {},
            "onnxruntime 1 does not work on this board",
        ),
        ({"backends": {}}, {}, "install shoal[device] on it"),
        ({"examples": 0}, {}, "check [data] in its device.toml"),
        (
            {"max_width": 0.25},
            {},
            "none of the tiers w1.00-d1, w0.50-d1 fits it: it has max_width 0.25",
        ),
        ({"max_depth": 1}, {}, ""),
        (
            {"memory_below": 1, "lowered": "training of w0.50-d1 exceeded this board's memory"},
            {},
            "training of w0.50-d1 exceeded",
        ),
        (
            {"free_ram_bytes": 1_000_000},
            {},
            "1000000 bytes of free memory, of which 80% may be used; w0.50-d1 needs",
        ),
        ({"max_width": 0.5}, {"exclude_smaller": True}, "none of the tiers w1.00-d1 fits it"),
    ],
)
def test_who_is_left_out_is_told_why(tiers, changes, config, words):
    """And exactly those are left out."""
    settings = TiersConfig(**config)
    device = profile(**changes)
    said = why_unfit(device, usable(tiers, settings), settings)
    assert words in said
    assert bool(said) == bool(words)
    assert bool(given({"d": device}, tiers, **config)) != bool(said)


def test_baselines_restrict_the_tiers(tiers):
    """AllSmall allows one tier for everybody; Exclusive leaves out who cannot train the whole
    model.
    """
    profiles = {"big": profile(), "narrow": profile(max_width=0.5)}
    assert given(profiles, tiers, allowed=("w0.50-d1",)) == {
        "big": "w0.50-d1",
        "narrow": "w0.50-d1",
    }
    assert given(profiles, tiers, exclude_smaller=True) == {"big": "w1.00-d1"}
    with pytest.raises(ConfigError, match=r"no tier 'w0\.25-d1' is exported"):
        usable(tiers, TiersConfig(allowed=("w0.25-d1",)))


def test_devices_are_drawn_by_seed_and_round(tiers):
    """A share rounded up, at least the minimum, without repetition, and the same again after a
    restart.
    """
    eligible = assign(
        {f"d{i}": profile() for i in range(10)}, usable(tiers, TiersConfig()), TiersConfig()
    )

    def drawn(fraction, least, number):
        wanted = count_wanted(len(eligible), fraction=fraction, least=least)
        return [item.device for item in choose(eligible, wanted=wanted, seed=1, number=number)]

    assert len(drawn(0.25, 1, 1)) == 3
    assert len(drawn(0.1, 4, 1)) == 4
    assert drawn(0.5, 1, 1) == drawn(0.5, 1, 1) == sorted(drawn(0.5, 1, 1))
    assert any(drawn(0.5, 1, 1) != drawn(0.5, 1, number) for number in range(2, 6))
    assert drawn(1.0, 1, 1) == sorted(eligible)


def test_presence_follows_the_status_messages():
    """A device is known by either word; its will takes it offline and keeps what is known about
    it.
    """
    fleet = Fleet()
    assert fleet.receive(DeviceStatus(fleet="lab", device="a", online=True, state="idle"))
    assert fleet.profiles() == {}
    assert not fleet.receive(DeviceProfile(fleet="lab", device="a", profile=profile()))
    assert not fleet.receive(DeviceStatus(fleet="lab", device="a", online=True, state="training"))
    assert list(fleet.profiles()) == ["a"]
    assert fleet.receive(DeviceStatus(fleet="lab", device="a", online=False, state="gone"))
    assert fleet.profiles() == {}
    assert fleet.knows("a")
    assert not fleet.knows("b")


def test_task_ids_are_names_that_fit_a_topic():
    """The same part gets the same id, another part another one, however long the names are."""
    long = "x" * 64
    assert task_id(long, 3, "train", long) == task_id(long, 3, "train", long)
    assert (
        len(
            {
                task_id("r", n, k, d)
                for n in (1, 2)
                for k in ("train", "statistics")
                for d in ("a", "b")
            }
        )
        == 8
    )
    assert len(task_id(long, 10**6, "statistics", long)) <= 64


def test_random_plans_are_the_devices_own_and_static_ones_are_shared():
    """Federated Dropout draws for every device; a static or rolling plan depends on the tier
    alone.
    """
    layout = tiny_layout()
    tier = layout.tier(0.5)

    def plan(kind, device, version=0):
        return built({"plan": kind}, layout).plan(PlanRequest(tier, device, version, 1))

    for kind in ("static", "rolling"):
        assert plan(kind, "a").key == plan(kind, "b").key
    assert plan("random", "a").key != plan("random", "b").key
    drawn = {tuple(plan("random", device).plan.indices["hidden"]) for device in "abcdefgh"}
    assert len(drawn) > 1
    assert tuple(plan("rolling", "a", 1).plan.indices["hidden"]) == (1, 2, 3, 4)


def test_fedavg_is_the_full_tier_weighted_by_samples():
    """It refuses to start where the whole model is not exported or not allowed."""
    layout = tiny_layout()
    chosen = built({"name": "fedavg"}, layout, [layout.tier(1.0), layout.tier(0.5)])
    assert chosen.tiers == (layout.tier(1.0),)
    with pytest.raises(PlanError, match="full tier"):
        built({"name": "fedavg"}, layout, [layout.tier(0.5)])


def test_an_unknown_strategy_is_named_with_a_suggestion():
    """The registry cannot be changed from outside."""
    with pytest.raises(ConfigError, match="did you mean 'heterofl'"):
        built({"name": "hetrofl"}, tiny_layout())
    with pytest.raises(TypeError):
        STRATEGIES["mine"] = None


class Letterbox:
    """Keeps what is published instead of sending it."""

    def __init__(self):
        self.payloads = []

    def publish(self, _topic, payload, **_options):
        self.payloads.append(payload)


@pytest.fixture
def offered_rates(artifacts, tmp_path):
    """From the text of a fleet.toml and numbers of rounds to the learning rates in the offers a
    device would get.
    """

    def rates(train, numbers):
        text = f"""
fleet = "lab"
model = {{ artifacts = "{artifacts}", arch = "{ARCH}" }}
[round]
rounds = 2000
[train]
{train}
"""
        config = parse_config(text, FleetConfig, source="fleet.toml")
        context = prepare_run("run", config, load_artifacts(artifacts, ARCH, chunk_bytes=CHUNK))
        blobs = BlobStore(tmp_path / "blobs")
        start = first_version(context, blobs)
        chosen = [Assignment("a", context.tiers[0])]
        letters = Letterbox()
        for number in numbers:
            tasks = plan_round(
                context, chosen, replace(start, number=number - 1), number, blobs
            ).tasks
            collection = open_collection(
                context, tasks, ClosingRule(share=1.0, wanted=1, opened=0.0, deadline=60.0)
            )
            Outbox(letters, Topics("lab"), tmp_path).offer(
                tasks[0], collection.tasks[tasks[0].id].instructions, 1.0
            )
        return [parse_server_message(payload).train.learning_rate for payload in letters.payloads]

    return rates


def test_the_learning_rate_steps_after_a_milestone(offered_rates):
    """Vector H11 for HeteroFL: milestone 150 first acts in the offers of round 151."""
    train = "learning_rate = 0.1\nmilestones = [150, 250]\nfactor = 0.1"
    rates = offered_rates(train, (1, 150, 151, 250, 251))
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


def test_the_learning_rate_steps_before_a_round_where_asked(offered_rates):
    """Vector H11 for FedRolex: milestone 800 already acts in the offers of round 800, and with
    ``after`` in 801.
    """
    train = "learning_rate = 2e-4\nmilestones = [800, 1200]\nfactor = 0.25\n"
    before = offered_rates(train + 'schedule = "before"', (799, 800, 1199, 1200))
    assert before == pytest.approx([2e-4, 5e-5, 5e-5, 1.25e-5])
    after = offered_rates(train + 'schedule = "after"', (800, 801, 1200, 1201))
    assert after == pytest.approx([2e-4, 5e-5, 5e-5, 1.25e-5])


def test_a_wrong_configuration_names_the_key():
    """An unknown key gets a suggestion; milestones must ascend."""
    text = 'fleet = "lab"\n[model]\narch = "conv"\n[round]\nround = 3\n'
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        parse_config(text, FleetConfig, source="fleet.toml")
    with pytest.raises(ConfigError, match="must ascend"):
        parse_config(
            'fleet="l"\n[model]\narch="c"\n[train]\nmilestones=[3,2]', FleetConfig, source="f"
        )


def test_relative_paths_start_where_the_configuration_lies(tmp_path):
    """Store, artifacts, test set and certificates all move; absolute paths stay."""
    text = """
fleet = "lab"
store = "runs"
[broker]
url = "mqtts://h"
ca_file = "ca.pem"
[model]
arch = "conv"
weights = "/abs/w.safetensors"
[evaluation]
data = {kind = "idx", path = "x", labels = "y"}
tiers = ["w1.00-d2"]
tier_data = {"w1.00-d2" = {kind = "npz", path = "z"}}
"""
    config = parse_config(text, FleetConfig, source="f").resolved(tmp_path)
    assert config.store == tmp_path / "runs"
    assert config.broker.ca_file == tmp_path / "ca.pem"
    assert config.model.artifacts == tmp_path / "artifacts"
    assert str(config.model.weights) == "/abs/w.safetensors"
    assert (config.evaluation.data.path, config.evaluation.data.labels) == (
        tmp_path / "x",
        tmp_path / "y",
    )
    assert config.evaluation.tier_data["w1.00-d2"].path == tmp_path / "z"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('tiers = ["w1.00-d2"]', "need evaluation.data"),
        (
            (
                'data = {kind = "npz", path = "x"}\ntier_data = {"w1.00-d2" = {kind = "npz", path = '
                '"z"}}'
            ),
            "name it in evaluation.tiers",
        ),
    ],
)
def test_a_test_set_that_nobody_is_judged_on_is_refused(table, message):
    """Tiers need a test set, and a test set of a tier needs the tier."""
    with pytest.raises(ConfigError, match=message):
        parse_config(
            f'fleet = "l"\n[model]\narch = "c"\n[evaluation]\n{table}', FleetConfig, source="f"
        )


def test_incomplete_artifacts_are_an_error_that_says_what_to_do(tmp_path):
    """A missing folder, a missing graph and a manifest of another layout are each named."""
    with pytest.raises(ConfigError, match=r"nothing is exported there.*shoal export --arch tiny"):
        load_artifacts(tmp_path, ARCH, chunk_bytes=CHUNK)
    export_tiny(tmp_path)
    with pytest.raises(ConfigError, match="it contains tiny"):
        load_artifacts(tmp_path, "conv", chunk_bytes=CHUNK)
    (tmp_path / ARCH / "w0.50-d1" / "eval.onnx").unlink()
    with pytest.raises(ConfigError, match=r"eval\.onnx is missing"):
        load_artifacts(tmp_path, ARCH, chunk_bytes=CHUNK)
    (tmp_path / ARCH / "layout.json").write_text(tiny_layout(hidden=10).to_json())
    with pytest.raises(ConfigError, match=r"and of layout\.json differ"):
        load_artifacts(tmp_path, ARCH, chunk_bytes=CHUNK)


def test_initial_weights_must_fit(tmp_path, artifacts):
    """A file of another model is refused with the name of the tensor."""
    other = tmp_path / "w.safetensors"
    export_tiny(tmp_path, tiny_layout(hidden=10))
    (tmp_path / ARCH / "init.safetensors").rename(other)
    found = load_artifacts(artifacts, ARCH, chunk_bytes=CHUNK, weights=other)
    with pytest.raises(
        ConfigError, match=r"hidden\.weight should be float32 \(8, 6\) but is float32 \(10, 6\)"
    ):
        found.initial_weights()


@pytest.mark.parametrize(
    "change", [{"arch": "\x1b]0;x\x07" * 5000}, {"arch": "a\nb"}, {"\x1b[2J" * 5000: 1}]
)
def test_a_manifest_has_plain_names(tmp_path, artifacts, change):
    """What a set calls itself is short and moves no cursor, and the refusal shows it that way."""
    folder = tmp_path / "set"
    shutil.copytree(artifacts, folder)
    (place, *_) = folder.glob(f"{ARCH}/*/manifest.json")
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"manifest\.json: not an artifact manifest") as caught:
        load_artifacts(folder, ARCH, chunk_bytes=CHUNK)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000


@pytest.mark.attack(
    "file",
    "The weights of a set are replaced by a link after the set was read",
    "refused with an error that names the file",
    "2026-11-28",
)
def test_initial_weights_are_not_read_through_a_link_that_came_later(tmp_path, artifacts):
    """Whoever wrote the set may put a link in the place of a file once it was read; a user's own
    link counts.
    """
    shutil.copytree(artifacts, tmp_path / "set")
    found = load_artifacts(tmp_path / "set", ARCH, chunk_bytes=CHUNK)
    init = tmp_path / "set" / ARCH / "init.safetensors"
    init.rename(tmp_path / "elsewhere.safetensors")
    init.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(BlobError, match=r"init\.safetensors is not read: it is a link"):
        found.initial_weights()
    own = load_artifacts(artifacts, ARCH, chunk_bytes=CHUNK, weights=init)
    assert own.initial_weights()


@pytest.mark.attack(
    "file",
    "A folder of a set is replaced by a link after the set was read",
    "the weights are refused with an error that names the file",
    "2026-11-28",
)
@pytest.mark.parametrize("depth", [0, 1])
def test_initial_weights_are_not_read_through_a_folder_that_became_a_link(
    depth, tmp_path, artifacts
):
    """Of the architecture, or of all sets."""
    shutil.copytree(artifacts, tmp_path / "set")
    found = load_artifacts(tmp_path / "set", ARCH, chunk_bytes=CHUNK)
    folder = [tmp_path / "set" / ARCH, tmp_path / "set"][depth]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlobError, match=r"init\.safetensors is not read: .* is a link"):
        found.initial_weights()
    assert load_artifacts(tmp_path / "set", ARCH, chunk_bytes=CHUNK).initial_weights()


def test_what_is_kept_of_a_run_has_no_login(artifacts):
    """Whoever may look at a store, or at its page, does not get into the broker by that."""
    model = {"artifacts": artifacts, "arch": ARCH}
    config = FleetConfig.model_validate(
        {
            "fleet": "lab",
            "model": model,
            "broker": {"url": "mqtt://user:p@ss@lab:1884", "listen": "::"},
        }
    )
    kept = (
        prepare_run("run", config, load_artifacts(artifacts, ARCH, chunk_bytes=CHUNK))
        .initial_record()
        .config
    )
    assert FleetConfig.stored(kept).broker == config.broker.model_copy(
        update={"url": "mqtt://lab:1884"}
    )
