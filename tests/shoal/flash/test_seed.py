"""Seeding a card that has a system: in a folder, in an image without root, for a fleet; and its
first start.
"""

import json
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from fleet_protocol.errors import ConfigError
from shoal.flash.batch import Batch, seed_all
from tests.device_runtime.device_process import REPOSITORY
from tests.shoal.flash.conftest import on_path

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI me@here"
TABLES = f"""
[network]
ssid = "the barn"
password = "open 'sesame"
country = "DE"
[ssh]
keys = ["{KEY}"]
"""
TRIXIE = {
    "cmdline.txt": "console=tty1 root=PARTUUID=1-02 rootwait\n",
    "config.txt": "",
    "user-data": "",
    "meta-data": "",
}
BOOKWORM = {
    "cmdline.txt": "console=tty1 root=PARTUUID=1-02 init=/usr/lib/first\n",
    "config.txt": "",
    "kernel8.img": "",
}
OFFSET = 4 * 2**20
MEGABYTES = 64
needs_mtools = pytest.mark.skipif(
    shutil.which("mcopy") is None, reason="mtools are not installed: apt install mtools"
)


def mtools(*command):
    environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1"}
    return subprocess.run(
        command, capture_output=True, timeout=60, check=True, env=environment
    ).stdout


def read(folder, name):
    """A file of cloud-init's, below its first line, which is a comment."""
    return json.loads((folder / name).read_text().partition("\n")[2])


@pytest.fixture
def boot(tmp_path):
    """The folder of a boot partition."""

    def make(files):
        folder = tmp_path / "bootfs"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return folder

    return make


@pytest.fixture
def card(tmp_path, boot):
    """An image with a FAT partition, made without root: a partition table of one row, and
    mtools.
    """

    def make(files, name="system.img", megabytes=MEGABYTES):
        image = tmp_path / name
        row = bytes([0x80, 0, 0, 0, 0x0C, 0, 0, 0]) + (OFFSET // 512).to_bytes(4, "little")
        row += (megabytes * 2048).to_bytes(4, "little")
        with image.open("wb") as file:
            file.write(bytes(446) + row + bytes(48) + b"\x55\xaa")
            file.truncate(OFFSET + megabytes * 2**20)
        mtools("mformat", "-F", "-T", str(megabytes * 2048), "-i", f"{image}@@{OFFSET}", "::")
        folder = boot(files)
        mtools("mcopy", "-i", f"{image}@@{OFFSET}", *(str(folder / each) for each in files), "::/")
        return image

    return make


def test_a_system_with_cloud_init(flash, boot, hollow, tmp_path):
    """Account, Wi-Fi and the start of the installation; the radio's country is on the kernel's
    command line, too.
    """
    folder = boot(TRIXIE)
    (said,) = seed_all(Batch(flash(TABLES, board="rpi4", python=None), boot=folder, wheels=hollow))
    assert said == f"{folder}: pi-1, by cloud-init, for Python 3.13"
    assert (folder / "user-data").read_text().startswith("#cloud-config\n")
    user = read(folder, "user-data")
    assert (user["hostname"], user["ssh_pwauth"]) == ("pi-1", False)
    assert user["users"][0]["ssh_authorized_keys"] == [KEY]
    assert "shoal-first" in user["runcmd"][-1][-1]
    wifi = read(folder, "network-config")["wifis"]["wlan0"]
    assert wifi["access-points"] == {"the barn": {"password": "open 'sesame"}}
    assert wifi["regulatory-domain"] == "DE"
    before = TRIXIE["cmdline.txt"].strip()
    assert (folder / "cmdline.txt").read_text() == f"{before} cfg80211.ieee80211_regdom=DE\n"
    first = (folder / "meta-data").read_text()
    list(seed_all(Batch(flash(TABLES, board="rpi4", python=None), boot=folder, wheels=hollow)))
    assert (folder / "meta-data").read_text() == first  # seeding again changes nothing
    list(
        seed_all(
            Batch(
                flash(TABLES, board="rpi4", python=None, device='"pi-2"'),
                boot=folder,
                wheels=hollow,
            )
        )
    )
    assert (folder / "meta-data").read_text() != first
    assert (folder / "cmdline.txt").read_text().count("regdom") == 1


def test_without_ssh_and_wifi_there_is_neither(flash, boot, hollow):
    """No account that nobody asked for, and a WPA3 network is one."""
    folder = boot(TRIXIE)
    list(seed_all(Batch(flash(), boot=folder, wheels=hollow)))
    assert read(folder, "user-data")["users"] == []
    assert "wifis" not in read(folder, "network-config")
    list(
        seed_all(
            Batch(flash(TABLES.replace("[ssh]", "wpa3 = true\n[ssh]")), boot=folder, wheels=hollow)
        )
    )
    wifi = read(folder, "network-config")["wifis"]["wlan0"]
    assert wifi["access-points"]["the barn"]["auth"] == {
        "key-management": "sae",
        "password": "open 'sesame",
    }


def test_a_system_of_debian_12_runs_a_script_once(flash, boot, hollow, tmp_path):
    """What it does in a copy of such a system: name, account, Wi-Fi, unit; and the command line is
    as it was.
    """
    folder = boot(BOOKWORM)
    (said,) = seed_all(
        Batch(flash(TABLES, board="zero2w", python=None), boot=folder, wheels=hollow)
    )
    assert said.endswith("by firstrun, for Python 3.11")
    line = (folder / "cmdline.txt").read_text()
    assert "systemd.run=/boot/firmware/firstrun.sh systemd.run_success_action=reboot" in line
    root = tmp_path / "root"
    for name in (
        "etc/NetworkManager/system-connections",
        "etc/sudoers.d",
        "etc/systemd/system",
        "var/lib/systemd/rfkill",
    ):
        (root / name).mkdir(parents=True)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1\traspberrypi\n")
    (root / "var/lib/systemd/rfkill/platform:wlan").write_text("1\n")
    shutil.copytree(folder, root / "boot/firmware")
    log = tmp_path / "log"
    programs = {
        name: f'echo {name} "$@" >>{log}' for name in ("systemctl", "useradd", "chown", "rfkill")
    }
    script = ["sh", root / "boot/firmware/firstrun.sh", root]
    path = on_path(tmp_path, id="exit 1", sync="", **programs)
    subprocess.run(script, check=True, timeout=60, env={"PATH": path})
    assert (root / "etc/hostname").read_text() == "pi-1\n"
    assert "127.0.1.1\tpi-1\n" in (root / "etc/hosts").read_text()
    assert (root / "home/shoal-admin/.ssh/authorized_keys").read_text() == f"{KEY}\n"
    wifi = root / "etc/NetworkManager/system-connections/wifi.nmconnection"
    assert "\npsk=open\\s'sesame\n" in wifi.read_text()
    assert "ssid=116;104;101;32;98;97;114;110;\n" in wifi.read_text()
    assert stat.S_IMODE(wifi.stat().st_mode) == 0o600
    assert (root / "var/lib/systemd/rfkill/platform:wlan").read_text() == "0\n"
    told = log.read_text().splitlines()
    assert {"systemctl enable ssh", "systemctl enable shoal-first", "rfkill unblock wifi"} <= set(
        told
    )
    assert "useradd -m -s /bin/bash -G sudo shoal-admin" in told
    left = (root / "boot/firmware/cmdline.txt").read_text()
    assert left == BOOKWORM["cmdline.txt"].strip() + " cfg80211.ieee80211_regdom=DE\n"
    assert not (root / "boot/firmware/firstrun.sh").exists()
    assert not (root / "boot/firmware/shoal/wifi.nmconnection").exists()


@pytest.mark.parametrize("works", [True, False])
def test_the_bundle_is_installed_and_then_gone(flash, boot, hollow, tmp_path, works):
    """With the key in it; what goes wrong is kept beside, and tried again at the next start."""
    folder = boot(TRIXIE)
    list(seed_all(Batch(flash(), boot=folder, wheels=hollow)))
    (tmp_path / "place").mkdir()
    with tarfile.open(folder / "shoal/shoal.tar") as archive:
        archive.extractall(tmp_path / "place", filter="data")
    if works:  # the wheels are empty: an installer that is content with them
        (tmp_path / "place/shoal-pi-1/install.sh").write_text("#!/bin/sh\necho installed into $1\n")
        with tarfile.open(folder / "shoal/shoal.tar", "w") as archive:
            archive.add(tmp_path / "place/shoal-pi-1", "shoal-pi-1")
    script = ["sh", folder / "shoal/first.sh", tmp_path / "root"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    if works:
        assert (done.returncode, done.stdout) == (0, f"installed into {tmp_path}/root\n")
        assert not (folder / "shoal").exists()
    else:
        assert (done.returncode, "onnxruntime does not run on this board" in done.stderr) == (
            1,
            True,
        )
        assert "onnxruntime does not run on this board" in (folder / "shoal/error.txt").read_text()
        assert (folder / "shoal/shoal.tar").exists()
    assert not list(Path("/var/tmp").glob("shoal.*"))


@needs_mtools
@pytest.mark.parametrize("packed", [False, True])
def test_an_image_is_seeded_without_root(flash, card, hollow, shoal, tmp_path, packed):
    """In a copy that only its owner may read; the image itself stays as it was, and .xz is
    unpacked.
    """
    image = card(TRIXIE)
    before = image.read_bytes()
    if packed:
        image = image.with_suffix(".img.xz")
        image.write_bytes(lzma.compress(before, preset=0))
    arguments = ("--config", flash(TABLES), "--wheels", hollow, "--image", image)
    shoal("flash", "seed", *arguments, "--out", "card.img")
    copy = tmp_path / "card.img"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    drive = f"{copy}@@{OFFSET}"
    assert b"shoal-first" in mtools("mtype", "-i", drive, "::/user-data")
    assert b"regdom=DE" in mtools("mtype", "-i", drive, "::/cmdline.txt")
    mtools("mcopy", "-i", drive, "::/shoal/shoal.tar", str(tmp_path / "found.tar"))
    with tarfile.open(tmp_path / "found.tar") as archive:
        assert "shoal-pi-1/install.sh" in archive.getnames()
    shoal("flash", "seed", *arguments, "--out", "card.img")  # over what is there
    if not packed:
        assert image.read_bytes() == before


@needs_mtools
def test_a_full_boot_partition_is_told(flash, card, hollow, tmp_path):
    """The exit code of a full disk."""
    image = card({**TRIXIE, "large": "x" * (31 * 2**20)}, megabytes=34)
    config = flash()
    (tmp_path / "train.npz").write_bytes(os.urandom(4 * 2**20))
    with pytest.raises(Exception, match="is full or damaged") as error:
        list(seed_all(Batch(config, image=image, out=tmp_path / "card.img", wheels=hollow)))
    assert error.value.exit_code == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no image at all" * 100, "not an image of a card"),
        (lzma.compress(bytes(510) + b"\x55\xaa" + os.urandom(2**20))[:-400], "truncated"),
        (bytes(510) + b"\x55\xaa", "no FAT boot partition"),
    ],
)
def test_what_is_no_image_is_not_taken_for_one(flash, hollow, tmp_path, content, words):
    """And leaves no copy behind that looks like a card."""
    (tmp_path / "x.img").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(
            seed_all(
                Batch(flash(), image=tmp_path / "x.img", out=tmp_path / "card.img", wheels=hollow)
            )
        )
    assert not list(tmp_path.glob("card.img"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({**BOOKWORM, "kernel7l.img": ""}, "this is a 32-bit system"),
        ({"photo.jpg": ""}, "it contains photo.jpg; name the card's first partition"),
    ],
)
def test_what_cannot_be_seeded_is_left_as_it_is(flash, boot, hollow, files, words):
    """A 32-bit system, a folder of something else."""
    folder = boot(files)
    with pytest.raises(ConfigError, match=words):
        list(seed_all(Batch(flash(), boot=folder, wheels=hollow)))
    assert {path.name for path in folder.iterdir()} == set(files)


def test_a_fleet_of_cards_has_an_identity_each(flash, hollow, shoal, tmp_path):
    """From a table; who is enrolled keeps the key, so that a board that runs is not locked out."""
    shoal("init", "barn", "--host", "192.168.1.10")
    shoal("enroll", "pi-1", "--folder", "barn")
    kept = (tmp_path / "barn/devices/pi-1.enrolment").read_bytes()
    (tmp_path / "cards.csv").write_text(
        "\ufeffdevice,board,files\npi-1,rpi4,train.npz\npi-2,zero2w,train.npz;flash.toml\n"
    )
    config = flash(
        TABLES, **dict.fromkeys(("fleet", "device", "server", "board", "python", "files"))
    )
    said = shoal(
        *("flash", "seed", "--config", config, "--fleet", "cards.csv", "--folder", "barn"),
        *("--out", "cards", "--wheels", hollow),
    )
    assert [line.split(": ")[1] for line in said.splitlines()] == [
        f"{name}, by cloud-init, for Python 3.13" for name in ("pi-1", "pi-2")
    ]
    assert stat.S_IMODE((tmp_path / "cards").stat().st_mode) == 0o700
    enrolments = {}
    for name in ("pi-1", "pi-2"):
        with (
            tarfile.open(tmp_path / "cards" / name / "shoal/shoal.tar") as outer,
            tarfile.open(fileobj=outer.extractfile(f"shoal-{name}/board.tar.gz")) as inner,
        ):
            enrolments[name] = inner.extractfile("etc/shoal/enrolment").read()
            assert ("var/lib/shoal/data/flash.toml" in inner.getnames()) == (name == "pi-2")
        assert enrolments[name] == (tmp_path / f"barn/devices/{name}.enrolment").read_bytes()
        assert json.loads(enrolments[name])["name"] == name
    assert enrolments["pi-1"] == kept


def test_the_table_of_the_documentation_makes_cards_that_find_their_data(flash, hollow, tmp_path):
    """Its boards had files of other names than [data] path, and no board had found its own."""
    table = (
        (REPOSITORY / "docs" / "flash.md")
        .read_text()
        .partition("    device,files\n")[2]
        .partition("\n\n")[0]
    )
    rows = dict(line.split(",") for line in table.split())
    for name in ";".join(rows.values()).split(";"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "cards.csv").write_text("\n".join(["device,files", *table.split()]))
    out = tmp_path / "cards"
    list(
        seed_all(
            Batch(
                flash(device=None, files=None), out=out, fleet=tmp_path / "cards.csv", wheels=hollow
            )
        )
    )
    for device, carried in rows.items():
        with (
            tarfile.open(out / device / "shoal/shoal.tar") as outer,
            tarfile.open(fileobj=outer.extractfile(f"shoal-{device}/board.tar.gz")) as inner,
        ):
            found = inner.extractfile("var/lib/shoal/data/train.npz").read().decode()
        assert found == carried.split(";")[0]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("device,bord\npi-1,rpi4\n", "did you mean 'board'"),
        ("name\npi-1\n", "every row needs a `device`"),
        ("device\npi-1\npi-1\n", "pi-1 occurs twice"),
        ("", "every row needs a `device`"),
        ("device\npi-1\nPI_1\n", "several cards have the host name 'pi-1'"),
        ("device,board\npi-1,rpi4\npi-2,rpi9\n", "'rpi5' or 'zero2w'"),
    ],
)
def test_a_wrong_table_makes_no_card_at_all(flash, hollow, tmp_path, table, words):
    """Not even those of the rows before the mistake."""
    (tmp_path / "cards.csv").write_text(table)
    batch = Batch(
        flash(device=None, board=None, files=None),
        out=tmp_path / "out",
        fleet=tmp_path / "cards.csv",
        wheels=hollow,
    )
    with pytest.raises(ConfigError, match=words):
        list(seed_all(batch))
    assert not (tmp_path / "out").exists()


def test_what_is_to_be_seeded_must_be_said(shoal, flash):
    """With the three ways."""
    assert "give --boot FOLDER, or --image" in shoal("flash", "seed", "--config", flash(), code=2)


@pytest.mark.attack(
    "file",
    "The kernel command line on a card is not valid text",
    "refused with an error that names the file; the card stays unchanged",
    "2026-11-29",
)
def test_a_command_line_that_is_no_text_is_named(flash, boot, hollow):
    """It had ended in a traceback, after the other files were written."""
    folder = boot(TRIXIE)
    (folder / "cmdline.txt").write_bytes(b"console=\xff\xfe")
    with pytest.raises(ConfigError, match=r"cmdline\.txt of the boot partition is not UTF-8 text"):
        list(seed_all(Batch(flash(board="rpi4", python=None), boot=folder, wheels=hollow)))
    assert {path.name for path in folder.iterdir()} == TRIXIE.keys()
