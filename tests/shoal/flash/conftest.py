"""A flash.toml for this computer, and wheels that are empty so that packing takes no time."""

import os
import platform
import sys
import zipfile

import numpy as np
import pytest

from shoal.flash.bundle import PINS
from tests.broker_server.conftest import artifacts, config, fleet, test_set, url
from tests.device_runtime.tiny_set import samples

__all__ = ["artifacts", "config", "flash", "fleet", "hollow", "test_set", "url"]

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
FLASH = """
board = "generic-{board}"
python = "{python}"
fleet = "lab"
device = "pi-1"
server = "mqtt://127.0.0.1:{port}"
files = ["train.npz"]
[data]
kind = "npz"
path = "train.npz"
"""


@pytest.fixture
def flash(tmp_path):
    """Write a flash.toml, its keys changed or added; tables come as text."""
    x, y = samples(50)
    np.savez(tmp_path / "train.npz", x=x, y=y)

    def write(tables="", *, port=1, board="", **keys):
        machine = {"x86_64": "x86-64", "aarch64": "arm64"}[platform.machine()]
        lines = FLASH.format(board=machine, python=PYTHON, port=port).splitlines()
        keys |= {"board": f'"{board}"'} if board else {}
        kept = [line for line in lines if line.partition(" ")[0] not in keys]
        added = [f"{key} = {value}" for key, value in keys.items() if value is not None]
        path = tmp_path / "flash.toml"
        path.write_text("\n".join([*added, *kept, tables]) + "\n")
        return path

    return write


@pytest.fixture
def hollow(tmp_path):
    """A folder of wheels for every kind of board, each with nothing but a name."""
    folder = tmp_path / "wheels"
    for machine in ("x86_64", "aarch64"):
        for python in ("3.10", "3.11", "3.12", "3.13"):
            place = folder / f"{machine}-{python}"
            place.mkdir(parents=True)
            for name, version in {**PINS, "tomli": "2.3.0"}.items():
                stem = f"{name.replace('-', '_')}-{version}"
                with zipfile.ZipFile(place / f"{stem}-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(
                        f"{stem}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n"
                    )
    return folder


@pytest.fixture
def shoal(typed):
    """Run the command in the test's folder."""

    def run(*arguments, code=0):
        done = typed(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def on_path(tmp_path, **programs):
    """A PATH on which some programs are others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
