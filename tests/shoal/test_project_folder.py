"""In the folder of a project no command needs --config or --store."""

import time
from shutil import copytree

import pytest
from typer.testing import CliRunner

from device_runtime.settings import load_device_config
from fleet_protocol.errors import ConfigError, StorageError, TransportError
from shoal.cli.main import app
from tests.brokers import free_port
from tests.shoal.view.stores import RUN, made


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a fleet that has a store, with the store that `shoal init` configures."""
    made(tmp_path)
    (tmp_path / "fleet.toml").write_text(
        'fleet = "lab"\nstore = "store"\n[model]\nartifacts = "artifacts"\narch = "tiny"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.mark.parametrize(
    "words", ["status", "devices", "rounds", "rounds show 2", "runs", "versions", "advice", "log"]
)
def test_commands_take_the_store_of_the_project(project, monkeypatch, words):
    """The clock stands still: the times of a run that has not ended depend on it."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    assert typed(*words.split()) == typed(*words.split(), "--store", "store") != ""


def test_view_takes_a_store_as_the_other_commands_do(project):
    """As an option or as an argument; neither needs a server that is up."""
    for words in (["--store", "nowhere"], ["nowhere"], ["--store", "store", "nowhere"]):
        with pytest.raises(StorageError, match="nowhere"):
            typed("view", *words)


def test_backup_takes_the_store_of_the_project(project, monkeypatch):
    """The folder of a store may stand before the file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "configuration"))
    assert "saved store " in typed("backup", "a.zip")
    (project / "store").rename(project / "elsewhere")
    assert "saved elsewhere " in typed("backup", "elsewhere", "b.zip")
    assert "saved elsewhere " in typed("backup", "c.zip", "--store", "elsewhere")
    assert "one path too many" in typed("backup", "elsewhere", "d.zip", "e.zip")


def test_promote_takes_the_project(project):
    with pytest.raises(ConfigError, match="are no longer in store; those of none are"):
        typed("promote", 2)


def test_without_a_project_the_default_of_a_configuration_counts(project, monkeypatch):
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    copytree(project / "store", elsewhere / "runs" / "store")
    monkeypatch.chdir(elsewhere)
    assert RUN in typed("status")
    (elsewhere / "fleet.toml").write_text('fleet = "lab"\n')  # which names no store
    assert RUN in typed("status")


@pytest.mark.parametrize("command", ["status", "pause", "run", "up"])
def test_a_broken_configuration_is_named(project, command):
    (project / "fleet.toml").write_text("store = \n")
    with pytest.raises(ConfigError, match=r"fleet\.toml is not valid TOML"):
        typed(command)


def test_up_says_what_it_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no fleet\.toml in this folder"):
        typed("up")


def test_enrol_writes_what_a_board_begins_with(tmp_path, monkeypatch):
    """The board's file names its enrolment; a file that somebody has changed is kept."""
    monkeypatch.chdir(tmp_path)
    typed("init", "lab", "--host", "127.0.0.1")
    monkeypatch.chdir(tmp_path / "lab")
    output = typed("enroll", "attic")
    assert (
        "devices/attic.toml: set the path of the board's data in it, and copy it to the board"
        in output
    )
    config = load_device_config(tmp_path / "lab" / "devices" / "attic.toml")
    assert (config.fleet, config.device) == ("lab", "attic")
    assert config.state_dir == tmp_path / "lab" / "devices" / "state"
    file = tmp_path / "lab" / "devices" / "attic.toml"
    file.write_text("changed")
    typed("enroll", "attic")
    assert file.read_text() == "changed"


def test_a_filter_that_fits_nothing_names_what_there_is(project):
    """It said only that nothing matched, also of a kind that was misspelt."""
    said = typed("log", "--kind", "round-startet")
    assert "(did you mean 'round-started'?); it has the kinds round-started\n" in said
    assert "none is about 'pi-00' (did you mean 'pi-000" in typed("log", "--device", "pi-00")
    assert typed("log", "--device", "pi-00", "--json").strip() == "[]"


def test_a_number_without_its_command_names_the_command(project):
    assert "`shoal rounds` has the commands: show" in " ".join(typed("rounds", "2").split())


def test_an_unknown_device_is_not_said_to_be_well(project):
    """It said that none of its updates had been refused."""
    with pytest.raises(ConfigError, match=r"no device 'pi-00' has connected .*did you mean 'pi-"):
        typed("devices", "release", "pi-00")


@pytest.mark.parametrize("command", ["pause", "resume", "stop"])
def test_without_a_server_its_own_broker_is_not_blamed(project, command):
    """A server starts that broker, so the remedy is to start a server, and not to check the port."""
    (project / "fleet.toml").write_text(
        f'fleet = "lab"\nstore = "store"\n[broker]\nport = {free_port()}\n[model]\narch = "tiny"\n'
    )
    with pytest.raises(TransportError, match=r"no server of fleet lab .*`shoal up`"):
        typed(command)
