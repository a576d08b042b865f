"""A card's image: what cannot be made says so, what is fetched is what was named, and only a card
is written over.
"""

import hashlib
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from fleet_protocol.errors import ConfigError, StorageError
from shoal.flash import image
from shoal.flash.image import Card, access_files, make_card, needs_tools, run_script
from shoal.flash.settings import load_flash_config
from shoal.flash.writer import find_disk, write_image
from tests.shoal.flash.mirror import needs_mirror

FILES = Path(image.__file__).parent / "files"


@pytest.fixture
def machine(tmp_path):
    """A root with /sys and /proc of a computer that has one disk, a card reader, and a slot for SD
    cards.
    """

    def disk(name, *parts, removable="0", kind="", size=8_000_000, model="Reader"):
        about = tmp_path / "devices" / name
        (about / "device").mkdir(parents=True)
        for path, text in {
            "removable": removable,
            "size": size,
            "device/type": kind,
            "device/model": model,
        }.items():
            (about / path).write_text(f"{text}\n")
        known = tmp_path / "sys/class/block"
        known.mkdir(parents=True, exist_ok=True)
        (known / name).symlink_to(about)
        for part in parts:
            (about / part / "holders").mkdir(parents=True)
            (about / part / "partition").write_text("1\n")
            (known / part).symlink_to(about / part)

    disk("sda", "sda1", model="Inside")
    disk("sdb", "sdb1", "sdb2", removable="1")
    disk("mmcblk0", "mmcblk0p1", kind="SD")
    disk("mmcblk1", kind="MMC")
    disk("sdc", removable="1", size=0)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("/dev/sda1 / ext4 rw 0 0\n")
    (tmp_path / "proc/swaps").write_text("Filename Type\n")
    return tmp_path


def test_a_card_in_a_reader_or_a_slot_may_be_written(machine):
    """USB readers say that they are removable; slots of their own do not, and are told by SD."""
    found = find_disk(Path("/dev/sdb"), 1, machine)
    assert (found.model, found.size) == ("Reader", 8_000_000 * 512)
    assert find_disk(Path("/dev/mmcblk0"), 1, machine).path == Path("/dev/mmcblk0")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sda", "is a built-in disk, not a card"),
        ("mmcblk1", "is a built-in disk, not a card"),
        ("sdb1", "name the whole disk: /dev/sdb"),
        ("nothing", "the removable disks are: mmcblk0, sdb, sdc"),
        ("sdc", "check that a card is inserted"),
    ],
)
def test_nothing_else_may_be(machine, name, words):
    """A disk that is built in, a part of a card, no disk at all, and an empty reader."""
    with pytest.raises(ConfigError) as refused:
        find_disk(Path("/dev") / name, 1, machine)
    assert words in str(refused.value)


@pytest.mark.parametrize("use", ["mount", "swap", "holder", "small"])
def test_a_card_in_use_or_too_small_is_left(machine, use):
    """Mounted, swapped to, held by another layer (LUKS, LVM), or smaller than the image."""
    need = 1
    if use == "mount":
        (machine / "proc/self/mounts").write_text("/dev/sdb2 /media/me ext4 rw 0 0\n")
    elif use == "swap":
        (machine / "proc/swaps").write_text("Filename Type\n/dev/sdb1 partition\n")
    elif use == "holder":
        (machine / "devices/sdb/sdb2/holders/dm-0").mkdir()
    else:
        need = 5_000_000_000
    with pytest.raises(
        ConfigError, match="use a larger one" if use == "small" else "umount it first"
    ):
        find_disk(Path("/dev/sdb"), need, machine)


def test_what_is_written_is_read_back(tmp_path):
    """All of it, told as it goes; what lies behind the image stays."""
    source = tmp_path / "card.img"
    disk = tmp_path / "disk"
    data = os.urandom(9 << 20)
    source.write_bytes(data)
    disk.write_bytes(b"x" * (10 << 20))
    told = []
    write_image(source, disk, lambda *said: told.append(said))
    assert disk.read_bytes() == data + b"x" * (1 << 20)
    assert [(what, done) for what, done, _ in told if done == len(data)] == [
        ("writing", len(data)),
        ("reading back", len(data)),
    ]


def test_a_card_that_loses_a_bit_is_told(tmp_path):
    """As worn or forged ones do."""
    source = tmp_path / "card.img"
    disk = tmp_path / "disk"
    source.write_bytes(os.urandom(6 << 20))
    disk.write_bytes(b"")

    def lose(what, done, size):
        if (what, done) == ("writing", size):
            with disk.open("r+b") as file:
                file.seek(5 << 20)
                byte = file.read(1)[0]
                file.seek(5 << 20)
                file.write(bytes([byte ^ 1]))

    with pytest.raises(StorageError, match=f"at byte {4 << 20}.*use another card"):
        write_image(source, disk, lose)


def test_a_file_is_no_card(tmp_path):
    """By this computer's own disks; and an image alone is nothing to do."""
    source = tmp_path / "card.img"
    empty = tmp_path / "empty.img"
    source.write_bytes(bytes(510) + b"\x55\xaa")
    empty.write_bytes(bytes(4096))
    for card, words in (
        (
            Card(image=source, to=tmp_path / "disk", yes=True),
            "is not a disk; the removable disks are",
        ),
        (Card(image=source), "--image needs --to with the card"),
        (Card(image=tmp_path / "none.img", to=tmp_path / "card"), r"none\.img is not an image"),
        (
            Card(image=empty, to=tmp_path / "card"),
            "is not an image of a card; decompress it if necessary",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            list(make_card(card, lambda _disk: True, lambda *_: None))


@pytest.mark.parametrize(
    ("tables", "keys", "words"),
    [
        ("", {"board": "rpi5"}, "cannot build a card for rpi5"),
        ("", {"python": '"3.12"'}, "set `python` to one of 3.11, 3.13"),
    ],
)
def test_what_no_card_is_made_for_is_told_before_anything_is_fetched(flash, tables, keys, words):
    """Each with the other ways to a board."""
    config = flash(tables, **({"board": "generic-arm64", "python": '"3.13"'} | keys))
    with pytest.raises(ConfigError) as refused:
        list(make_card(Card(config), lambda _disk: True, lambda *_: None))
    assert words in str(refused.value)
    assert "shoal flash bundle" in str(refused.value)


def test_what_is_missing_here_is_named(flash, monkeypatch, tmp_path):
    """Programs by their packages; then room."""
    config = flash(board="generic-arm64", python='"3.13"')
    monkeypatch.setattr(
        image.shutil, "which", lambda tool, path: None if tool in {"mcopy", "depmod"} else tool
    )
    with pytest.raises(ConfigError, match=r"apt install kmod mtools$"):
        needs_tools()
    monkeypatch.setattr(image, "needs_tools", lambda: None)
    full = shutil._ntuple_diskusage(10**9, 10**9, 0)
    monkeypatch.setattr(image.shutil, "disk_usage", lambda _path: full)
    with pytest.raises(StorageError, match="free some disk space"):
        list(
            make_card(Card(config, out=tmp_path / "card.img"), lambda _disk: True, lambda *_: None)
        )


WIFI = '[network]\nssid = "the barn"\npassword = "open \'sesame"\ncountry = "DE"\n'
SSH = '[ssh]\nuser = "me"\nkeys = ["ssh-ed25519 AAAA me@here"]\n'


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ['psk="open \'sesame"', "key_mgmt=WPA-PSK SAE", "ieee80211w=1"]),
        (
            "wpa3 = true\nhidden = true\n",
            ['psk="open \'sesame"', "key_mgmt=SAE", "ieee80211w=2", "scan_ssid=1"],
        ),
    ],
)
def test_a_card_knows_its_wifi_and_who_may_log_in(flash, more, words):
    """In files for root alone; WPA3 alone takes nothing less."""
    config = load_flash_config(flash(WIFI + more + SSH, board="generic-arm64", python='"3.13"'))
    entries = {entry.path: entry for entry in access_files(config)}
    wifi = entries["etc/wpa_supplicant/wpa_supplicant-wlan0.conf"]
    text = wifi.data.decode()
    assert (wifi.mode, text.splitlines()[0], text.count("{"), text.count("}")) == (
        0o600,
        "country=DE",
        1,
        1,
    )
    assert {f"ssid={b'the barn'.hex()}", *words} <= {line.strip() for line in text.splitlines()}
    assert entries["home/me/.ssh/authorized_keys"].data == b"ssh-ed25519 AAAA me@here\n"
    assert entries["etc/sudoers.d/010_shoal"].mode == 0o440


def test_an_open_network_has_no_password(flash):
    """And a card without tables neither radio nor door."""
    lines = WIFI.replace('password = "open \'sesame"\n', "")
    (wifi,) = access_files(load_flash_config(flash(lines)))
    assert b"key_mgmt=NONE" in wifi.data
    assert b"psk" not in wifi.data
    assert not list(access_files(load_flash_config(flash())))


@pytest.mark.parametrize(("tables", "found"), [("", False), (WIFI + SSH, True)])
def test_a_card_carries_what_its_tables_need(flash, hollow, tables, found):
    """Packages, modules, and units that start."""
    keys = {"board": "rpi4", "python": '"3.13"'}
    parts = image.script_inputs(load_flash_config(flash(tables, **keys)), hollow)
    for name, words in {
        "wanted": ("wpasupplicant\n", "dropbear-bin\n"),
        "card.modules": ("brcmfmac ",),
        "card.links": ("wants/wpa_supplicant@wlan0.service", "wants/shoal-ssh.service"),
    }.items():
        text = parts[name].decode()
        assert "#" not in text
        assert ":" not in text
        for word in words:
            assert (word in text) == found


needs_apt = pytest.mark.skipif(
    not Path("/usr/lib/apt/apt-helper").exists(), reason="apt is not installed"
)


def fetch(folder, lock, mirror="http://127.0.0.1:9"):
    """The script that fetches, in a folder of its own; what it hands to the one that builds."""
    for name in ("fetch_packages.sh", "apt.conf"):
        shutil.copy(FILES / name, folder)
    for name in ("wanted", "wanted-here"):
        (folder / name).write_text("busybox-static\n")
    run_script(["sh", "fetch_packages.sh", "trixie", mirror, folder / "kept", lock], folder)
    return (folder / "packages").read_text()


@needs_apt
def test_packages_are_what_their_digest_says(tmp_path):
    """Another file in the archive's place is not taken, and a kept one that changed is not used
    again.
    """
    source = tmp_path / "a_1_all.deb"
    lock = tmp_path / "lock"
    source.write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    lock.write_text(f"{digest} {source.name} file://{source}\n")
    place = tmp_path / "kept/packages" / digest
    assert fetch(tmp_path, lock) == f"{place} {source.name}\n"
    source.unlink()
    assert fetch(tmp_path, lock) == f"{place} {source.name}\n"
    place.write_bytes(b"another")
    with pytest.raises(ConfigError, match=r"a_1_all\.deb is not what its digest says"):
        fetch(tmp_path, lock)
    source.write_bytes(b"tampered with")
    with pytest.raises(ConfigError, match=r"1 packages cannot be fetched; is there a network"):
        fetch(tmp_path, lock)
    lock.write_text("[]\n")
    with pytest.raises(ConfigError, match="is no list of packages; remove it"):
        fetch(tmp_path, lock)


@pytest.mark.slow  # apt tries three times
@needs_apt
def test_an_archive_that_cannot_be_trusted_or_reached_is_none(tmp_path):
    """One without signed metadata, and one that is not there."""
    (tmp_path / "archive/dists/trixie").mkdir(parents=True)
    (tmp_path / "archive/dists/trixie/Release").write_text("Suite: trixie\nCodename: trixie\n")
    for mirror in (f"file://{tmp_path}/archive", "http://127.0.0.1:9"):
        with pytest.raises(
            ConfigError, match=r"no packages of Debian trixie from .*this needs a network, another"
        ):
            fetch(tmp_path, tmp_path / "lock", mirror)
        assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FILES.rglob("*") if path.suffix in {".sh", ".init"})
)
def test_scripts_are_shell(name):
    """Of Debian and of busybox, whichever runs them."""
    (path,) = FILES.rglob(name)
    assert subprocess.run(["dash", "-n", path], check=False, timeout=20).returncode == 0


def test_links_and_units_are_there():
    """Each of our units that is enabled is one that a card gets."""
    lines = [
        line.split()[-2:]
        for line in (FILES / "card.links").read_text().splitlines()
        if line[0] != "#"
    ]
    assert all(len(line) == 2 and not line[0].startswith("/") for line in lines)
    ours = {Path(target).name for _, target in lines if "/shoal-" in target}
    assert ours == {
        "shoal-card.service",
        "shoal-first.service",
        "shoal-device.service",
        "shoal-ssh.service",
    }
    # One file less, and neither sudo nor the console's login begins: what is for others includes
    # all of these.
    included = {"auth", "account", "password", "session", "session-noninteractive"}
    assert {
        path.name.removeprefix("common-") for path in (FILES / "card/etc/pam.d").iterdir()
    } == included
    for name in ("shoal-card.service", "shoal-ssh.service"):
        assert (FILES / "card/usr/lib/systemd/system" / name).exists()


def test_what_is_left_out_is_a_unit_or_a_generator():
    """And none that a card has settings for: systemd would not read them."""
    lines = [
        line.split()[-2:]
        for line in (FILES / "card.links").read_text().splitlines()
        if line[0] != "#"
    ]
    masked = [Path(path) for path, target in lines if target == "/dev/null"]
    assert {path.parent.as_posix() for path in masked} == {
        "etc/systemd/system",
        "etc/systemd/system-generators",
    }
    assert not {path.name for path in masked} & {
        path.parent.name.removesuffix(".d") for path in FILES.rglob("*.conf")
    }


@pytest.mark.slow
@pytest.mark.timeout(2400)
@needs_mirror
def test_the_same_inputs_give_the_same_card(flash, tmp_path):
    """Built twice from one lock, byte for byte; its file systems are whole, and what is secret is
    root's alone.
    """
    config = flash(board="generic-arm64", python='"3.13"')
    images = []
    for name in ("a.img", "b.img"):
        card = Card(config, tmp_path / name, lock=tmp_path / "card.lock")
        said = list(make_card(card, lambda _disk: False, lambda *_: None))
        assert said[0].endswith("packages of Debian trixie")
        images.append(tmp_path / name)
    first, second = images
    assert first.stat().st_mode & 0o777 == 0o600
    assert subprocess.run(["cmp", first, second], check=False).returncode == 0
    start = (4 + 192) << 20
    assert (
        subprocess.run(
            ["/sbin/e2fsck", "-fn", f"{first}?offset={start}"], capture_output=True, check=False
        ).returncode
        == 0
    )

    def about(path):
        command = ["/sbin/debugfs", "-R", f"stat {path}", f"{first}?offset={start}"]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return [words[words.index(key) + 1] for key in ("Mode:", "User:", "Group:")]

    assert (
        about("/var/lib/shoal/data/train.npz")
        == about("/etc/shoal/device.toml")
        == ["0600", "0", "0"]
    )
    assert about("/etc/shadow") == ["0640", "0", "42"]
    assert about("/usr/bin/mount") == ["04755", "0", "0"]
    assert about("/opt/shoal/setup.sh") == ["0755", "0", "0"]

    def content(path):
        command = ["/sbin/debugfs", "-R", f"cat {path}", f"{first}?offset={start}"]
        return subprocess.run(command, capture_output=True, check=True).stdout

    for name in (
        "opt/shoal/lib/python3.13/site-packages/device_runtime/main",
        "usr/lib/python3.13/argparse",
    ):
        folder, _, stem = f"/{name}".rpartition("/")
        compiled = content(f"{folder}/__pycache__/{stem}.cpython-313.opt-2.pyc")
        source = content(f"/{name}.py")
        assert struct.unpack("<3I", compiled[4:16]) == (
            0,
            1_700_000_000,
            len(source),
        )  # what Python looks at
        assert f"/{name}.py".encode() in compiled
