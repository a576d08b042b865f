"""From `shoal init` to a board's configuration: what a user types, and what is refused without
identities.
"""

import re
import time

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from broker_server.service.authority import enroll, found_fleet
from broker_server.service.membership import broker_address
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import read_registry
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from device_runtime.doctor import examine
from device_runtime.settings import load_device_config
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import ConfigError
from shoal.cli.main import app

BOARD = 'state_dir = "state"\n[data]\nkind = "npz"\npath = "train.npz"\n'


def test_a_fleet_is_founded_and_a_board_needs_one_file(tmp_path, typed, monkeypatch):
    """`init` writes a configuration that loads, `enroll` a file with fleet, device and broker;
    `revoke` ends it.
    """
    done = typed("init", "lab", "--host", "192.168.1.10")
    assert done.returncode == 0, done.stderr
    assert "shoal up --config lab/fleet.toml" in done.stdout
    config = load_config(tmp_path / "lab" / "fleet.toml", FleetConfig).resolved(tmp_path / "lab")
    assert broker_address(config.broker).tls
    done = typed("enroll", "pi-1", "--folder", "lab", "--days", "30")
    assert done.returncode == 0, done.stderr
    enrolment = tmp_path / "lab" / "devices" / "pi-1.enrolment"
    (tmp_path / "device.toml").write_text(BOARD)
    board = load_device_config(tmp_path / "device.toml", enrolment)
    assert (board.fleet, board.device, board.broker) == ("lab", "pi-1", "mqtts://192.168.1.10:8883")
    address = board.address()
    assert (address.username, address.tls) == ("pi-1", True)
    assert address.ca_file.read_text() == (tmp_path / "lab" / "ca.pem").read_text()
    (tmp_path / "device.toml").write_text(
        BOARD + '[identity]\nfile = "lab/devices/pi-1.enrolment"\n'
    )
    board = load_device_config(tmp_path / "device.toml")
    assert board.member().enrolment.name == "pi-1"
    assert board.ended() == ""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31 * 24 * 3600)
    said = next(
        finding for finding in examine(tmp_path / "device.toml") if finding.check == "configuration"
    )
    assert (said.level, said.detail) == ("warning", board.ended())
    assert "`shoal renew pi-1`" in said.detail
    monkeypatch.undo()
    assert "is no longer valid" in typed("enroll", "pi-1", "--folder", "lab").stdout
    assert typed("revoke", "pi-1", "--folder", "lab").returncode == 0
    assert "pi-1" not in read_registry(tmp_path / "lab").names()
    wrong = typed("revoke", "pi-2", "--folder", "lab")
    assert (wrong.returncode, "this fleet has no device" in wrong.stderr) == (2, True)


def test_no_key_is_made_while_the_clock_is_not_set(tmp_path, monkeypatch):
    """A machine that started at its epoch made an authority that ended in 1989; nothing said so
    until every board failed.
    """
    monkeypatch.setattr(time, "time", lambda: 24 * 3600.0)
    with pytest.raises(ConfigError, match=r"shows 1970-01-02.*timedatectl"):
        found_fleet(tmp_path / "early", NewFleet("lab", "127.0.0.1", 8883))
    assert not (tmp_path / "early").exists()
    monkeypatch.undo()
    found_fleet(tmp_path / "lab", NewFleet("lab", "127.0.0.1", 8883))
    monkeypatch.setattr(time, "time", lambda: 24 * 3600.0)
    with pytest.raises(ConfigError, match="timedatectl"):
        enroll(tmp_path / "lab", "pi-1", days=30)
    with pytest.raises(ConfigError, match="timedatectl"):
        enroll(tmp_path / "lab", "pi-1")
    monkeypatch.undo()
    enroll(tmp_path / "lab", "pi-1", days=30)


def test_a_board_is_not_given_another_ones_enrolment(tmp_path, typed):
    """A device.toml that names another device or fleet than the enrolment is an error that says
    both.
    """
    for arguments in (("init", "lab", "--host", "h"), ("enroll", "pi-1", "--folder", "lab")):
        assert typed(*arguments).returncode == 0
    (tmp_path / "device.toml").write_text('device = "pi-2"\n' + BOARD)
    with pytest.raises(ConfigError, match=r"device is 'pi-2', .*enrolment .* 'pi-1'"):
        load_device_config(
            tmp_path / "device.toml", tmp_path / "lab" / "devices" / "pi-1.enrolment"
        )


@pytest.mark.parametrize("url", ["mqtt://192.168.1.10:1883", "mqtt://broker.local"])
def test_a_network_without_identities_is_only_for_whoever_says_so(tmp_path, url):
    """Server and board refuse a plain broker that others reach, unless it is called insecure;
    loopback is free.
    """
    with pytest.raises(ConfigError, match="insecure = true"):
        broker_address(BrokerConfig(url=url))
    with pytest.raises(ConfigError, match="insecure = true"):
        broker_address(BrokerConfig(url="mosquitto", listen="0.0.0.0"))
    for free in (
        BrokerConfig(url=url, insecure=True),
        BrokerConfig(url="mosquitto", listen="0.0.0.0", insecure=True),
        BrokerConfig(),
        BrokerConfig(url="mqtt://localhost"),
        BrokerConfig(url=url.replace("mqtt:", "mqtts:")),
    ):
        broker_address(free)
    head = f'fleet = "lab"\ndevice = "pi-1"\nbroker = "{url}"\n'
    (tmp_path / "device.toml").write_text(head + BOARD)
    with pytest.raises(ConfigError, match="insecure = true"):
        load_device_config(tmp_path / "device.toml")
    (tmp_path / "device.toml").write_text("insecure = true\n" + head + BOARD)
    load_device_config(tmp_path / "device.toml")


@pytest.mark.parametrize("broker", ["embedded", "mosquitto"])
def test_up_says_what_a_network_needs(typed, broker):
    """`--listen 0.0.0.0` alone is refused with both ways out."""
    done = typed("up", "--fleet", "lab", "--broker", broker, "--listen", "0.0.0.0")
    assert done.returncode == 2
    assert "shoal init" in done.stderr
    assert "insecure = true" in done.stderr
    assert "--insecure" in typed("up", "--help").stdout


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "", "192.168.1.10"])
def test_the_embedded_broker_listens_on_loopback_only(listen):
    """Whoever trusts a network takes a Mosquitto there, too."""
    with pytest.raises(ValidationError, match='set url = "mosquitto" and insecure = true'):
        BrokerConfig(listen=listen, insecure=True)
    for loopback in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.2"):
        assert BrokerConfig(listen=loopback).hosted


def test_the_embedded_broker_carries_no_fleet_with_identities(tmp_path, typed):
    """In a file that says so, and by ``--broker``: both name what to say and what to install."""
    assert typed("init", "lab", "--broker", "mqtts://h").returncode == 0
    path = tmp_path / "lab" / "fleet.toml"
    path.write_text(path.read_text().replace("mqtts://h:8883", "embedded"))
    done = typed("up", "--config", "lab/fleet.toml")
    assert done.returncode == 2
    assert 'set url = "mosquitto" (`sudo apt install mosquitto`)' in done.stderr
    path.write_text(path.read_text().replace("embedded", "mqtts://h:8883"))
    done = typed("run", "--config", "lab/fleet.toml", "--broker", "embedded")
    assert done.returncode == 2
    assert 'set url = "mosquitto" (`sudo apt install mosquitto`)' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--broker", "mqtt://h"), "needs TLS: give its address as mqtts://HOST:PORT"),
        (("--broker", "mqtts://pi:secret@h"), "remove the login"),
        (("--broker", "mqtts://h", "--host", "g"), "name different hosts: omit --host"),
        (("--broker", "embedded", "--host", "h"), "use mosquitto, emqx or mqtts://HOST:PORT"),
        (("--broker", "mosquito", "--host", "h"), "did you mean 'mosquitto'?"),
        ((), "give --host"),
    ],
)
def test_init_refuses_a_broker_that_it_cannot_write_for(tmp_path, typed, arguments, words):
    """Before it writes anything, and without a word of a password."""
    done = typed("init", "lab", *arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "secret" not in done.stderr
    assert not (tmp_path / "lab").exists()


def test_without_a_mosquitto_init_and_up_say_what_to_install(tmp_path, monkeypatch):
    """`init` writes nothing then; with a broker elsewhere it needs none."""
    folder = tmp_path / "lab"
    monkeypatch.setattr("broker_server.service.mosquitto.shutil.which", lambda *_, **__: None)
    init = ["init", "lab", "--folder", str(folder)]
    error = CliRunner().invoke(app, [*init, "--host", "h"]).exception
    assert isinstance(error, ConfigError)
    remedy = r"Mosquitto is not installed.*sudo apt install mosquitto.*--broker mqtts://HOST"
    assert re.search(remedy, str(error))
    assert not folder.exists()
    assert CliRunner().invoke(app, [*init, "--broker", "mqtts://h"]).exit_code == 0
    broker = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    with pytest.raises(ConfigError, match=remedy), Server("lab", tmp_path / "store", broker):
        pass


def test_what_is_not_renewed_is_explained(tmp_path, typed):
    """It said "renewed: none, as none would end later"."""
    typed("init", "lab", "--host", "192.168.1.10")
    said = typed("renew", "--folder", "lab").stdout
    assert (
        "no device is enrolled in this folder, so nothing was renewed; enrol one with `shoal enroll NAME`"
        in said
    )
    typed("enroll", "pi-1", "--folder", "lab")
    assert "nothing was renewed: pi-1 never expires" in typed("renew", "--folder", "lab").stdout
    typed("enroll", "pi-2", "--folder", "lab", "--days", "30")
    assert (
        "renewed: pi-2; a running server"
        in typed("renew", "--folder", "lab", "--days", "40").stdout
    )
    said = " ".join(typed("renew", "pi-2", "--folder", "lab", "--days", "9").stdout.split())
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 40 * 86_400))
    assert (
        f"no enrolment would expire later than it does now: pi-2 expires on {day}, and you requested 9 days"
        in said
    )
