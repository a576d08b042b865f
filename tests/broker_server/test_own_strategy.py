"""Strategies of users: in a file that the configuration names, or in an installed package; what is
wrong with one is said in one line.
"""

import contextlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from broker_server.service import own_code_log
from broker_server.service.own_code_log import log_own_code
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method import StrategyConfig
from broker_server.settings.requested import RequestedSettings, grant
from broker_server.store import Store
from broker_server.store.event_table import LineFilter
from broker_server.strategies.strategy import Contribution, GlobalModel, PlanRequest
from fleet_protocol.configuration import parse_config
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import TaskMetrics
from models.plan import compile_plan, make_plan
from shoal.cli.serving import read_fleet
from tests.broker_server.artifacts import tiny_layout, tiny_weights
from tests.broker_server.methods import built, merged
from tests.broker_server.peer import Peer, honest
from tests.broker_server.test_refused_runs import prepare
from tests.own_strategies import block

LAYOUT = tiny_layout()
FLEET = 'fleet = "lab"\n[model]\narch = "tiny"\n[strategy]\nfile = "{file}"\n'
ONE = """
from shoal import heterofl, strategy
@strategy()
def {name}(basis):
    return heterofl.build(basis)
"""


@pytest.fixture
def fedpower(tmp_path):
    """The file of the page."""
    path = tmp_path / "fedpower.py"
    path.write_text(block("fedpower.py"))
    return path


def update(device, value, examples):
    plan = compile_plan(LAYOUT, make_plan(LAYOUT, LAYOUT.tier(1.0)))
    weights = {
        name: np.full(plan.tensors[name].local_shape, value, np.float32) for name in plan.required
    }
    metrics = TaskMetrics(
        examples=examples,
        batches=1,
        labels=(0, 1, 2, 3),
        fetch_seconds=0,
        train_seconds=0,
        resident_bytes=0,
    )
    return Contribution(device, LAYOUT.tier(1.0), plan.title, plan, weights, metrics)


@pytest.mark.parametrize(("options", "mean"), [({}, 4.0), ({"power": 0}, 3.0), ({"power": 1}, 4.6)])
def test_the_strategy_of_the_page_merges(fedpower, options, mean):
    """One sample at 1 and nine at 5: with the square root (1 * 1 + 3 * 5) / 4."""
    strategy = built({"file": fedpower, "options": options}, LAYOUT)
    assert strategy.name == "fedpower"
    new = merged(strategy, [update("a", 1.0, 1), update("b", 5.0, 9)], tiny_weights(LAYOUT))
    for tensor in new.values():
        np.testing.assert_allclose(tensor, mean, rtol=1e-6)


def test_a_run_has_the_name_of_the_file_or_the_one_that_is_set(fedpower):
    """Also where the function has another one."""
    other = fedpower.rename(fedpower.with_name("mine.py"))
    assert built({"file": other}, LAYOUT).name == "mine"
    assert built({"file": other, "name": "square-root"}, LAYOUT).name == "square-root"
    stored = StrategyConfig(file=other).model_dump_json()
    assert StrategyConfig.model_validate_json(stored) == StrategyConfig(file=other)


def test_a_changed_file_is_run_again(tmp_path):
    """In the same process, as in a notebook."""
    path = tmp_path / "mine.py"
    path.write_text(ONE.format(name="first"))
    assert built({"file": path}, LAYOUT).paper
    path.write_text(ONE.format(name="second").replace("(basis)\n", "(basis) and None\n"))
    with pytest.raises(ConfigError, match="builds NoneType"):
        built({"file": path}, LAYOUT)


def test_a_file_may_have_another_beside_it_and_a_dataclass(tmp_path):
    """As any module may."""
    (tmp_path / "near_by.py").write_text("from shoal import heterofl\nbuild = heterofl.build\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "import near_by\nfrom shoal import strategy\n"
        "@dataclass\nclass Note:\n    text: str\n"
        "@strategy()\ndef mine(basis):\n    return near_by.build(basis)\n"
    )
    assert built({"file": tmp_path / "mine.py"}, LAYOUT).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"\S+mine\.py does not exist; give a path"),
        ("X = 1\n", r"mine\.py has no strategy; mark one function"),
        (ONE.format(name="a") + ONE.format(name="b"), r"mine\.py has 2 strategies, a, b; keep one"),
        ("import no_such_thing\n", r"ModuleNotFoundError: No module .* \(line 1 of mine\.py\)"),
        ("x = 1\nraise ValueError('a\\nb')\n", r"ValueError: a b \(line 2 of mine\.py\); correct"),
        ("def f(:\n", r"SyntaxError: [^()]* \(line 1 of mine\.py\); correct"),
        ("raise SystemExit(3)\n", r"SystemExit: 3 \(line 1 of mine\.py\)"),
        (
            "from shoal import strategy\n@strategy()\ndef mine(a, b):\n    return a\n",
            r"mine\.py: mine must take one argument, the basis",
        ),
        (
            "from shoal import strategy\n@strategy\ndef mine(basis):\n    return basis\n",
            r"mine\.py: strategy\(\) takes the class of the options.*write @strategy\(\)",
        ),
        (
            "from shoal import strategy\n@strategy(dict)\ndef mine(basis):\n    return basis\n",
            r"mine\.py: strategy\(\) takes the class of the options, a subclass of shoal\.Froz",
        ),
        (
            "from shoal import strategy\n@strategy()\ndef mine(basis):\n    return basis.width\n",
            r"mine\.py fails when it builds .*AttributeError: .* \(line 4 of mine\.py\)",
        ),
        (
            "from shoal import strategy\n@strategy()\ndef mine(basis):\n    return 1\n",
            r"mine\.py builds int, not a Strategy; let the function end",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, message):
    """It names the file and what to do."""
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        built({"file": path}, LAYOUT)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("1 / 0", r"fedpower\.py fails in merge\.fold: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", r"merge\.fold: SystemExit: 3"),
        ("sums = None", r"merge\.fold: AttributeError: .*"),
    ],
)
def test_a_strategy_that_fails_in_a_round_says_so_in_one_line(fedpower, caplog, statement, message):
    """With the function and the line; the traceback is in the log for who debugs."""
    text = fedpower.read_text()
    weight = "        weight = float("
    assert weight in text
    fedpower.write_text(text.replace(weight, f"        {statement}\n{weight}"))
    strategy = built({"file": fedpower}, LAYOUT)
    caplog.set_level("DEBUG")
    line = (
        r" \(line \d+ of fedpower\.py\); correct it there, and give the same command again"
        r" \(`shoal -vv` shows the traceback\)$"
    )
    with pytest.raises(ConfigError, match=message + line) as failure:
        merged(strategy, [update("a", 1.0, 1)], tiny_weights(LAYOUT))
    assert "\n" not in str(failure.value)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("del weights[{name!r}]", "what it returns lacks the tensor {name}"),
        ("weights[{name!r}] = None", "what it returns lacks the tensor {name}"),
        ("weights[{name!r}] = 1.0", "it returns float for the tensor {name}, not an array"),
        ("weights[{name!r}] = weights[{name!r}][:0]", r"it returns the shape [0] for {name}, not"),
        (
            "weights[{name!r}] = weights[{name!r}].astype(float)",
            "it returns the tensor {name} as float64, not as float32",
        ),
    ],
)
@pytest.mark.parametrize("field", ["merge.finish", "send"])
def test_a_tensor_that_a_strategy_leaves_out_is_named(tmp_path, field, statement, fault):
    """It was a KeyError of the server, or an update was blamed."""
    tensors = {spec.name: spec.shape for spec in LAYOUT.parameters}
    name = next(name for name, shape in tensors.items() if len(shape) == 1)
    path = tmp_path / "mine.py"
    text = (
        "from dataclasses import replace\nfrom shoal import heterofl, strategy\n@strategy()\n"
        "def mine(basis):\n    base = heterofl.build(basis)\n"
        "    def finish(sums, old):\n        new = base.merge.finish(sums, old)\n"
        "        weights = dict(new.weights)\n        {finished}\n"
        "        return replace(new, weights=weights)\n"
        "    def send(plan, request, model):\n"
        "        weights = dict(base.send(plan, request, model))\n        {sent}\n"
        "        return weights\n"
        "    return replace(base, merge=replace(base.merge, finish=finish), send=send)\n"
    )
    wrong = statement.format(name=name)
    finished, sent = (wrong, "pass") if field == "merge.finish" else ("pass", wrong)
    path.write_text(text.format(finished=finished, sent=sent))
    strategy = built({"file": path}, LAYOUT)
    old = tiny_weights(LAYOUT)
    plan = compile_plan(LAYOUT, make_plan(LAYOUT, LAYOUT.tier(1.0)))
    request = PlanRequest(LAYOUT.tier(1.0), "a", 0, 0)
    calls = {
        "merge.finish": lambda: merged(strategy, [update("a", 1.0, 1)], old),
        "send": lambda: strategy.send(plan, request, GlobalModel(old, {})),
    }
    with pytest.raises(ConfigError) as refused:
        calls[field]()
    assert f"{path} fails in {field} {fault.format(name=name)}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_fleet_whose_strategy_fails_ends_its_run_with_that_line(
    config, running, url, fleet, fedpower
):
    """The record of the run has it too."""
    weight = "        weight = float("
    text = fedpower.read_text()
    fedpower.write_text(text.replace(weight, f"        1 / 0\n{weight}"))
    with Peer(fleet, "a", url, honest()):
        server = running(config(strategy={"file": fedpower}, round={"min_devices": 1}), url)
        finished = server.wait()
    assert (finished.status, finished.exit_code) == ("failed", ConfigError.exit_code)
    assert "fedpower.py fails in merge.fold: ZeroDivisionError" in finished.error
    with contextlib.closing(Store(server.config.store, read_only=True)) as store:
        (run,) = store.runs()
    assert (run.status, run.detail) == ("failed", finished.error)


def test_a_run_that_resumes_with_other_code_says_so(config, tmp_path):
    """The file that the configuration names, or a module that it imports, changed meanwhile."""
    beside = tmp_path / "changed_later.py"
    path = tmp_path / "mine.py"
    beside.write_text("from shoal import heterofl\nbuild = heterofl.build\n")
    path.write_text(
        "import changed_later\nfrom shoal import strategy\n"
        "@strategy()\ndef mine(basis):\n    return changed_later.build(basis)\n"
    )
    settings = config(strategy={"file": path})
    assert built({"file": path}, LAYOUT).name == "mine"

    def lines(kind):
        return [line.detail for line in store.events("r1", matching=LineFilter(kinds=(kind,)))]

    with contextlib.closing(Store(tmp_path / "store")) as store:
        for _ in range(2):
            log_own_code(store, "r1", settings)
        (line,) = lines(own_code_log.KIND)
        assert str(path) in line
        assert str(beside) in line
        assert lines(own_code_log.CHANGED) == []
        beside.write_text(beside.read_text() + "OTHER = 1\n")
        log_own_code(store, "r1", settings)
        (changed,) = lines(own_code_log.CHANGED)
        assert changed == f"run r1 resumes with different code than before: {beside} changed"
        log_own_code(store, "r1", settings)
        assert len(lines(own_code_log.CHANGED)) == 1
        log_own_code(store, "r2", config())
        assert store.events("r2") == []


def test_a_function_that_returns_the_wrong_type_is_named(tmp_path):
    """A plan, also one that is made when it is first used."""
    text = (
        "from dataclasses import replace\nfrom shoal import heterofl, strategy\n@strategy()\n"
        "def mine(basis):\n    base = heterofl.build(basis)\n"
        "    def choose(request):\n        {body}\n    return replace(base, plan=choose)\n"
    )
    path = tmp_path / "mine.py"
    request = PlanRequest(LAYOUT.tier(1.0), "a", 0, 0)
    path.write_text(text.format(body="pass"))
    with pytest.raises(ConfigError, match=r"in plan, choose\(\), it returns NoneType, not Planned"):
        built({"file": path}, LAYOUT).plan(request)
    path.write_text(text.format(body="return replace(base.plan(request), make=lambda: 1 / 0)"))
    planned = built({"file": path}, LAYOUT).plan(request)
    with pytest.raises(ConfigError, match=r"in plan: ZeroDivisionError: .* \(line 7 of mine\.py\)"):
        _ = planned.plan


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('file = "fedavg.py"', r"Shoal has a strategy named 'fedavg'; set strategy\.name"),
        ('file = "a.py"\nname = "whalefl"', "Shoal has a strategy named 'whalefl'"),
        ('name = "fedavg"\n[strategy.options]\npower = 1', r"no effect on strategy 'fedavg'"),
        ('file = "a.py"\n[strategy.fedrolex]\nstep = 2', "no effect on strategy 'a'"),
        ('fil = "a.py"', "did you mean 'file'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_without_a_look_at_the_file(table, message):
    """There is none here."""
    text = f'fleet = "lab"\n[model]\narch = "tiny"\n[strategy]\n{table}'
    with pytest.raises(ConfigError, match=message):
        parse_config(text, FleetConfig, source="fleet.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"powr": 1},
            r"strategy\.options for \S+fedpower\.py: unknown key 'powr'; did you mean 'power'",
        ),
        ({"power": 2}, r"strategy\.options for .*: power: Input should be less than or equal to 1"),
        ({"power": True}, r"strategy\.options for .*: power: Input should be a valid number"),
    ],
)
def test_options_are_checked_like_other_keys(fedpower, options, message):
    """By the class that the file gives."""
    with pytest.raises(ConfigError, match=message):
        built({"file": fedpower, "options": options}, LAYOUT)


def test_options_of_a_strategy_without_any_are_refused(tmp_path):
    """They would have no effect."""
    (tmp_path / "mine.py").write_text(ONE.format(name="mine"))
    with pytest.raises(ConfigError, match="'mine', which has no options; remove the table"):
        built({"file": tmp_path / "mine.py", "options": {"power": 1}}, LAYOUT)


@pytest.mark.parametrize(
    "tables",
    [
        {"secure_sum": {"clip": 1.0}, "evaluation": {"statistics": "server-batch"}},
        {"robust": {"merge": "median"}},
    ],
)
def test_a_run_is_refused_by_the_traits_that_the_strategy_states(config, fedpower, tables):
    """With its name, like Shoal's own."""
    with pytest.raises(PlanError, match=r"strategy fedpower are incompatible: ") as refused:
        prepare(config, strategy={"file": fedpower}, **tables)
    if "secure_sum" in tables:
        assert str(refused.value) == (
            "[secure_sum] and strategy fedpower are incompatible: [secure_sum] requires that every"
            " update has the same weight; remove [secure_sum], or use another strategy"
        )


def test_a_strategy_states_what_it_needs(config, tmp_path):
    """A feature that breaks it is refused, and one that does not is planned."""
    text = block("fedpower.py").replace(
        "breaks=frozenset({Trait.ALIKE})", "needs=frozenset({Trait.COMPLETE})"
    )
    (tmp_path / "mine.py").write_text(text)
    strategy = {"file": tmp_path / "mine.py"}
    with pytest.raises(
        PlanError, match=r"strategy mine and round\.over_selection are incompatible"
    ):
        prepare(config, strategy=strategy, round={"over_selection": 0.5})
    assert prepare(config, strategy=strategy, round={"buffer": 2}).strategy.name == "mine"


@pytest.mark.parametrize("way", ["absolute", "relative", "link"])
def test_a_file_elsewhere_does_not_run(tmp_path, way):
    """It is refused before anything of it runs; a fleet can list its folder."""
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text("raise RuntimeError('it ran')\n")
    (project / "link.py").symlink_to(elsewhere / "mine.py")
    ways = {
        "absolute": str(elsewhere / "mine.py"),
        "relative": "../elsewhere/mine.py",
        "link": "link.py",
    }
    path = project / "fleet.toml"
    text = FLEET.format(file=ways[way])
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"only Python files in the folder .*code = \["):
        read_fleet(path, None)
    path.write_text(f'code = ["{elsewhere}"]\n{text}')
    with pytest.raises(ConfigError, match="it ran"):
        read_fleet(path, None).strategy.require_loadable()


def test_reading_a_configuration_runs_nothing(tmp_path):
    """Neither a file beside it, nor one of a store, nor one of a request."""
    (tmp_path / "mine.py").write_text("raise RuntimeError('it ran')\n")
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(file="mine.py"))
    own = read_fleet(path, None)
    assert own.strategy.name == "mine"
    stored = FleetConfig.stored(own.model_dump_json())
    assert not own.differing_settings(stored.model_dump_json())
    (tmp_path / "other.py").write_text("raise RuntimeError('it ran')\n")
    document = json.loads(own.model_dump_json())
    document["strategy"]["file"] = str(tmp_path / "other.py")
    request = RequestedSettings.from_config(FleetConfig.stored(json.dumps(document)))
    with pytest.raises(ConfigError, match=r"in strategy\.file, which a request cannot set"):
        grant(own, request)


def test_a_server_is_not_started_with_a_strategy_that_fails(tmp_path):
    """It says so in one line, and not when somebody asks for a run."""
    (tmp_path / "mine.py").write_text("1 / 0\n")
    (tmp_path / "fleet.toml").write_text(FLEET.format(file="mine.py"))
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "up", "--config", "fleet.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ConfigError.exit_code
    assert "ZeroDivisionError: division by zero (line 1 of mine.py)" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Returns a function that installs a package, with a strategy by a name, into a folder."""

    def install(name, text, value="powers:fedpower"):
        folder = tmp_path / "site"
        info = folder / "powers-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: powers\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[shoal.strategies]\n{name} = {value}\n")
        (folder / "powers.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "powers", raising=False)

    return install


def test_a_package_offers_a_strategy(package, config):
    """By the name of its entry point, with options of its own."""
    package("fedpower", block("fedpower.py"))
    strategy = {"name": "fedpower", "options": {"power": 1}}
    assert prepare(config, strategy=strategy).strategy.name == "fedpower"
    with pytest.raises(ConfigError, match="did you mean 'power'"):
        built({"name": "fedpower", "options": {"powr": 1}}, LAYOUT)
    with pytest.raises(
        ConfigError, match=r"strategy 'fedpowr' does not exist \(did you mean 'fedpower'"
    ):
        built({"name": "fedpowr"}, LAYOUT)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "fedavg",
            "",
            r"Shoal and package powers each have a strategy 'fedavg'; rename the package",
        ),
        ("mine", "", r"strategy 'mine' of package powers \(powers:fedpower\) fails .*Attribute"),
        ("mine", "fedpower = 1\n", r"of package powers .* is int, not a strategy; its entry point"),
        ("mine", "1 / 0\n", r"ZeroDivisionError: division by zero \(line 1 of powers\.py\)"),
    ],
)
def test_what_is_wrong_with_a_package_is_one_line(package, name, text, message):
    """It names the package; a strategy that is not chosen is not even imported."""
    package(name, text)
    with pytest.raises(ConfigError, match=message) as refused:
        built({"name": name}, LAYOUT)
    assert "\n" not in str(refused.value)
    assert built({"name": "heterofl"}, LAYOUT).name == "heterofl"
    assert re.search("rename|correct|must name", str(refused.value))
