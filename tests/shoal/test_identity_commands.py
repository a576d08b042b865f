"""From `shoal init` to a board's configuration: what a user types, and what is refused without
identities.
"""

import time

import pytest

from broker_server.service.membership import broker_address
from broker_server.service.registry import read_registry
from broker_server.settings.fleet import BrokerConfig, FleetConfig
from device_runtime.doctor import examine
from device_runtime.settings import load_device_config
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import ConfigError

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
    assert "counts for nothing any more" in typed("enroll", "pi-1", "--folder", "lab").stdout
    assert typed("revoke", "pi-1", "--folder", "lab").returncode == 0
    assert "pi-1" not in read_registry(tmp_path / "lab").logins()
    wrong = typed("revoke", "pi-2", "--folder", "lab")
    assert (wrong.returncode, "no device of this fleet" in wrong.stderr) == (2, True)


def test_a_board_is_not_given_another_ones_enrolment(tmp_path, typed):
    """A device.toml that names another device or fleet than the enrolment is an error that says
    both.
    """
    for arguments in (("init", "lab", "--host", "h"), ("enroll", "pi-1", "--folder", "lab")):
        assert typed(*arguments).returncode == 0
    (tmp_path / "device.toml").write_text('device = "pi-2"\n' + BOARD)
    with pytest.raises(ConfigError, match=r"device is 'pi-2', and in the enrolment .* 'pi-1'"):
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
        broker_address(BrokerConfig(listen="0.0.0.0"))
    for free in (
        BrokerConfig(url=url, insecure=True),
        BrokerConfig(listen="0.0.0.0", insecure=True),
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


def test_up_says_what_a_network_needs(typed):
    """`--listen 0.0.0.0` alone is refused with both ways out."""
    done = typed("up", "--fleet", "lab", "--listen", "0.0.0.0")
    assert done.returncode == 2
    assert "shoal init" in done.stderr
    assert "insecure = true" in done.stderr
    assert "--insecure" in typed("up", "--help").stdout
