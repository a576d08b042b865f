"""What cannot work is an error before any training starts: methods, models, tiers, levels, data and
keys.
"""

import json

import numpy as np
import pytest

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.run_context import prepare_run
from broker_server.rounds.tier_assignment import assign
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method import StrategyConfig
from broker_server.strategies.optimizer_rules import OptimizerSettings
from fleet_protocol.configuration import load_config, parse_config
from fleet_protocol.data import load_data
from fleet_protocol.data.sources import NpzData
from fleet_protocol.errors import ConfigError, DataError, PlanError
from fleet_protocol.recipe import RecipeTable
from models import Axis, Dim, Registry, Tier
from models.axes import kept_units
from tests.broker_server.artifacts import ARCH, tiny_layout
from tests.broker_server.methods import built
from tests.broker_server.peer import profile
from tests.models.layouts import make_layout
from tests.trainer_export.helpers import TINY
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

CHUNK = 1024


def prepare(config, **tables):
    run_config = config(**tables)
    return prepare_run(
        "r", run_config, load_artifacts(run_config.model.artifacts, ARCH, chunk_bytes=CHUNK)
    )


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"strategy": {"name": "fedavg"}, "tiers": {"allowed": ["w0.50-d1"]}}, "full tier"),
        ({"strategy": {"name": "fedavg", "plan": "rolling"}}, "remove it"),
        ({"strategy": {"name": "whalefl", "plan": "rolling"}}, "remove plan"),
        ({"strategy": {"name": "fedrolex", "plan": "random"}}, "remove plan"),
        ({"strategy": {"name": "federated_dropout", "plan": "rolling"}}, "remove plan"),
        ({"strategy": {"name": "fedrolex", "fedrolex": {"step": 8}}}, "never reaches"),
        (
            {
                "strategy": {
                    "name": "fedrolex",
                    "weighting": "samples",
                    "fedrolex": {"weighting": "width"},
                }
            },
            "which excludes weighting",
        ),
        ({"strategy": {"name": "inclusivefl", "weighting": "samples"}}, "is not supported"),
        ({"strategy": {"name": "fedprox"}}, "has no proximal term"),
        (
            {"train": {"rate": {"warmup": 30}}, "round": {"rounds": 29}},
            "30 rounds of warm-up in a run of 29.*use fewer",
        ),
        (
            {"tiers": {"assign": "fix", "levels": "a1-c1"}},
            r"level c is width 0\.25.*export that width",
        ),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_when_planned(config, tables, message):
    """The error says why and comes before any device is asked."""
    with pytest.raises(PlanError, match=message):
        prepare(config, **tables)


def test_a_warm_up_of_the_whole_run_is_none_of_these(config):
    """Its last round has the full rate; so have all after a part of one."""
    for warmup, first in ((4, 0.25), (0.5, 1.0)):
        context = prepare(
            config, train={"learning_rate": 1.0, "rate": {"warmup": warmup}}, round={"rounds": 4}
        )
        assert [
            context.method.instructions("train", closed).train.learning_rate for closed in (0, 3)
        ] == [
            first,
            1.0,
        ]


def test_a_metric_is_listed_once():
    """Two of a name would be one in every report."""
    text = '[model.recipe]\nmetrics = ["mae", {name = "mae"}, "rmse"]'
    with pytest.raises(ConfigError, match=r"metrics.*mae is listed twice.*list it once"):
        parse_config(f'fleet = "l"\n[model]\narch = "c"\n{text}', FleetConfig, source="fleet.toml")
    assert len(RecipeTable(metrics=("mae", "rmse")).metrics) == 2


def test_artifacts_of_another_recipe_are_refused(config):
    """What fleet.toml says of the recipe must be what was exported."""
    run_config = config()
    model = run_config.model.model_copy(update={"recipe": RecipeTable(optimizer="adamw")})
    with pytest.raises(
        ConfigError, match=r"the optimizer is sgd, not adamw.*shoal export --recipe"
    ):
        prepare(config, model=model)


def test_the_baseline_local_has_no_server_optimizer():
    """Nothing is merged there, so there is nothing to step."""
    local = {"name": "inclusivefl", "inclusivefl": {"baseline": "local"}}
    with pytest.raises(PlanError, match="remove server_optimizer"):
        built(local, tiny_layout(), optimizer=OptimizerSettings(name="fedadam"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[strategy]\nnam = 'fedavg'", "did you mean 'name'"),
        ("[strategy]\nname = 'fedrolex'\n[strategy.fedrolex]\nstpe = 2", "did you mean 'step'"),
        (
            "[strategy]\nname = 'heterofl'\n[strategy.fedrolex]\nstep = 2",
            "no effect on strategy 'heterofl'",
        ),
        ("[strategy]\nname = 'fedrolex'\n[strategy.fedrolex]\nstep = 0", "step"),
        (
            "[strategy]\nname = 'whalefl'\n[strategy.whalefl]\ntheta = -1",
            "theta: Input should be greater than 0",
        ),
        ("[strategy]\nname = 'inclusivefl'\n[strategy.inclusivefl]\nbeta = 1.5", "beta"),
        ("[server_optimizer]\nname = 'adam'", "name"),
        ("[server_optimizer]\nname = 'fedadam'\nbeta1 = 1.0", "beta1"),
        ("[server_optimizer]\nmilestones = [3, 2]", "must ascend"),
        ("[tiers]\nassign = 'fix'", "need levels"),
        ("[tiers]\nlevels = 'a1'", "need levels"),
        ("[tiers]\nassign = 'fix'\nlevels = 'a1-z2'", "level 'z' does not exist"),
        ("[tiers]\nassign = 'dynamic'\nlevels = 'b1-a2'", "wider than the global model"),
    ],
)
def test_a_key_that_is_wrong_is_named(text, message):
    """Unknown keys, keys of another method, and numbers out of range."""
    with pytest.raises(ConfigError, match=message):
        parse_config(f'fleet = "l"\n[model]\narch = "c"\n{text}', FleetConfig, source="fleet.toml")


def test_a_seed_of_65_bits_is_refused():
    """The first of them was taken, and is none that a draw of 64 bits could begin with."""
    text = 'fleet = "l"\nseed = {}\n[model]\narch = "c"\n[train]\nlearning_rate = 0.1'
    assert parse_config(text.format(2**64 - 1), FleetConfig, source="fleet.toml").seed == 2**64 - 1
    with pytest.raises(ConfigError, match="seed: Input should be less than 18446744073709551616"):
        parse_config(text.format(2**64), FleetConfig, source="fleet.toml")


def test_a_configuration_that_was_written_out_can_be_read_again():
    """The tables of other methods are in it with their defaults, which have no effect."""
    strategy = StrategyConfig.model_validate({"name": "fedrolex", "fedrolex": {"step": 3}})
    assert StrategyConfig.model_validate_json(strategy.model_dump_json()) == strategy


def test_a_model_cannot_have_every_tier():
    """Wider than the model, no width at all, and a depth it lacks; a tiny width still keeps one
    unit of each axis.
    """
    layout = tiny_layout()
    for wrong in (0.0, -0.5, 1.5):
        with pytest.raises(PlanError, match="is not in"):
            layout.tier(wrong)
    with pytest.raises(PlanError, match="has no sub-model of depth 3"):
        layout.tier(0.5, 3)
    assert kept_units(8, 1e-6) == 1
    assert min(min(shape) for shape in layout.shapes(layout.tier(1e-6)).values()) >= 1
    with pytest.raises(PlanError):
        make_layout([Axis("k", 0)], {"w": (Dim("k"),)})


def test_a_device_without_samples_or_with_foreign_labels_trains_nothing(tmp_path, config):
    """It ends at start, is refused by its own check, and is given no tier."""
    np.savez(tmp_path / "empty.npz", x=np.zeros((0, 6), np.float32), y=np.zeros(0, np.int64))
    with pytest.raises(DataError, match=r"no samples|empty|0 samples"):
        load_data(NpzData(path=tmp_path / "empty.npz"))
    np.savez(tmp_path / "labels.npz", x=np.zeros((2, 6), np.float32), y=np.array([0, 4]))
    run_config = config()
    tiers = list(load_artifacts(run_config.model.artifacts, ARCH, chunk_bytes=CHUNK).tiers.values())
    with pytest.raises(DataError, match="label"):
        load_data(NpzData(path=tmp_path / "labels.npz")).fit_to(tiers[0].manifest)
    assert assign({"d": profile(examples=0)}, tiers, run_config.tiers) == {}


def test_levels_never_exceed_what_a_board_can_hold(config):
    """Fixed levels go by the devices' ids; a board too small for its level takes what it can."""
    run_config = config(tiers={"assign": "fix", "levels": "a1-b1"})
    tiers = list(load_artifacts(run_config.model.artifacts, ARCH, chunk_bytes=CHUNK).tiers.values())
    profiles = {"a": profile(), "b": profile(max_width=0.5), "c": profile(), "d": profile()}
    tier_of_device = {
        device: assignment.tier.tier
        for device, assignment in assign(profiles, tiers, run_config.tiers).items()
    }
    assert tier_of_device == {"a": Tier(1.0), "b": Tier(0.5), "c": Tier(0.5), "d": Tier(0.5)}
    drawn = config(tiers={"assign": "dynamic", "levels": "a1-b1"}).tiers
    rounds = [
        tuple(
            assignment.tier.tier.width
            for assignment in assign(profiles, tiers, drawn, seed=1, version=version).values()
        )
        for version in range(8)
    ]
    assert len(set(rounds)) > 1
    assert all(widths[1] == 0.5 for widths in rounds)
    assert rounds == [
        tuple(
            assignment.tier.tier.width
            for assignment in assign(profiles, tiers, drawn, seed=1, version=version).values()
        )
        for version in range(8)
    ]


@pytest.mark.slow
def test_heads_of_tiers_own_need_a_method_that_keeps_them(tmp_path):
    """Methods of widths average one head; methods of the whole model never see another; an idle
    head is not judged.
    """
    whole = Tier(1.0, 2)
    small = Tier(1.0, 1)
    arch = Registry.zoo().get("text_encoder")
    settings = {**TINY["text_encoder"], "embed": 4, "ffn": 4}
    export_architecture(
        ExportRequest(arch, settings, (whole, small), Recipe(), heads={small: 5}),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    artifacts = load_artifacts(tmp_path, arch.name, chunk_bytes=CHUNK)

    def prepared(name, **tables):
        settings = {
            "fleet": "f",
            "model": {"arch": arch.name},
            "strategy": {"name": name},
            **tables,
        }
        return prepare_run("r", FleetConfig.model_validate(settings), artifacts)

    for name in ("heterofl", "fedrolex", "federated_dropout", "whalefl"):
        with pytest.raises(PlanError, match=r"separate heads \(w1\.00-d1\) .*use inclusivefl"):
            prepared(name)
    assert prepared("fedavg").tiers == (artifacts.full,)
    tables = {
        "tiers": {"allowed": (whole.id,)},
        "evaluation": {"data": {"kind": "npz", "path": "x"}, "tiers": (small.id,)},
    }
    with pytest.raises(ConfigError, match="a separate head, which this run does not train"):
        _ = prepared("inclusivefl", **tables).judged_beside
    assert prepared("inclusivefl").strategy.begin is not None
    artifacts.tiers[small.id].head.unlink()
    with pytest.raises(ConfigError, match=r"head\.safetensors is missing"):
        artifacts.initial_heads([whole, small])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"robust": {"merge": "median", "faulty": 0.3}}, "robust.*faulty has no effect"),
        (
            {"robust": {"norm_bound": 0, "beyond_norm": "clip"}},
            "robust.*beyond_norm has no effect on norm_bound = 0; set norm_bound, or remove it",
        ),
        (
            {"robust": {"quarantine_after": 0, "quarantine_rounds": 50}},
            "robust.*quarantine_rounds has no effect on quarantine_after = 0; set quarantine_after",
        ),
        ({"evaluation": {"min_delta": 0.1}}, "evaluation.*min_delta has no effect"),
        (
            {"round": {"staleness": 1.0}},
            "round.*staleness has no effect where no update is late; set buffer",
        ),
        (
            {"upload": {"encoding": "int8", "keep": 0.25}},
            'upload.*keep has no effect on encoding = "int8"',
        ),
    ],
)
def test_a_key_without_effect_is_refused_where_somebody_writes_it(config, tables, message):
    """A store has what an earlier version took: its runs are read, resumed and exported as
    before.
    """
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(**tables)
    document = json.loads(config().model_dump_json())
    for table, keys in tables.items():
        document[table] |= keys
    stored = FleetConfig.stored(json.dumps(document))
    assert all(
        getattr(getattr(stored, table), key) == to
        for table, keys in tables.items()
        for key, to in keys.items()
    )
    assert config().differing_settings(json.dumps(document))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "[train]\nbatch_size = 10000000000000000000000",
            r"train\.batch_size: whole numbers beyond 2\*\*53 are not supported",
        ),
        (
            "[robust]\nnorm_bound = 1e308",
            r"robust: norm_bound and weight_bound must be at most 1e\+100",
        ),
        ("[evaluation]\nthreads = 3000000000", r"evaluation\.threads must be at most 1024"),
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("seed = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_what_no_message_or_machine_holds_is_refused_when_it_is_read(lines, message, tmp_path):
    """It had ended a server in the middle of a round, and at every start after that."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'fleet = "lab"\n{lines}\n[model]\narch = "a"\n', "utf-8-sig"
    )  # with a mark, as editors write
    with pytest.raises(ConfigError, match=message):
        load_config(path, FleetConfig)


@pytest.mark.parametrize(("key", "value"), [("final", 0.01), ("every", 3.0), ("factor", 0.5)])
def test_a_schedule_refuses_what_its_kind_does_not_use(key, value, config):
    """A rate that shall fall to a hundredth stayed as it was where its kind was forgotten."""
    with pytest.raises(ValueError, match=f'{key} has no effect with kind = "constant"'):
        config(train={"rate": {key: value}})


def test_a_broker_listens_where_localhost_is():
    """It takes addresses alone, and had ended with a traceback in its log."""
    assert BrokerConfig(listen="localhost").listen == "127.0.0.1"
    assert BrokerConfig(listen="[::1]").listen == "::1"


def test_a_run_goes_on_in_a_folder_that_was_moved(config, tmp_path):
    """Files that lie beside the store as before are the same; it had begun anew, and those
    elsewhere are others.
    """

    def lying(folder, name="t.npz"):
        data = {"kind": "npz", "path": folder / "data" / name}
        model = {"artifacts": folder / "artifacts"}
        return config(
            store=folder / "store", model=model, evaluation={"data": data, "tiers": ["w0.50-d1"]}
        )

    before = lying(tmp_path / "old")
    after = lying(tmp_path / "deeper" / "new")
    assert after.differing_settings(before.model_dump_json()) == []
    assert lying(tmp_path / "new", "u.npz").differing_settings(before.model_dump_json()) == [
        "evaluation.data.path"
    ]
    restored = before.model_copy(update={"store": tmp_path / "elsewhere" / "store"})
    assert restored.differing_settings(before.model_dump_json()) == []


def test_who_judges_what_nobody_trains_is_told(config, caplog):
    """With plans that stay, the whole model has units that no allowed tier has; a window that moves
    reaches them.
    """
    small = {"tiers": {"allowed": ["w0.50-d1"]}}
    rolex = {"strategy": {"name": "fedrolex"}}
    for tables, warns in [({}, False), (small, True), ({**small, **rolex}, False)]:
        caplog.clear()
        prepare(config, **tables)
        assert (
            "devices train no more than w0.50-d1 (tiers.allowed): set evaluation.tier"
            in caplog.text
        ) == warns
    prepare(config, **small, evaluation={"tier": "w0.50-d1"})
    assert not caplog.text
