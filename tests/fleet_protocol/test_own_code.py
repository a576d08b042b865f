"""Python functions run where the file that names them says so, and lie beside it, or in a folder
that it lists.
"""

import numpy as np
import pytest

from device_runtime.settings import load_device_config
from fleet_protocol.data import load_data
from fleet_protocol.errors import ConfigError
from shoal.cli.serving import read_fleet

CODE = """
import numpy as np


def load(path=None):
    return np.zeros((4, 2), np.float32), np.zeros(4, np.int64)


def same(x, generator=None):
    return x
"""
DEVICE = 'fleet = "lab"\ndevice = "pi"\nbroker = "mqtt://127.0.0.1:1"\nstate_dir = "state"\n'
FLEET = 'fleet = "lab"\n[model]\narch = "mlp"\n'


@pytest.fixture
def project(tmp_path):
    """A folder with a function and arrays, and another beside it."""
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(CODE)
    np.savez(
        tmp_path / "project" / "d.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64)
    )
    return tmp_path / "project"


def device(project, data, code=""):
    """A board's configuration."""
    path = project / "device.toml"
    path.write_text(f"{DEVICE}{code}\n[data]\n{data}")
    return load_device_config(path).data


def server(project, data, code=""):
    """A server's configuration, whose test set is read as a board's data."""
    path = project / "fleet.toml"
    path.write_text(f"{code}\n{FLEET}[evaluation.data]\n{data}")
    return read_fleet(path, None).evaluation.data


def server_by_tier(project, data, code=""):
    """Likewise, of a tier with labels of its own."""
    path = project / "fleet.toml"
    tables = (
        '[evaluation]\ntier = "w1"\n[evaluation.data]\nkind = "npz"\npath = '
        '"d.npz"\n[evaluation.tier_data.w1]\n'
    )
    path.write_text(f"{code}\n{FLEET}{tables}{data}")
    return read_fleet(path, None).evaluation.tier_data["w1"]


WHERE = pytest.mark.parametrize("where", [device, server, server_by_tier])
NAMED = pytest.mark.parametrize(
    "named",
    [
        'kind = "python"\nentry_point = "{file}:load"\n',
        'kind = "npz"\npath = "d.npz"\ntransforms = ["{file}:same"]\n',
        'kind = "npz"\npath = "d.npz"\naugment = ["{file}:same"]\n',
    ],
    ids=["entry point", "transforms", "augment"],
)


@WHERE
@NAMED
def test_a_function_beside_the_file_runs(where, named, project):
    """By a name that is relative, absolute, or goes round through another folder."""
    for file in ("own.py", f"{project}/own.py", "../elsewhere/../project/own.py"):
        assert len(load_data(where(project, named.format(file=file))).y) == 4


@pytest.mark.attack(
    "file",
    "A configuration names a Python function in another folder",
    "refused; the error names the file and the folder",
    "2026-11-28",
)
@WHERE
@NAMED
def test_a_function_elsewhere_does_not(where, named, project):
    """Nor one that a link beside the file leads to; the message says where it lies and what to
    write.
    """
    elsewhere = project.parent / "elsewhere"
    (project / "link.py").symlink_to(elsewhere / "own.py")
    (project / "links").symlink_to(elsewhere)
    for file in (f"{elsewhere}/own.py", "../elsewhere/own.py", "link.py", "links/own.py"):
        with pytest.raises(
            ConfigError, match=rf'which is in {elsewhere}: .*code = \["{elsewhere}"\]'
        ):
            where(project, named.format(file=file))
    with pytest.raises(ConfigError, match="which is in /usr/lib/python3"):
        where(project, named.format(file="/usr/lib/python3/subprocess.py"))


@WHERE
@NAMED
def test_a_folder_that_the_file_lists_is_as_its_own(where, named, project):
    """Relative to the file, as all paths in it; also that of an installed package."""
    elsewhere = project.parent / "elsewhere"
    for code in ('code = ["../elsewhere"]', f'code = ["/nowhere", "{elsewhere}"]'):
        assert len(load_data(where(project, named.format(file=f"{elsewhere}/own.py"), code)).y) == 4
