"""One device's part is bounded and hidden by noise, what it costs is told, and what would pass it
by is refused.
"""

import contextlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from broker_server.settings.combinations import STAGES, features_of
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.privacy import PrivacyConfig
from broker_server.store import Store, privacy_spent, queries
from broker_server.store.machine import RoundState
from broker_server.strategies.private_merge import private_merge
from broker_server.strategies.strategy import Contribution, GlobalModel
from broker_server.strategies.traits import Trait
from fleet_protocol import control
from fleet_protocol.digests import blob_path
from fleet_protocol.errors import ConfigError, PlanError, RefusalReason
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.noise import bounded, gaussian, seeded
from models.plan import compile_plan, make_plan
from models.slicing import Tensors
from shoal.cli.main import app
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.methods import merged
from tests.broker_server.peer import Peer, honest
from tests.broker_server.test_fedmedian import LAYOUT, OLD, update
from tests.broker_server.test_merge import plan_of
from tests.broker_server.test_refused_runs import prepare
from tests.models.layouts import scatter_add

HIDDEN = {"clip": 1.0, "noise_multiplier": 1.0}
BY_THE_SERVER = {"evaluation": {"statistics": "server-batch"}}
CENTRAL = {"privacy": HIDDEN, "robust": {"norm_bound": 0}, **BY_THE_SERVER}
LOCAL = {"privacy": {**HIDDEN, "where": "local"}, **BY_THE_SERVER}
SUMS = {"secure_sum": {"clip": 1.0}, "robust": {"norm_bound": 0}, **BY_THE_SERVER}


def test_a_delta_that_promises_nothing_is_refused():
    """With 0.9, ten rounds of noise_multiplier = 1 were told to cost an epsilon of 0."""
    assert PrivacyConfig(**HIDDEN, delta=0.4).delta == 0.4
    with pytest.raises(ValidationError, match=r"delta\n.*less than 0\.5"):
        PrivacyConfig(**HIDDEN, delta=0.5)


# Bound and noise.


def norm(tensors: Tensors) -> float:
    return math.sqrt(
        sum(float((value.astype(np.float64) ** 2).sum()) for value in tensors.values())
    )


@settings(max_examples=40)
@given(size=st.floats(1e-6, 1e6), clip=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_no_update_moves_further_than_the_bound(size, clip, seed):
    """Whatever a device sends; what is within the bound is as it was."""
    rng = np.random.default_rng(seed)
    sent = {
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "b": rng.normal(size=3).astype(np.float32),
    }
    change = {
        name: (size * rng.normal(size=value.shape)).astype(np.float32)
        for name, value in sent.items()
    }
    new = {name: sent[name] + value for name, value in change.items()}
    clipped = bounded(new, sent, clip)
    assert norm(clipped) <= clip
    exact = {name: new[name] - sent[name] for name in sent}
    if norm(exact) <= clip * (1 - 2e-6):
        assert all((clipped[name] == exact[name]).all() for name in exact)
    else:
        assert norm(clipped) == pytest.approx(clip, rel=1e-5)
        for name, value in clipped.items():
            np.testing.assert_allclose(
                value * norm(exact), exact[name] * clip, rtol=1e-4, atol=1e-4 * norm(exact) * clip
            )


def test_noise_is_normal_and_of_the_operating_system():
    """Its distribution is that of Kolmogorov's test; two draws differ, those of one text do not."""
    from scipy.stats import kstest  # noqa: PLC0415

    values = gaussian(seeded("a"), (100, 501)).reshape(-1)
    assert kstest(values, "norm").pvalue > 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    assert (gaussian(seeded("a"), (7,)) == values[:7]).all() or len(values) % 2 == 0
    assert not np.array_equal(gaussian(seeded("a"), (8,)), gaussian(seeded("b"), (8,)))


# The merge.


def finish(updates, asked, deviation, draw=None):
    merge = private_merge(LAYOUT, asked, deviation, None, draw or seeded("x"))
    sums = merge.start()
    for device_update in updates:
        merge.fold(sums, device_update)
    return merge.finish(sums, GlobalModel(OLD, {})).weights


def test_changes_are_divided_by_those_who_were_asked():
    """Two whole and one half model asked, of which a whole one is silent: entries of all move by
    sums over three.
    """
    whole = plan_of(LAYOUT, 1.0)
    half = plan_of(LAYOUT, 0.5)
    updates = [update("a", 1.0, 1), update("b", 0.5, 2, labels=(0,))]
    model = finish(updates, [("1.0", whole), ("1.0", whole), ("0.5", half)], 0.0)
    total, count = ({name: np.zeros(old.shape) for name, old in OLD.items()} for _ in range(2))
    for plan in (whole, whole, half):
        scatter_add(
            LAYOUT,
            plan,
            count,
            {
                name: np.ones(device_update.local_shape)
                for name, device_update in plan.tensors.items()
            },
        )
    for device_update in updates:
        scatter_add(
            LAYOUT,
            device_update.plan,
            total,
            {name: value.astype(np.float64) for name, value in device_update.weights.items()},
        )
    for name, old in OLD.items():
        np.testing.assert_allclose(model[name], old + total[name] / count[name], rtol=1e-6)


def test_the_noise_of_an_entry_is_that_of_its_sum():
    """Standard deviation z C over the number asked, on every entry that anybody was asked for, and
    nowhere else.
    """
    half = plan_of(LAYOUT, 0.5)
    draws = [finish([], [("0.5", half)] * 4, 3.0, seeded(f"{i}")) for i in range(300)]
    moved = np.stack([noisy["w"] - OLD["w"] for noisy in draws])
    assert moved[:, :4].std() == pytest.approx(3 / 4, rel=0.02)
    assert (moved[:, 4:] == 0).all()
    assert abs(moved[:, :4].mean()) < 0.02


# What it costs.


@pytest.mark.parametrize(("noise", "times", "delta"), [(60.0, 100, 1e-6), (20.0, 5, 1e-5)])
def test_epsilon_is_that_of_the_composed_mechanism(noise, times, delta):
    """As the accountant that composes privacy loss distributions finds it; local noise is held to
    half.
    """
    from dp_accounting import GaussianDpEvent  # noqa: PLC0415  (where only onnxruntime-training is tested, it is not)
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    oracle = PLDAccountant()
    oracle.compose(GaussianDpEvent(noise), times)
    config = PrivacyConfig(clip=1.0, noise_multiplier=noise, delta=delta)
    assert privacy_spent.epsilon_after(config, times) == pytest.approx(
        oracle.get_epsilon(delta), rel=1e-5
    )
    local = PrivacyConfig(clip=1.0, noise_multiplier=2 * noise, delta=delta, where="local")
    assert privacy_spent.epsilon_after(local, times) == privacy_spent.epsilon_after(config, times)


@pytest.mark.parametrize(("where", "times"), [("central", (1, 1, 2)), ("local", (1, 2, 3))])
def test_what_counts_is_how_often_the_most_asked_was_asked(config, where, times):
    """A sum that was given up is let out to nobody; an update with noise of its own is."""
    run_config = config(privacy={**HIDDEN, "where": where})
    states = [RoundState.CLOSED, RoundState.ABANDONED, RoundState.COLLECTING]
    asked = [(1, "a"), (2, "a"), (3, "a"), (1, "b")]
    store = SimpleNamespace(
        planned_tasks=lambda _run: [
            SimpleNamespace(round=number, device=device) for number, device in asked
        ],
        rounds=lambda _run: [
            SimpleNamespace(number=at, state=state) for at, state in enumerate(states, 1)
        ],
        count_lines_by_round=lambda _run, _kind: {},
    )
    epsilons = privacy_spent.epsilon_by_round(
        store, SimpleNamespace(id="r", config=run_config.model_dump_json())
    )
    assert epsilons == {
        at: privacy_spent.epsilon_after(run_config.privacy, n) for at, n in enumerate(times, 1)
    }


def test_a_run_without_the_accountant_does_not_begin(config, monkeypatch):
    """It says what to install."""
    prepare(config, **CENTRAL)
    monkeypatch.setattr(privacy_spent, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[privacy\]'"):
        prepare(config, **CENTRAL)


# What goes together.

USES = {
    "norm bound": {"robust": {"norm_bound": 5}},
    "refused weights": {"robust": {"beyond_weight": "refuse"}},
    "median or trimmed mean": {"robust": {"merge": "median"}},
    "krum": {"robust": {"merge": "krum"}},
    "weights by samples": {"strategy": {"weighting": "samples"}},
    "label rule": {"strategy": {"label_rule": True}},
    "encoding": {"upload": {"encoding": "int8"}},
    "largest entries": {"upload": {"encoding": "topk"}},
    "rounded weights": {"download": {"encoding": "fp16"}},
    "over-selection": {"round": {"over_selection": 0.5}},
    "buffer": {"round": {"buffer": 2}},
    "central noise": {"privacy": HIDDEN},
    "local noise": LOCAL,
    "secure sum": {"secure_sum": {"clip": 1.0}},
    "private parts": {"private": {"parts": ["head"]}, "evaluation": {"data": None}},
    "private copy": {"private": {"copy_model": True, "mu": 0.0}},
    "private parts first": {
        "private": {"parts": ["head"], "private_epochs": 1},
        "evaluation": {"data": None},
    },
    "comparison": {"private": {"copy_model": True, "mu": 0.0, "compare": True}},
    "adaptation": {"private": {"copy_model": True, "mu": 0.0, "adapt_epochs": 1}},
}
WRONG = (
    ("norm bound", "central noise", Trait.INDEPENDENT),
    ("refused weights", "central noise", Trait.INDEPENDENT),
    ("median or trimmed mean", "central noise", Trait.INDEPENDENT),
    ("krum", "central noise", Trait.INDEPENDENT),
    ("median or trimmed mean", "buffer", Trait.ONE_VERSION),
    ("krum", "buffer", Trait.ONE_VERSION),
    ("weights by samples", "median or trimmed mean", Trait.ALIKE),
    ("weights by samples", "central noise", Trait.ALIKE),
    ("label rule", "central noise", Trait.LABELS_HIDDEN),
    ("label rule", "local noise", Trait.LABELS_HIDDEN),
    ("label rule", "private parts", Trait.LABELS_HIDDEN),
    ("label rule", "private parts first", Trait.LABELS_HIDDEN),
    ("buffer", "central noise", Trait.KNOWN_COUNT),
    ("norm bound", "secure sum", Trait.SINGLE),
    ("refused weights", "secure sum", Trait.SINGLE),
    ("median or trimmed mean", "secure sum", Trait.SINGLE),
    ("krum", "secure sum", Trait.SINGLE),
    ("weights by samples", "secure sum", Trait.ALIKE),
    ("label rule", "secure sum", Trait.LABELS_HIDDEN),
    ("encoding", "secure sum", Trait.SINGLE),
    ("largest entries", "secure sum", Trait.SINGLE),
    ("largest entries", "median or trimmed mean", Trait.WHOLE),
    ("largest entries", "krum", Trait.WHOLE),
    ("rounded weights", "median or trimmed mean", Trait.MEAN_OF_CHANGES),
    ("over-selection", "secure sum", Trait.COMPLETE),
    ("over-selection", "buffer", Trait.LATE_COUNTS),
    ("buffer", "secure sum", Trait.ONE_VERSION),
    ("local noise", "secure sum", Trait.SERVER_NOISE),
    ("comparison", "local noise", Trait.EVALUATIONS),
    ("comparison", "secure sum", Trait.EVALUATIONS),
    ("adaptation", "local noise", Trait.EVALUATIONS),
    ("adaptation", "secure sum", Trait.EVALUATIONS),
)
EXCLUSIVE = (  # values of one key
    {"median or trimmed mean", "krum"},
    {"central noise", "local noise"},
    {"encoding", "largest entries"},
    {"private parts", "private copy"},
    {"private parts", "comparison"},
    {"private parts", "adaptation"},
    {"private parts first", "private copy"},
    {"private parts first", "comparison"},
    {"private parts first", "adaptation"},
)


def both(one, other):
    tables = {"robust": {"norm_bound": 0}, **BY_THE_SERVER}
    for name in (one, other):
        for key, value in USES[name].items():
            tables[key] = {**tables.get(key, {}), **value}
    return tables


def followed(tables, remedy):
    """Tables of a run after somebody did what a remedy says."""
    tables = {table: dict(keys) for table, keys in tables.items()}
    verb, _, object_of = remedy.partition(" ")
    if object_of.startswith("["):
        del tables[object_of.strip("[]")]
        return tables
    key, _, value = object_of.partition(" = ")
    table, name = key.split(".")
    tables[table].pop(name, None)
    if verb == "set":
        tables[table][name] = json.loads(value)
    return tables


@pytest.mark.parametrize(("one", "other", "trait"), WRONG)
def test_a_wrong_pair_is_refused_and_both_remedies_work(config, one, other, trait):
    """The message names both, says what one of them needs, and how to have a run without either."""
    tables = both(one, other)
    with pytest.raises(PlanError, match=re.escape(trait.value)) as refused:
        prepare(config, **tables)
    names, _, explanation = str(refused.value).partition(" are incompatible: ")
    remedies = explanation.rpartition("; ")[2].split(", or ")
    remedy_of = {stage.name: stage.remedy for stage in STAGES}
    assert [remedy_of[name] for name in names.split(" and ")] == remedies
    for remedy in remedies:
        assert prepare(config, **followed(tables, remedy)).strategy.name == "heterofl"


def test_every_other_pair_is_planned(config):
    """What is not in the list of wrong pairs goes together."""
    wrong = [{left, right} for left, right, _ in WRONG]
    # A window needs tiers that train a share: tests.broker_server.test_shares combines them.
    combined = [stage for stage in STAGES if stage.setting != "strategy.window"]
    assert len(USES) == len(combined)
    for left, right in itertools.combinations(USES, 2):
        if {left, right} not in wrong and {left, right} not in EXCLUSIVE:
            context = prepare(config, **both(left, right))
            assert len(features_of(context.config)) >= 2, (left, right)


@pytest.mark.parametrize("tables", [{"privacy": HIDDEN}, {"secure_sum": {"clip": 1.0}}])
def test_a_default_yields_to_what_a_user_adds(config, tables):
    """The norm bound is off where it would conflict, also after the configuration was stored; who
    writes it is told.
    """
    run_config = config(**tables, **BY_THE_SERVER)
    assert run_config.robust.norm_bound == 0
    stored = FleetConfig.model_validate_json(run_config.model_dump_json())
    assert stored == run_config
    assert not stored.differing_settings(run_config.model_dump_json())
    assert prepare(config, **tables, **BY_THE_SERVER).config.robust.norm_bound == 0
    assert config(**LOCAL).robust.norm_bound == "auto"
    for keys in ({"norm_bound": 5}, {"beyond_norm": "clip"}):
        with pytest.raises(PlanError, match=r"robust\.norm_bound.* are incompatible"):
            prepare(config, **tables, **BY_THE_SERVER, robust=keys)


def test_a_median_is_not_told_to_be_no_heterofl(config):
    """With weights that are rounded on their way it was told to take the method that it was."""
    tables = {"robust": {"merge": "median"}, "download": {"encoding": "int8"}}
    with pytest.raises(PlanError, match=r"download\.encoding and robust\.merge") as refused:
        prepare(config, **tables)
    assert "heterofl" not in str(refused.value)


@pytest.mark.parametrize(
    "strategy",
    [{"name": "inclusivefl"}, {"name": "fedrolex", "fedrolex": {"weighting": "width"}}],
    ids=lambda strategy: strategy["name"],
)
def test_methods_that_take_a_plain_mean_are_asked_to_change_nothing(config, strategy):
    """Local noise goes with them; what needs sums of changes is refused as that, not for a setting
    nobody wrote.
    """
    tables = {"strategy": strategy, "robust": {"norm_bound": 0}, **BY_THE_SERVER}
    assert prepare(config, strategy=strategy, **LOCAL).strategy.name == strategy["name"]
    for keys in ({"privacy": HIDDEN}, {"secure_sum": {"clip": 1.0}}):
        with pytest.raises(PlanError, match=r"strategy .* requires that the server adds the mean"):
            prepare(config, **tables, **keys)


def test_the_page_shows_the_table():
    """docs/privacy.md has the parts of a run with what they need and break."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]

    def clauses(traits):
        return "; ".join(trait.value for trait in Trait if trait in traits)

    table = [
        f"| `{stage.name}` | {clauses(stage.needs)} | {clauses(stage.breaks)} |" for stage in STAGES
    ]
    assert [row for row in rows if row.count("|") == 4 and " and " not in row[:4]][
        -len(table) :
    ] == table


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({**CENTRAL, "strategy": {"name": "fedmedian"}}, "adds the mean of the devices' changes"),
        ({**CENTRAL, "strategy": {"name": "whalefl"}}, "no device chooses its tier"),
        ({**LOCAL, "strategy": {"name": "whalefl"}}, "no device chooses its tier"),
        ({**CENTRAL, "evaluation": {}}, 'set evaluation.statistics = "server-batch"'),
        ({**SUMS, "strategy": {"name": "fedmedian"}}, "adds the mean of the devices' changes"),
        ({**SUMS, "strategy": {"name": "federated_dropout"}}, "use heterofl with plan"),
        ({**SUMS, "strategy": {"plan": "random"}}, "use heterofl with plan"),
        ({**SUMS, "evaluation": {}}, 'set evaluation.statistics = "server-batch"'),
        ({**LOCAL, "evaluation": {}}, 'set evaluation.statistics = "server-batch"'),
    ],
)
def test_what_passes_the_noise_by_is_refused(config, tables, message):
    """Methods that merge or choose by something else than bounded sums."""
    with pytest.raises(PlanError, match=message):
        prepare(config, **tables)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"name": "fedrolex"},
            "fedrolex, which moves the units of .* keeps the same units in every round",
        ),
        ({"plan": "random"}, 'set upload.encoding = "int8"'),
        (
            {"name": "fedmedian"},
            'encoding = "topk" requires that the server adds the mean',
        ),
    ],
)
def test_the_largest_entries_alone_need_a_memory_and_a_mean(config, strategy, message):
    """Not with slices that move, since what was not sent would belong to other units, nor with a
    method's median.
    """
    with pytest.raises(PlanError, match=message):
        prepare(config, strategy=strategy, upload={"encoding": "topk"})


def test_the_share_of_the_largest_entries_reaches_the_devices(config):
    """As it is set, and 0.1 where it is not; none and more than all are refused."""
    for table, keep in (({}, 0.1), ({"keep": 0.25}, 0.25)):
        asked = prepare(config, upload={"encoding": "topk", **table}).method.instructions(
            "train", 0
        )
        assert (asked.upload.keep, asked.upload.feedback) == (keep, True)
    for wrong in (0, 1.5):
        with pytest.raises((ConfigError, ValidationError), match=r"keep"):
            config(upload={"encoding": "topk", "keep": wrong})


def test_the_method_is_asked_to_look_at_no_samples(config):
    """Labels and numbers of samples count for nothing unless somebody says so, who is refused."""
    context = prepare(config, **CENTRAL, strategy={"name": "fedavg"})
    assert context.method.instructions("train", 0).upload.hiding is None
    local = prepare(config, **LOCAL, upload={"encoding": "int8"})
    assert local.method.instructions("train", 0).upload.hiding.deviation == 1.0
    assert isinstance(local.config, FleetConfig)
    layout = tiny_layout()
    silent = update("a", 1.0, 1, labels=()).metrics
    whole = compile_plan(layout, make_plan(layout, layout.tier(1.0)))
    trained = {name: np.full_like(value, 5) for name, value in tiny_weights(layout).items()}
    new = merged(
        local.strategy,
        [Contribution("a", layout.tier(1.0), "w", whole, trained, silent)],
        tiny_weights(layout),
    )
    assert all((value == 5).all() for value in new.values())
    plan = plan_of(LAYOUT, 1.0)
    labels = [(0,), (0, 1)]
    few, many = (
        replace(update("a", 1.0, 1), metrics=update("a", 1.0, 1, labels=device_update).metrics)
        for device_update in labels
    )
    of_few, of_many = (
        finish([device_update], [("1.0", plan)], 1.0) for device_update in (few, many)
    )
    assert all((of_few[name] == of_many[name]).all() for name in OLD)


# A whole run over a broker.


def away(peer, work):
    peer.refuse(work, RefusalReason.UNSUPPORTED)


def test_a_run_hides_bounds_and_tells(url, config, running, fleet):
    """Two of three move by ten in every entry: the model moves by two bounds over three, and
    epsilon is told.
    """
    tables = {"privacy": {"clip": 3.0, "noise_multiplier": 1e-4}, "robust": {"norm_bound": 0}}
    rounds = {"rounds": 2, "min_devices": 3, "quorum": 0.6}
    run_config = config(**tables, round=rounds, evaluation={"data": None})
    with contextlib.ExitStack() as stack:
        for name, script in {"a": honest(10.0), "b": honest(10.0), "c": away}.items():
            stack.enter_context(Peer(fleet, name, url, script))
        server = running(run_config, url)
        finished = server.wait()
    assert finished.status == "finished", finished.error
    with contextlib.closing(Store(run_config.store, read_only=True)) as store:
        versions = [
            open_tensors(run_config.store / "blobs" / "objects" / blob_path(v.digest))
            for v in store.versions(finished.run)
        ]
        tasks = {task.device: task for task in store.tasks(finished.run, 2, "train")}
        status = queries.status(store)
        listed = queries.rounds(store)
    before = tiny_weights(tiny_layout())
    entries = sum(value.size for value in before.values())
    moved = {name: versions[1][name] - value for name, value in before.items()}
    assert norm(moved) == pytest.approx(2 / 3 * 3.0, rel=1e-3)
    assert (
        norm({name: value - 2 / 3 * 3 / math.sqrt(entries) for name, value in moved.items()}) > 0
    )  # there is noise
    assert tasks["a"].screening.norm == pytest.approx(10 * math.sqrt(entries), rel=1e-4)
    assert tasks["a"].screening.bound == 3.0
    assert tasks["a"].screening.scale == pytest.approx(3 / tasks["a"].screening.norm)
    epsilons = [event.epsilon for event in server.events_of(control.RoundClosed)]
    assert epsilons == [privacy_spent.epsilon_after(run_config.privacy, times) for times in (1, 2)]
    assert [view.epsilon for view in listed] == epsilons
    assert status.epsilon == epsilons[-1]
    shown = CliRunner().invoke(app, ["status", "--store", str(run_config.store)]).output
    assert f"epsilon {epsilons[-1]:.4g}" in shown
    as_json = json.loads(
        CliRunner().invoke(app, ["rounds", "--store", str(run_config.store), "--json"]).output
    )
    assert [round_row["epsilon"] for round_row in as_json] == epsilons


def test_updates_with_noise_of_the_boards_are_taken_without_labels(url, config, running, fleet):
    """Boards that hide their part tell no labels, and are not refused for it."""
    tables = {**LOCAL, "round": {"min_devices": 2}, "evaluation": {"data": None}}
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            stack.enter_context(Peer(fleet, name, url, honest(1.0, labels=())))
        finished = running(config(**tables), url).wait()
    assert (finished.status, finished.rounds) == ("finished", 1), finished.error


def test_noise_of_a_fleet_is_drawn_anew(config):
    """Two contexts of one run draw different bytes; those of a simulation are of its seed."""
    first_run = prepare(config, **CENTRAL)
    second_run = prepare(config, **CENTRAL)
    assert first_run.noise("1/merge/0")(32) != second_run.noise("1/merge/0")(32)
