"""flash.toml: what a board will read follows from it, what is wrong says what to do, and no secret
is told.
"""

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
    """Its device.toml loads; data is where `files` go; further keys are passed on, tables
    included.
    """
    path = flash(
        '[settings]\nmax_width = 0.5\nbackend = "onnx"\n[settings.tls]\nca_file = "ca.pem"\n',
        server='"mqtts://h"',
    )
    config = load_flash_config(path)
    (tmp_path / "device.toml").write_text(config.device_toml())
    board = load_device_config(tmp_path / "device.toml")
    assert (board.fleet, board.device, board.broker, board.max_width) == (
        "lab",
        "pi-1",
        "mqtts://h",
        0.5,
    )
    assert (str(board.data.path), str(board.state_dir)) == (
        "/var/lib/shoal/data/train.npz",
        "/var/lib/shoal",
    )
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
        ('[network]\nssid = "home"\n', {}, 'such as "DE"'),
        (WIFI.replace("open sesame", "short") + 'country = "DE"\n', {}, "8 to 63 characters"),
        (
            "[ssh]\nkeys = ['id.pub']\n",
            {},
            "id.pub is neither a public key nor a file that contains one",
        ),
        (
            "[ssh]\nkeys = ['key']\n",
            {},
            "this file does not contain a public key; name OpenSSH's file that ends in .pub",
        ),
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
    "line",
    ['password = "hunter2"', "password = 87654321", 'password = "open sesame"\ncontry = "DE"'],
)
def test_no_message_has_the_password_in_it(flash, line):
    """Whatever is wrong with it, or beside it."""
    said = refused(flash(f'[network]\nssid = "home"\ncountry = "DE"\n{line}\n'))
    assert "network" in said
    assert not any(secret in said for secret in ("hunter2", "87654321", "sesame"))
    config = load_flash_config(flash(WIFI + 'country = "DE"\n'))
    assert "sesame" not in repr(config) + str(config)


@pytest.mark.parametrize(
    ("was", "to", "words"),
    [
        ("home", "\u00fc" * 17, "1 to 32 bytes"),
        ("home", "ho\\nme", "1 to 32 bytes"),
        ("open sesame", "open\\nsesame", "[network] password"),
    ],
)
def test_a_network_that_no_board_could_join_is_refused(flash, was, to, words):
    """More bytes than a name may have, and a line's end, which cut off what firstrun.sh and
    wpa_supplicant read.
    """
    said = refused(flash((WIFI + 'country = "DE"\n').replace(was, to)))
    assert (words in said, "sesame" in said) == (True, False)
    longest = WIFI.replace("home", "\u00fc" * 16) + 'country = "DE"\n'
    assert load_flash_config(flash(longest)).network.ssid == "\u00fc" * 16


def test_an_enrolment_makes_the_board_a_member(flash, shoal, tmp_path):
    """Fleet, name and server are in it; it is carried with the board's settings, and another's is
    refused.
    """
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
    assert (board.fleet, board.device, board.broker) == (
        "barn",
        "pi-7",
        "mqtts://192.168.1.10:8883",
    )
    member = {"enrolment": '"barn/devices/pi-7.enrolment"', **nobody}
    assert "but the enrolment" in refused(flash(**member | {"device": '"pi-8"'}))
    assert "[settings] broker is not allowed" in refused(
        flash('[settings]\nbroker = "mqtts://h"\n', **member)
    )
    assert "of the form mqtt://" in refused(flash(**member | {"server": '"192.168.1.10"'}))


def test_a_board_is_no_server_and_has_one_file_of_a_name(flash, shoal, tmp_path):
    """The server's keys must not be on a card; of two files the second had been written over the
    first.
    """
    shoal("init", "barn", "--host", "192.168.1.10")
    nobody = dict.fromkeys(("fleet", "device", "server"))
    assert "of a server, not of a device" in refused(
        flash(enrolment='"barn/server.enrolment"', **nobody)
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "train.npz").write_bytes(b"other")
    config = load_flash_config(flash(files='["train.npz", "more/train.npz"]'))
    with pytest.raises(
        ConfigError, match="two of the files would have the same name in /var/lib/shoal/data"
    ):
        list(settings_files(config))


def test_without_a_fleet_the_enrolment_comes_later(flash):
    """One bundle or package then serves every board of a fleet."""
    config = load_flash_config(flash(**dict.fromkeys(("fleet", "device", "server"))))
    assert '[identity]\nfile = "/etc/shoal/enrolment"' in config.device_toml()


@pytest.mark.parametrize(
    ("line", "server", "words"),
    [
        ('fleet = "lab"', None, "[settings] fleet is not allowed"),
        ('device = "pi-1"', None, "[settings] device is not allowed"),
        ('broker = "mqtts://h"', None, "[settings] broker is not allowed"),
        ('identity.file = "mine"', None, "[settings] identity is not allowed"),
        ('tls.ca_file = "ca.pem"', None, "[settings] tls is not allowed"),
        ("insecure = true", None, "[settings] insecure is not allowed"),
        ("", '"mqtts://me:secret@h"', "the login in server is not allowed"),
        ("", '"192.168.1.10"', "is not of the form mqtt://"),
    ],
)
def test_what_would_end_a_member_is_refused_before_it_is_on_a_card(flash, line, server, words):
    """The agent of a board that has an enrolment ended for good with each of them."""
    expecting = dict.fromkeys(("fleet", "device")) | {"server": server}
    said = refused(flash(f"[settings]\n{line}\n", **expecting))
    assert (words in said, "secret" in said) == (True, False)


def test_a_public_key_may_be_named_by_its_file(flash, tmp_path):
    """As most people have it."""
    (tmp_path / "id.pub").write_text(KEY + "\n")
    config = load_flash_config(flash(f"[ssh]\nkeys = ['id.pub', '{KEY}']\n"))
    assert config.ssh.keys == (KEY, KEY)


@pytest.mark.parametrize(
    "content",
    [
        b"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPrivate-Lines: 1\nAAAA\n",
        b"",
        b"my keys are at home\n",
        KEY.encode("utf-16"),
    ],
    ids=["putty", "empty", "text", "utf-16"],
)
def test_a_file_without_a_public_key_stays_here(flash, tmp_path, content):
    """PuTTY's private key had been put on the card, for everyone who holds it to read."""
    (tmp_path / "mine").write_bytes(content)
    assert "[ssh] keys: " in refused(flash("[ssh]\nkeys = ['mine']\n"))


NPZ = 'kind = "npz"\npath = "{}"\n'


@pytest.mark.parametrize(
    ("files", "data"),
    [
        ("attic.npz", NPZ.format("train.npz")),
        ("own.py attic.npz", NPZ.format("train.npz")),
        ("attic.npz", NPZ.format("/var/lib/shoal/data/train.npz")),
        ("train.npz", NPZ.format("lab/train.npz")),
        ("x.gz attic.gz", 'kind = "idx"\npath = "x.gz"\nlabels = "y.gz"\n'),
    ],
)
def test_files_that_are_not_those_of_the_data_are_refused(flash, tmp_path, files, data):
    """The board had them under another name than it looked for, and was in no round."""
    with pytest.raises(
        ConfigError, match=r"\[data\] names /var/lib/shoal/data/.*, and `files` carries"
    ):
        list(settings_files(load_flash_config(carrying(flash, tmp_path, files, data))))


@pytest.mark.parametrize(
    ("files", "data"),
    [
        ("", NPZ.format("train.npz")),
        ("train.npz extra.npz", NPZ.format("train.npz")),
        ("train.npz", NPZ.format("/var/lib/shoal/data/train.npz")),
        ("own.py", NPZ.format("train.npz") + 'transforms = ["own.py:halve"]\n'),
        ("own.py stats.npz", NPZ.format("/mnt/disk/train.npz") + 'transforms = ["own.py:scale"]\n'),
        ("own.py train.npz", 'kind = "python"\nentry_point = "own.py:load"\n'),
        ("labels.csv", 'kind = "images"\npath = "photos"\ntargets = "labels.csv"\n'),
        ("labels.csv", 'kind = "images"\npath = "photos.v2"\ntargets = "labels.csv"\n'),
        ("y.npy", NPZ.format("x.npy") + 'y_path = "y.npy"\n'),
        ("notes", 'kind = "images"\npath = "photos"\n'),
    ],
)
def test_data_that_comes_to_the_board_otherwise_is_no_mistake(flash, tmp_path, files, data):
    """Copied later, on a disk of its own, a folder of images; only what is needed beside it is
    carried.
    """
    config = load_flash_config(carrying(flash, tmp_path, files, data))
    carried = {entry.path for entry in settings_files(config)} - {"etc/shoal/device.toml"}
    assert carried == {f"var/lib/shoal/data/{name}" for name in files.split()}


def carrying(flash, tmp_path, files, data):
    """A flash.toml with these files, which are there, and this [data]."""
    for name in files.split():
        (tmp_path / name).write_bytes(b"")
    path = flash(files=str(files.split()).replace("'", '"'))
    path.write_text(path.read_text().partition("[data]")[0] + f"[data]\n{data}")
    return path


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_has_a_64_bit_processor_and_a_python(flash, board):
    """The table is complete; `python` overrides it."""
    config = load_flash_config(flash(board=board, python=None))
    assert config.target == BOARDS[board]
    assert load_flash_config(flash(board=board, python='"3.12"')).target.python == "3.12"
