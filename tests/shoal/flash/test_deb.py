"""The Debian package, looked at and installed by dpkg itself."""

import os
import platform
import shutil
import subprocess

import pytest

from shoal.flash.debian import ARCHITECTURES, debian_package
from shoal.flash.settings import load_flash_config
from tests.shoal.flash.conftest import PYTHON

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not installed")


def dpkg(*command, code=0):
    said = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == code, said.stdout + said.stderr
    return said.stdout


@pytest.fixture
def package(flash, hollow, shoal, tmp_path):
    def make(**keys):
        path = tmp_path / "shoal-device.deb"
        shoal("flash", "deb", "--config", flash(**keys), "--wheels", hollow, "--out", path)
        return path

    return make


def test_dpkg_reads_it(package):
    """Fields, configuration files, permissions; folders have entries, and all belongs to root."""
    path = package()
    fields = dict(
        line.split(": ", 1)
        for line in dpkg("dpkg-deb", "-f", path).splitlines()
        if ": " in line[:20]
    )
    assert fields["Package"] == "shoal-device"
    assert fields["Architecture"] == ARCHITECTURES[platform.machine()]
    assert f"python{PYTHON}, libc6" in fields["Depends"]
    assert dpkg("dpkg-deb", "-I", path, "conffiles") == "/etc/shoal/device.toml\n"
    lines = {
        line.split()[-1]: line.split()[:2]
        for line in dpkg("dpkg-deb", "-c", path).splitlines()
        if "->" not in line
    }
    assert lines["./etc/shoal/device.toml"] == ["-rw-------", "0/0"]
    assert lines["./usr/lib/systemd/system/shoal-device.service"] == ["-rw-r--r--", "0/0"]
    assert lines["./opt/shoal/setup.sh"][0] == "-rwxr-xr-x"
    assert lines["./usr/lib/"] == ["drwxr-xr-x", "0/0"]
    assert "./usr/lib/sysusers.d/shoal.conf" in lines


def test_no_key_and_no_data_are_in_it(flash, shoal, hollow):
    """It expects the board's enrolment beside it, and says so."""
    shoal("init", "barn", "--host", "192.168.1.10")
    shoal("enroll", "pi-7", "--folder", "barn")
    path = flash(
        enrolment='"barn/devices/pi-7.enrolment"', **dict.fromkeys(("fleet", "device", "server"))
    )
    said = shoal("flash", "deb", "--config", path, "--wheels", hollow, "--out", "d.deb")
    assert "to /etc/shoal/enrolment" in said
    listed = dpkg("dpkg-deb", "-c", path.with_name("d.deb"))
    assert "device.toml" in listed
    assert not any(name in listed for name in ("etc/shoal/enrolment", "train.npz"))


def test_it_is_installed_upgraded_and_purged(package, tmp_path):
    """In a folder of its own: changed settings survive another package and removal, and nothing
    survives a purge.
    """
    root = tmp_path / "root"
    for folder in ("var/lib/dpkg/info", "var/lib/dpkg/updates"):
        (root / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    force = [
        "--force-script-chrootless",
        "--force-depends",
        *(["--force-not-root"] if os.getuid() else []),
    ]
    install = ["dpkg", f"--root={root}", f"--log={tmp_path}/log", *force, "--force-confold", "-i"]
    dpkg(*install, package())
    assert "shoal-device" in (root / "var/lib/dpkg/status").read_text()
    settings = root / "etc/shoal/device.toml"
    assert 'device = "pi-1"' in settings.read_text()
    (settings.with_name("enrolment")).write_text("key")
    settings.write_text("mine")
    dpkg(*install, package(device='"pi-2"'))
    assert settings.read_text() == "mine"
    assert (root / "opt/shoal/bin/python").is_symlink()
    (root / "opt/shoal/lib/compiled").touch()
    remove = [*install[:-2]]
    dpkg(*remove, "-r", "shoal-device")
    assert settings.read_text() == "mine"
    assert not (root / "opt/shoal").exists()
    dpkg(*remove, "-P", "shoal-device")
    assert not (root / "etc/shoal").exists()


def test_the_same_settings_give_the_same_package(flash, hollow):
    """Byte by byte."""
    config = load_flash_config(flash())
    assert debian_package(config, hollow) == debian_package(config, hollow)


@pytest.mark.skipif(
    shutil.which("systemd-tmpfiles") is None or os.getuid() != 0, reason="needs systemd, and root"
)
def test_the_agents_user_owns_its_key_and_its_data(package, tmp_path):
    """What systemd makes of the package's rules in a folder: a key for the user `shoal` alone, and
    its state.
    """
    root = tmp_path / "root"
    dpkg("dpkg-deb", "-x", package(), root)
    (root / "var/lib/shoal/data").mkdir(parents=True)
    for name in ("etc/shoal/enrolment", "var/lib/shoal/data/train.npz"):
        (root / name).write_text("x")
    dpkg("systemd-sysusers", f"--root={root}")
    user = next(
        line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("shoal:")
    )
    dpkg("systemd-tmpfiles", f"--root={root}", "--create", "shoal.conf")
    kept = {
        name: ((root / name).stat().st_uid, oct((root / name).stat().st_mode)[-3:])
        for name in ("etc/shoal", "etc/shoal/device.toml", "etc/shoal/enrolment", "var/lib/shoal")
    }
    own = int(user.split(":")[2])
    assert kept == {
        "etc/shoal": (0, "750"),
        "etc/shoal/device.toml": (0, "640"),
        "etc/shoal/enrolment": (own, "600"),
        "var/lib/shoal": (own, "700"),
    }
    assert (root / "var/lib/shoal/data/train.npz").stat().st_uid == own
