"""A simulation runs the strategy of a user's file, from the folder of its configuration alone."""

import contextlib
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from broker_server.store import Store
from fleet_protocol.errors import ConfigError
from shoal.cli.main import app as command
from simulation.runner import simulate
from tests.own_strategies import block
from tests.simulation.simulations import digests, settings

TYPED = "shoal simulate --config sim.toml"


@pytest.fixture
def project(tmp_path):
    """The folder of docs/strategies.md."""
    for name in ("fedpower.py", "sim.toml"):
        (tmp_path / name).write_text(block(name))
    return tmp_path


def typed(folder):
    return subprocess.run(
        [sys.executable, "-m", *shlex.split(TYPED)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_page_works_as_it_stands(project):
    """The run has the name of the file in its store."""
    done = typed(project)
    assert done.returncode == 0, done.stderr
    with contextlib.closing(Store(project / "runs" / "store", read_only=True)) as store:
        (run,) = store.runs()
    assert run.status == "finished"
    assert '"name":"fedpower"' in run.config


def test_a_file_elsewhere_does_not_run(project):
    """It is refused in one line before anything is made."""
    inner = project / "inner"
    inner.mkdir()
    text = block("sim.toml").replace('"fedpower.py"', '"../fedpower.py"')
    (inner / "sim.toml").write_text(text)
    done = typed(inner)
    assert done.returncode == ConfigError.exit_code
    assert "only Python files in the folder of the configuration" in done.stderr
    assert "Move the file there" in done.stderr
    assert not (inner / "runs").exists()


@pytest.mark.slow
def test_a_changed_file_is_another_simulation(project, cache):
    """The options count, and a folder does not go on with a file that was changed."""
    weights = {}
    for power in (0.0, 1.0):
        config = settings(
            project / f"power-{power}",
            cache,
            strategy={"file": project / "fedpower.py", "options": {"power": power}},
            round={"rounds": 1},
        )
        weights[power] = digests(simulate(config))
    assert weights[0.0] != weights[1.0]
    with (project / "fedpower.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(ConfigError, match=r"different .*fedpower\.py; use another `out`"):
        simulate(config)


def test_a_strategy_that_fails_is_known_before_a_model_is_exported(project, cache):
    """Nothing is made for it."""
    (project / "fedpower.py").write_text("1 / 0\n")
    config = settings(project / "out", cache, strategy={"file": project / "fedpower.py"})
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        simulate(config)
    assert not config.out.exists()


@pytest.mark.slow
def test_a_strategy_that_fails_in_a_round_is_corrected_and_continued(project, cache):
    """The run has failed with one line, and goes on with the corrected file in the same folder."""
    path = project / "fedpower.py"
    right = path.read_text()
    weight = "        weight = float("
    path.write_text(right.replace(weight, f"        1 / 0\n{weight}"))
    config = settings(
        project / "out", cache, strategy={"file": path}, round={"rounds": 1}, engine={"workers": 1}
    )
    failed = simulate(config)
    store = project / "out" / "store"
    shown = CliRunner().invoke(command, ["status", "--store", str(store)]).stdout
    assert failed.finished.status == "failed"
    assert failed.finished.error in shown
    assert "in merge.fold: ZeroDivisionError" in failed.finished.error
    path.write_text(right)
    finished = simulate(config)
    assert (finished.run, finished.finished.status) == (failed.run, "finished")
    with contextlib.closing(Store(store, read_only=True)) as opened:
        (run,) = opened.runs()
        corrected = [event for event in opened.events() if event.kind == "strategy-corrected"]
    assert (run.status, run.detail) == ("finished", None)
    assert len(corrected) == 1


def test_an_unknown_architecture_names_the_key_that_adds_one(project, cache):
    """A simulation has no option for it."""
    config = settings(project / "out", cache, model={"arch": "barn"})
    with pytest.raises(ConfigError, match=r'add your own with models = "FILE" in \[model\]'):
        simulate(config)
