"""A bundle as `shoal flash` makes it, over the air: an older one installed by its script, a newer
one, a broken one.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from broker_server.service.rollout import read_rollout
from shoal.flash.bundle import bundle, fetch_wheels, pack_runtime
from shoal.flash.settings import load_flash_config
from tests.brokers import without_mosquitto
from tests.fleet.boards import Board, until

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
FLASH = """
board = "generic-{board}"
python = "{python}"
enrolment = "lab/devices/device-0.enrolment"
files = ["{data}"]
[data]
kind = "npz"
path = "device-0.npz"
[settings]
repair_seconds = 0.5
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    without_mosquitto,
]


def wheels_or_skip(config):
    """The wheels that `shoal flash` keeps; where there are none and no index is reached, the test
    is skipped.
    """
    try:
        return fetch_wheels(config.target)
    except Exception as error:  # noqa: BLE001  (whatever pip says)
        pytest.skip(f"no wheels: {error}")


def installed(folder, config, version, monkeypatch):
    """A board on which ``install.sh`` of a bundle of some version was run, without a network."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda _: version)
        data = bundle(config, pack_runtime(config))
    (folder / "b.tar").write_bytes(data)
    with tarfile.open(folder / "b.tar") as archive:
        archive.extractall(folder, filter="data")
    (script,) = folder.glob("shoal-*/install.sh")
    offline = [] if os.getuid() else ["unshare", "-n"]
    root = folder / "root"
    path = f"PATH={Path(sys.executable).resolve().parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["env", "-i", path, *offline, script, root],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    toml = (root / "etc/shoal/device.toml").read_text()
    for place in ("/etc/shoal", "/var/lib/shoal"):
        toml = toml.replace(f'"{place}', f'"{root}{place}')
    (folder / "device.toml").write_text(toml)
    (folder / "base").symlink_to(root / "opt/shoal")
    (folder / "state").symlink_to(root / "var/lib/shoal")
    return len(data)


def lacking(config, wheels, name, part, to):
    """The wheels, one of them without a file, in a cache; and what the file is called."""
    place = to / "shoal" / "wheels" / f"{config.target.machine}-{config.target.python}"
    shutil.copytree(wheels[0].parent, place)
    (wheel,) = place.glob(f"{name}-*.whl")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(to / "new", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        (gone,) = [each for each in old.namelist() if part in each]
        for each in old.namelist():
            if each != gone:
                new.writestr(each, old.read(each))
    (to / "new").replace(wheel)
    return Path(gone).name


def test_a_bundle_is_replaced_over_the_air_and_a_broken_one_takes_itself_back(
    lab, ground, monkeypatch
):
    """Packed, signed, fetched, tested, heard, and a round trained with it; then one without a
    library: none of that.
    """
    folder, up, _ = lab
    path = ground.folder / "flash.toml"
    machine = {"x86_64": "x86-64", "aarch64": "arm64"}[platform.machine()]
    path.write_text(FLASH.format(board=machine, python=PYTHON, data=ground.data / "device-0.npz"))
    config = load_flash_config(path)
    wheels = wheels_or_skip(config)

    def shoal(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *arguments],
            cwd=ground.folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def version():
        (board,) = (
            each
            for each in json.loads(shoal("devices", "--store", "store", "--json"))
            if each["device.id"]
        )
        return board["device.profile.runtime_version"]

    made = ground.folder / "board"
    made.mkdir()
    assert installed(made, config, "0.0.1", monkeypatch) < 60e6
    server = up(rounds=100_000)
    with Board(made) as board:
        until(server._devices.releases, board.log)
        assert version() == "0.0.1"
        shoal("rollout", "start", "flash.toml", "--folder", "lab", "--stage", "100", "--gate", "1")
        (ref,) = read_rollout(folder).release.builds.values()
        assert ref.size < 60e6
        number = read_rollout(folder).release.number
        until(
            lambda: read_rollout(folder).judged, board.log, lambda: read_rollout(folder)
        )  # it has trained
        assert read_rollout(folder).judged == {"device-0": ""}
        assert board.record == f"running {number} 0 0"
        assert version() == importlib.metadata.version("shoal") != "0.0.1"
        gone = lacking(config, wheels, "numpy", "/libscipy_openblas", ground.folder / "cache")
        shoal(
            "rollout",
            "start",
            "flash.toml",
            "--folder",
            "lab",
            XDG_CACHE_HOME=str(ground.folder / "cache"),
        )
        until(lambda: read_rollout(folder).stopped, board.log, lambda: board.record)
        worse = read_rollout(folder).release.number
        assert board.record.startswith(
            f"failed {worse} {number} 0 its self-test failed: ImportError: {gone}"
        )
        assert version() == importlib.metadata.version("shoal")
        for command in (("devices",), ("rollout", "show", "--folder", "lab")):
            said = shoal(*command, "--store", "store", COLUMNS="400")
            assert gone in said, said
        trained = board.log().count("state=uploading")
        until(lambda: board.log().count("state=uploading") > trained, board.log)
