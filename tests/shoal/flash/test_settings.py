"""flash.toml: what a board will read follows from it, what is wrong says what to do, and no secret is told."""

import pytest

from device_runtime.settings import load_device_config
from fleet_protocol.errors import ConfigError
from shoal.flash.bundle import settings_files
from shoal.flash.settings import BOARDS, load_flash_config

WIFI = '[network]\nssid = "home"\npassword = "open sesame"\n'
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI me@here"


def refused(path):
    with pytest.raises(ConfigError) as error:
        load_flash_config(path)
    return str(error.value)


def test_the_board_reads_what_was_meant(flash, tmp_path):
    """Its device.toml loads; data is where `files` go; further keys are passed on, tables included."""
    path = flash(
        '[settings]\nmax_width = 0.5\nbackend = "onnx"\n[settings.tls]\nca_file = "ca.pem"\n', server='"mqtts://h"'
    )
    config = load_flash_config(path)
    (tmp_path / "device.toml").write_text(config.device_toml())
    board = load_device_config(tmp_path / "device.toml")
    assert (board.fleet, board.device, board.broker, board.max_width) == ("lab", "pi-1", "mqtts://h", 0.5)
    assert (str(board.data.path), str(board.state_dir)) == ("/var/lib/shoal/data/train.npz", "/var/lib/shoal")
    assert board.tls.ca_file == tmp_path / "ca.pem"
    files = {entry.path: entry for entry in settings_files(config)}
    assert set(files) == {"etc/shoal/device.toml", "var/lib/shoal/data/train.npz"}
    assert {entry.mode for entry in files.values()} == {0o600}
    assert config.host == "pi-1"


@pytest.mark.parametrize(
    ("tables", "keys", "words"),
    [
        ("", {"board": "rpi2"}, "'rpi3', 'rpi4', 'rpi5' or 'zero2w'"),
        ("", {"bord": '"rpi4"'}, "did you mean 'board'?"),
        ('[network]\nssid = "home"\n', {}, 'country = "DE"'),
        (WIFI.replace("open sesame", "short") + 'country = "DE"\n', {}, "8 to 63 characters"),
        ("[ssh]\nkeys = ['id.pub']\n", {}, "id.pub is no public key and no file: No such file or directory"),
        ("[ssh]\nkeys = ['key']\n", {}, "a private key must not leave this computer"),
        ("[settings]\nmax_widht = 0.5\n", {}, "did you mean 'max_width'?"),
        ("", {"server": '"mqtt://192.168.1.10"'}, "insecure = true"),
        ("", {"device": None}, "device: Field required"),
        ("", {"enrolment": '"none.enrolment"'}, "cannot read the enrolment"),
    ],
)
def test_what_is_wrong_says_what_to_do(flash, tmp_path, tables, keys, words):
    """Before anything is packed."""
    (tmp_path / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    assert words in refused(flash(tables, **keys))


@pytest.mark.parametrize(
    "line", ['password = "hunter2"', "password = 87654321", 'password = "open sesame"\ncontry = "DE"']
)
def test_no_message_has_the_password_in_it(flash, line):
    """Whatever is wrong with it, or beside it."""
    said = refused(flash(f'[network]\nssid = "home"\ncountry = "DE"\n{line}\n'))
    assert "network" in said
    assert not any(secret in said for secret in ("hunter2", "87654321", "sesame"))
    config = load_flash_config(flash(WIFI + 'country = "DE"\n'))
    assert "sesame" not in repr(config) + str(config)


def test_an_enrolment_makes_the_board_a_member(flash, shoal, tmp_path):
    """Fleet, name and server are in it; it is carried with the board's settings, and another's is refused."""
    shoal("init", "barn", "--host", "192.168.1.10")
    shoal("enroll", "pi-7", "--folder", "barn")
    nobody = dict.fromkeys(("fleet", "device", "server"))
    path = flash(enrolment='"barn/devices/pi-7.enrolment"', **nobody)
    config = load_flash_config(path)
    assert (config.host, config.fleet, config.device) == ("pi-7", "barn", "pi-7")
    files = {entry.path: entry for entry in settings_files(config)}
    secret = files["etc/shoal/enrolment"]
    assert secret.data == (tmp_path / "barn" / "devices" / "pi-7.enrolment").read_bytes()
    (tmp_path / "enrolment").write_bytes(secret.data)
    (tmp_path / "enrolment").chmod(secret.mode)
    text = config.device_toml()
    assert 'file = "/etc/shoal/enrolment"' in text
    text = text.replace("/etc/shoal/enrolment", "enrolment").replace('"/var/lib/shoal"', '"state"')
    (tmp_path / "device.toml").write_text(text)
    board = load_device_config(tmp_path / "device.toml")
    assert (board.fleet, board.device, board.broker) == ("barn", "pi-7", "mqtts://192.168.1.10:8883")
    assert "in the enrolment" in refused(flash(enrolment='"barn/devices/pi-7.enrolment"', device='"pi-8"', fleet=None))


def test_a_board_is_no_server_and_has_one_file_of_a_name(flash, shoal, tmp_path):
    """The server's keys must not be on a card; of two files the second had been written over the first."""
    shoal("init", "barn", "--host", "192.168.1.10")
    nobody = dict.fromkeys(("fleet", "device", "server"))
    assert "of a server, not of a device" in refused(flash(enrolment='"barn/server.enrolment"', **nobody))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "train.npz").write_bytes(b"other")
    config = load_flash_config(flash(files='["train.npz", "more/train.npz"]'))
    with pytest.raises(ConfigError, match="two of the files have one name in /var/lib/shoal/data"):
        list(settings_files(config))


def test_without_a_fleet_the_enrolment_comes_later(flash):
    """One bundle or package then serves every board of a fleet."""
    config = load_flash_config(flash(**dict.fromkeys(("fleet", "device", "server"))))
    assert '[identity]\nfile = "/etc/shoal/enrolment"' in config.device_toml()


def test_a_public_key_may_be_named_by_its_file(flash, tmp_path):
    """As most people have it."""
    (tmp_path / "id.pub").write_text(KEY + "\n")
    config = load_flash_config(flash(f"[ssh]\nkeys = ['id.pub', '{KEY}']\n"))
    assert config.ssh.keys == (KEY, KEY)


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_has_a_64_bit_processor_and_a_python(flash, board):
    """The table is complete; `python` overrides it."""
    config = load_flash_config(flash(board=board, python=None))
    assert config.target == BOARDS[board]
    assert load_flash_config(flash(board=board, python='"3.12"')).target.python == "3.12"
