"""Every arm of every table, at every scale, without training."""

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest

from broker_server.settings.assignment import parse_mix
from broker_server.settings.fleet import FleetConfig
from device_runtime.training.choosers.adaptive import Progress, choose
from fleet_protocol.errors import ConfigError
from models.registry import Registry
from reproduction import table_file
from reproduction.experiment import SCALES, merged
from reproduction.report.differences import Difference, differences, grouped
from reproduction.table_file import TABLES, find_experiment, parse_scale
from simulation.clock import Load, load_clock
from simulation.data.datasets import DATASETS, load_dataset
from simulation.data.images import CIFAR_TASKS
from simulation.data.split import split_data
from tests.simulation.data_folder import FOLDER, needs

EVERY_ARM = [
    pytest.param(experiment, arm, id=f"{experiment.table}-{arm.name}")
    for experiment in TABLES.values()
    for arm in experiment.arms
]
ISSUE = {
    "heterofl-1", "heterofl-2", "heterofl-3",
    "fedrolex-3", "fedrolex-4", "fedrolex-gamma", "fedrolex-repeat",
    "inclusivefl-2", "inclusivefl-4", "inclusivefl-5",
    "whalefl-1", "whalefl-static", "whalefl-mild", "whalefl-strong", "whalefl-ablations", "whalefl-repeat",
    "fml-1", "fml-models", "fml-repeat", "fml-tasks",
    "fedrolex-sbn", "fedrolex-long", "fml-rates", "fml-full", "whalefl-plain", "heterofl-4",
    "heterofl-lg", "fedrolex-rho", "fedrolex-ablations", "fedrolex-bounds", "inclusivefl-depths",
    "whalefl-alpha", "whalefl-tasks", "fml-fedprox", "fml-catfish",
    "beyond-1", "beyond-repeat", "depthfl-1", "depthfl-2", "private-1", "shares-1",
}  # fmt: skip


def test_the_tables_asked_for_are_there():
    """Those of the papers, of their methods under conditions that change, and of all methods
    together.
    """
    assert set(TABLES) == ISSUE


@pytest.mark.parametrize(("experiment", "arm"), EVERY_ARM)
def test_an_arm_is_a_valid_simulation_at_every_scale(experiment, arm, tmp_path):
    """It validates as a simulation and as the fleet it simulates; models, settings, data and levels
    exist.
    """
    for scale in SCALES:
        config = arm.config(scale, 3, out=tmp_path)
        fleet = config.fleet(artifacts=tmp_path, weights=tmp_path / "w", test_set=tmp_path / "t")
        assert isinstance(fleet, FleetConfig)
        assert config.seed == 3
        Registry.zoo().get(config.model.arch).settings(config.model.settings)
        assert config.data.name in DATASETS
        assert max(config.model.widths) == 1.0
        if config.tiers.levels is not None:
            mix = parse_mix(config.tiers.levels)
            used = {mix.width(level.rate) for level in mix.levels if level.weight}
            assert used <= set(config.model.widths), "a level that is drawn has no tier"
        for kind in config.devices.types:
            assert (
                kind.max_depth is None
                or config.model.depths is None
                or kind.max_depth in config.model.depths
            )
            assert any(width <= kind.max_width for width in config.model.widths)


@pytest.mark.parametrize(("experiment", "arm"), EVERY_ARM)
def test_what_an_arm_measures_is_judged(experiment, arm):
    """A figure of the devices' own data needs their parts of the test set to be judged."""
    local = {"local", "own", "own-worst"} & {measure.name for measure in arm.measures}
    for scale in SCALES:
        assert not local or arm.config(scale, 1).evaluation.local
    assert set(arm.published) <= {measure.name for measure in arm.measures}


@pytest.mark.parametrize("experiment", TABLES.values(), ids=TABLES)
def test_names_within_a_table_fit_together(experiment):
    """Arms have names and folders of their own; selections and claims speak of arms that exist."""
    names = [arm.name for arm in experiment.arms]
    assert len(set(names)) == len({arm.folder for arm in experiment.arms}) == len(names)
    assert all("/" not in arm.folder and "," not in arm.name for arm in experiment.arms)
    for scale in SCALES:
        assert experiment.chosen(scale)
        assert experiment.seeds[scale]
        assert experiment.decides[scale] >= 1
    for claim in experiment.claims:
        for name in filter(None, (claim.left, claim.right)):
            assert claim.measure in {measure.name for measure in experiment.arm(name).measures}


@pytest.mark.parametrize("experiment", TABLES.values(), ids=TABLES)
def test_a_claim_can_be_decided(experiment):
    """One seed decides nothing: a table that claims something is run with several at the scale of
    its verdicts.
    """
    claimed = any(claim.says for claim in experiment.claims)
    assert not claimed or len(experiment.seeds["small"]) > 1


def test_an_ablation_differs_from_the_whole_in_one_thing():
    """Constants of the method or limits of the devices, of the arm that the table of strong changes
    has with bounds.
    """
    experiment = find_experiment("whalefl-ablations")
    whole, *arms = (arm.config("small", 3) for arm in experiment.arms)
    strong = find_experiment("whalefl-strong").arm("whalefl/iid").config("small", 3)
    assert {item.key for item in differences(whole, strong)} == {
        "robust.norm_bound",
        "robust.weight_bound",
    }
    found = {
        arm.name: {item.key for item in differences(whole, config)}
        for arm, config in zip(experiment.arms[1:], arms, strict=True)
    }
    own = "strategy.whalefl."
    assert found.pop("released") == {
        own + name for name in ("efficiency", "gamma", "stall", "step", "theta")
    }
    assert found.pop("training-only") == {own + "arm", own + "fixed"}
    assert all(len(keys) == 1 for keys in found.values())
    assert all(
        key.startswith(own) or key == "devices.types" for keys in found.values() for key in keys
    )
    assert len({tuple(map(str, differences(whole, config))) for config in arms}) == len(arms)


@pytest.mark.parametrize(
    ("table", "before", "arm_before", "but"),
    [
        ("fedrolex-repeat", "fedrolex-3", "{}", set()),
        (
            "whalefl-repeat",
            "whalefl-mild",
            "{}/non-iid-5",
            {"robust.norm_bound", "robust.weight_bound", "round.rounds"},
        ),
    ],
)
def test_a_repeated_table_is_the_same_with_other_seeds(table, before, arm_before, but):
    """But for what its note says: that of WHALE-FL merges every update, and its runs end sooner."""
    again = find_experiment(table)
    first = find_experiment(before)
    assert not set(again.seeds["small"]) & set(first.seeds["small"])
    for arm in again.arms:
        found = differences(
            arm.config("small", 6), first.arm(arm_before.format(arm.name)).config("small", 6)
        )
        assert {item.key for item in found} == but


@pytest.mark.parametrize("scale", SCALES)
def test_both_models_of_a_device_are_of_one_size_where_the_clock_says_so(scale):
    """Of beyond-1, whose notes and loads are of two alike; the second had been the zoo's own, 250
    times as large.
    """
    config = find_experiment("beyond-1").arm("fml").config(scale, 1)
    (own,) = config.own_models.models
    assert (own.arch, dict(own.settings)) == (config.model.arch, dict(config.model.settings))


def test_tables_are_run_in_an_order():
    """The headline ones first; no two have one rank."""
    ranks = {experiment.rank: name for name, experiment in TABLES.items()}
    assert len(ranks) == len(TABLES)
    assert [ranks[rank] for rank in sorted(ranks)][:2] == ["fedrolex-3", "heterofl-1"]


@pytest.mark.parametrize("experiment", TABLES.values(), ids=TABLES)
def test_evaluations_that_decide_are_there_and_after_the_last_change_of_the_rate(experiment):
    """At the scale small, of arms that are judged by the mean of the last evaluations."""
    for arm in experiment.chosen("small"):
        config = arm.config("small", 1)
        evaluated = range(config.evaluation.every, config.round.rounds + 1, config.evaluation.every)
        changes = [closed for closed in config.train.milestones if closed < config.round.rounds]
        assert evaluated[-experiment.decides["small"]] > max(changes, default=0)


@pytest.mark.parametrize("experiment", TABLES.values(), ids=TABLES)
def test_the_paper_scale_runs_every_arm(experiment):
    """Only the smaller scales leave arms out by default."""
    assert experiment.chosen("paper") == experiment.arms


def test_smaller_scales_are_smaller():
    """Smoke trains less than small, small less than the paper, in every arm."""
    for experiment in TABLES.values():
        for arm in experiment.arms:
            smoke, small, paper = (arm.config(scale, 1).round.rounds for scale in SCALES)
            assert smoke <= 3, arm.name
            assert smoke < small <= paper, arm.name


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: find_experiment("heterofl1"), "heterofl-1"),
        (lambda: find_experiment("fedrolex"), "fedrolex-"),
        (lambda: parse_scale("smal"), "small"),
        (lambda: find_experiment("heterofl-1").arm("a-b-c-d-e"), "a-b-c-d-e/iid"),
        (lambda: find_experiment("whalefl-1").arm("?"), "whalefl/non-iid-2"),
    ],
)
def test_unknown_names_get_a_suggestion(call, word):
    """Tables, scales and arms."""
    with pytest.raises(ConfigError, match=word):
        call()


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ("rank = 1", "rnk = 1", "did you mean 'rank'"),
        ("when.scale", "wen.scale", "did you mean 'when'"),
        ("when.scale", "when.sclae", "unknown axis 'sclae'"),
        ('"{method}/{data}-{spread}"', '"{methd}/{data}"', "nor a layer defines the word 'methd'"),
        ('["global"]', '["globl"]', "unknown measure 'globl'"),
        ("at_least = 0.0", "", "needs both `says` and a bound"),
        (
            '  "FedRolex is above HeteroFL, cifar10, low',
            '  "FedRolex is',
            "no claim says 'FedRolex is het",
        ),
    ],
)
def test_a_mistake_in_a_tables_file_is_an_error(tmp_path, monkeypatch, before, after, word):
    """It names the file and what is wrong; unknown keys with a suggestion."""
    for path in Path(table_file.__file__).with_name("tables").glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(table_file, "_FOLDER", tmp_path)
    table_file.read_table("fedrolex-3")
    for path in tmp_path.glob("*fedrolex*"):
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ConfigError, match=word):
        table_file.read_table("fedrolex-3")


def test_a_repeated_claim_has_other_or_further_seeds_and_the_same_bounds():
    """Tables that were stated to repeat others share no seed with them."""
    repeated = 0
    for experiment in TABLES.values():
        for claim in experiment.claims:
            if claim.says not in experiment.repeated:
                continue
            other = find_experiment(experiment.repeated[claim.says])
            bounds = (claim.measure, claim.how, claim.at_least, claim.at_most)
            others = {(c.measure, c.how, c.at_least, c.at_most) for c in other.claims if c.says}
            assert bounds in others
            shares = set(experiment.seeds["small"]) & set(other.seeds["small"])
            assert bool(shares) != other.table.endswith("-repeat")
            repeated += 1
    assert repeated == 10


def test_two_tasks_have_the_labels_of_their_own_sets():
    """What the file writes out is what the data set holds."""
    models = find_experiment("fml-tasks").arm("fml").config("paper", 1).own_models.models
    assert tuple(model.labels for model in models) == tuple(map(tuple, CIFAR_TASKS))


def test_merging_settings_joins_tables_and_leaves_the_layers_alone():
    """Later layers win, key by key."""
    base = {"a": {"x": 1, "y": 2}, "b": (1, 2)}
    assert merged(base, {"a": {"y": 3}, "b": (4,)}) == {"a": {"x": 1, "y": 3}, "b": (4,)}
    assert base == {"a": {"x": 1, "y": 2}, "b": (1, 2)}


def test_differences_are_found_and_grouped():
    """A changed, an added and an unchanged key; what holds for all arms names none."""
    experiment = find_experiment("heterofl-1")
    mixed, single = (experiment.arm(name) for name in ("a-b-c-d-e/iid", "a/iid"))
    found = {
        arm.name: differences(arm.config("paper", 1), arm.config("small", 1))
        for arm in (mixed, single)
    }
    judged = (
        Difference("evaluation.every", "1", "5"),
        Difference("evaluation.statistics_fraction", "1", "0.1"),
    )
    assert found["a/iid"] == (*judged, Difference("round.rounds", "200", "10"))
    assert grouped(found) == (
        *judged,
        Difference("round.rounds", "200", "10", ("a/iid",)),
        Difference("round.rounds", "200", "40", ("a-b-c-d-e/iid",)),
    )
    assert differences(mixed.config("small", 1, out="x"), mixed.config("small", 2, out="y")) == ()


@needs("mnist")
def test_whalefls_seeds_are_the_first_whose_splits_can_be_learnt():
    """Every label is with a device of full width."""
    data = load_dataset("mnist", FOLDER)
    first = find_experiment("whalefl-1")
    assert learnable(first.arm("heterofl/non-iid-2"), data, range(1, 6)) == first.seeds["small"]
    again = find_experiment("whalefl-repeat")
    assert learnable(again.arm("heterofl"), data, range(6, 12)) == again.seeds["small"]


def learnable(arm, data, seeds):
    """The seeds whose split does that."""
    can = []
    for seed in seeds:
        config = arm.config("small", seed, out="x")
        full = [kind.max_width == 1.0 for kind in config.devices.kinds]
        parts = itertools.compress(split_data(config, data).train, full)
        if len(np.unique(data.train_y[np.concatenate(list(parts))])) == data.classes:
            can.append(seed)
    return tuple(can)


def round_times(table, arm):
    """Nominal seconds of every device's round at its maximum width."""
    config = find_experiment(table).arm(arm).config("paper", 1)
    clock = load_clock(config.clock)
    return [
        clock.device_seconds(
            clock.device(kind.type, kind.link),
            Load(kind.max_width, samples=64, steps=config.train.steps or 0),
        )
        for kind in config.devices.kinds
    ]


def test_the_clock_decides_the_widths_of_whalefl():
    """A HeteroFL round takes as long as the Xavier at full width, a FedAvg round as long as the
    slowest board.
    """
    fedavg, heterofl = (
        max(round_times("whalefl-1", f"{name}/non-iid-2")) for name in ("fedavg", "heterofl")
    )
    assert fedavg == pytest.approx(33.988665)  # vector W3
    assert heterofl == pytest.approx(0.04070369 * 640 + 12.352 / 15)
    assert fedavg / heterofl == pytest.approx(1.27, abs=0.01)
    tight = max(round_times("whalefl-static", "heterofl/iid"))
    assert max(round_times("whalefl-static", "heterofl/non-iid-2")) == heterofl
    assert fedavg / tight == pytest.approx(3.1, abs=0.05)  # specification 4.6


@pytest.mark.parametrize("name", ["static", "mild", "strong"])
def test_the_median_device_starts_at_half_width(name):
    """Specification 4.6 fixes theta by this rule before any run; every arm of a seed meets the same
    conditions.
    """
    experiment = find_experiment(f"whalefl-{name}")
    config = experiment.arm("whalefl/iid").config("small", 3)
    own = config.strategy.whalefl
    clock = load_clock(config.clock)
    chosen = [
        choose(
            Progress(training_efficiency=own.neutral),
            own,
            transmit_seconds=clock.upload_seconds(device, Load(1.0)),
            compute_seconds=clock.compute_seconds(device, Load(0.0625, 64, 10)),
            maximum=1.0,
        )
        for device in (clock.device(kind.type, kind.link) for kind in config.devices.kinds)
    ]
    assert statistics.median(choice.normalised for choice in chosen) == pytest.approx(0.6)
    efficiencies = [
        1
        / (
            clock.upload_seconds(device, Load(1.0))
            + clock.compute_seconds(device, Load(0.0625, 64, 10))
        )
        for device in (clock.device(kind.type, kind.link) for kind in config.devices.kinds)
    ]
    alone = experiment.arm("training-only/iid").config("small", 3).strategy.whalefl
    assert alone.fixed == pytest.approx(statistics.fmean(efficiencies))
    (dynamics,) = {arm.config("small", 3).clock.dynamics for arm in experiment.arms}
    assert dynamics.loads[-1] == {"static": 1.0, "mild": 1.5, "strong": 4.0}[name]
