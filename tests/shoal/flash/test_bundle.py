"""A bundle: installed without a network it trains; what does not fit says so before anything is
changed.
"""

import hashlib
import io
import os
import platform
import re
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fleet_protocol.errors import ConfigError
from fleet_protocol.mapped_tensors import tensors_in
from shoal.flash import image
from shoal.flash.bundle import (
    PINS,
    bundle,
    fetch_wheels,
    pack_runtime,
    read_part,
    runtime_files,
)
from shoal.flash.debian import debian_package
from shoal.flash.settings import Board, load_flash_config
from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import initial_weights, samples, write_tiny_set
from tests.packaging.test_installed import interpreter
from tests.shoal.flash.conftest import PYTHON, on_path


def unpacked(path, folder):
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (place,) = folder.glob("shoal-*")
    return place


def install(place, root, path="", umask=-1):
    offline = [] if os.getuid() else ["unshare", "-n"]
    command = [
        "env",
        "-i",
        f"PATH={path or os.environ['PATH']}",
        *offline,
        place / "install.sh",
        root,
    ]
    given = {"capture_output": True, "text": True, "timeout": 200, "umask": umask}
    return subprocess.run(list(map(str, command)), check=False, **given)


@pytest.fixture
def made(flash, hollow, shoal, tmp_path):
    """A bundle of empty wheels, unpacked."""

    def make(*arguments, **keys):
        said = shoal(
            "flash",
            "bundle",
            "--config",
            flash(*arguments, **keys),
            "--wheels",
            hollow,
            "--out",
            "b.tar",
        )
        assert stat.S_IMODE((tmp_path / "b.tar").stat().st_mode) == 0o600
        return unpacked(tmp_path / "b.tar", tmp_path), said

    return make


@pytest.mark.slow
@pytest.mark.parametrize("version", dict.fromkeys([PYTHON, "3.10"]))
def test_it_installs_without_a_network_and_trains(flash, shoal, tmp_path, version):
    """On this Python and on JetPack 6's: few packages, at most 60 MB, none of the tests' own:
    doctor, and a round.
    """
    if subprocess.run(
        ["pip", "download", "-q", "--no-deps", "-d", tmp_path / "reach", "tomli"], check=False
    ).returncode:
        pytest.skip("pip reaches no index")
    found = interpreter(version)
    if found is None:
        pytest.skip(f"Python {version} is not installed")
    root = tmp_path / "root"
    shoal("flash", "bundle", "--config", flash(python=f'"{version}"'), "--out", "b.tar")
    assert (tmp_path / "b.tar").stat().st_size < 60e6
    path = f"{Path(found).parent}:{os.environ['PATH']}"
    done = install(unpacked(tmp_path / "b.tar", tmp_path), root, path)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = {path.name for path in root.glob("opt/shoal/lib/*/site-packages/*.dist-info")}
    assert len(installed) - 1 == len(PINS) + (version == "3.10") <= 12
    assert not any(name.startswith(("sympy", "protobuf", "typer", "rich")) for name in installed)
    python, x, y = root / "opt/shoal/bin/python", *samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    tiny = write_tiny_set(tmp_path / "tiny")
    with mosquitto_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        device = DeviceProcess(
            tmp_path, broker.url, {"kind": "npz", "path": "data.npz"}, python=str(python)
        )
        device.start(["env", "-i", "PYTHONOPTIMIZE=2"])  # as `launch` does
        try:
            server.wait_state("idle", device.id)
            weights = initial_weights()
            server.offer(device.id, tiny.choice(weights), round=1, task="t1")
            new = tensors_in(server.wait_update("t1"))
            assert device.terminate() == 0
        finally:
            device.kill()
        assert all(np.abs(new[name] - weights[name]).max() > 1e-3 for name in weights)
        command = [
            "env",
            "-i",
            root / "opt/shoal/bin/shoal",
            "device",
            "doctor",
            "--config",
            device.config,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
    assert "failed" not in done.stdout, done.stdout
    assert "ok       packages       onnx: onnxruntime 1.23.2" in done.stdout
    assert done.returncode == 0
    used = sum(path.stat().st_size for path in root.rglob("*") if not path.is_symlink())
    print(f"installed, with what Python has compiled: {used / 1e6:.0f} MB")
    assert used <= 120e6, used


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "version"), [("generic-arm64", "3.13"), ("jetson", "3.10"), ("generic-x86-64", "3.11")]
)
def test_what_a_board_gets_is_little(flash, version, kind):
    """Bundle, package and card have the same files: at most twelve distributions, and Shoal."""
    config = load_flash_config(flash(board=kind, python=f'"{version}"'))
    try:
        tree = list(runtime_files(config))
    except ConfigError as error:
        pytest.skip(str(error))
    size = sum(len(entry.data) for entry in tree)
    found = {
        part for entry in tree for part in entry.path.split("/") if part.endswith(".dist-info")
    }
    print(f"{kind}: {len(found) - 1} distributions, {size / 1e6:.0f} MB installed")
    assert len(found) - 1 <= 12
    assert size <= 100e6
    assert not [entry.path for entry in tree if "libonnxruntime.so" in entry.path]
    paths = {entry.path for entry in tree}
    card = image.script_inputs(config, None)["ours.tar"]
    folders = {str(folder) for path in paths for folder in Path(path).parents}
    package = debian_package(config).partition(b"data.tar.gz")[2].partition(b"`\n")[2]
    for archive, prefix in ((card, ""), (package, "./")):
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            names = {name.removeprefix(prefix) for name in opened.getnames()}
        assert (
            {name for name in names if name.startswith("opt/shoal/lib/")} - folders
            <= paths
            <= names
        )


def test_the_same_settings_give_the_same_bytes(flash, hollow):
    """So that what was tested is what is carried."""
    config = load_flash_config(flash())
    assert bundle(config, pack_runtime(config, hollow)) == bundle(
        config, pack_runtime(config, hollow)
    )


def test_secrets_are_for_their_owner_alone(made, tmp_path):
    """In the bundle and on the board, whatever the umask."""
    place, _ = made()
    members = []
    for name in ("runtime", "board"):
        with tarfile.open(place / f"{name}.tar.gz") as archive:
            members += archive.getmembers()
    modes = {member.name: member.mode for member in members}
    owners = {(member.uid, member.gid, member.mtime) for member in members}
    assert modes["etc/shoal/device.toml"] == modes["var/lib/shoal/data/train.npz"] == 0o600
    assert modes["opt/shoal/setup.sh"] == 0o755
    assert owners == {(0, 0, 0)}
    assert not any(
        name.endswith("/") or name in {"etc", "usr", "opt"} for name in modes
    )  # they are the system's


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({"uname": "echo armv7l"}, "this board is armv7l; set `board`"),
        ({f"python{PYTHON}": "echo /usr/bin/python False"}, "32-bit one"),
        ({f"python{PYTHON}": "exit 127"}, f"no Python {PYTHON} here"),
        ({"df": "echo; echo / 1 1 100 1% /"}, "make room, or take a larger card"),
    ],
)
def test_a_board_that_it_is_not_for_keeps_what_it_has(made, tmp_path, programs, words):
    """Another processor, a 32-bit system, another Python, a full card: exit code 2, and the old
    files stay.
    """
    place, _ = made()
    old = tmp_path / "root" / "opt" / "shoal" / "setup.sh"
    old.parent.mkdir(parents=True)
    old.write_text("here")
    done = install(place, tmp_path / "root", on_path(tmp_path, **programs))
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert old.read_text() == "here"


def test_a_damaged_bundle_is_not_installed(made, tmp_path):
    """A card or a stick that loses bits."""
    place, _ = made()
    data = bytearray((place / "board.tar.gz").read_bytes())
    data[len(data) // 2] ^= 1
    (place / "board.tar.gz").write_bytes(data)
    done = install(place, tmp_path / "root")
    assert (done.returncode, "damaged; copy it again" in done.stderr) == (2, True)
    assert not (tmp_path / "root").exists()


def test_a_runtime_that_does_not_run_is_told_at_once(made, tmp_path):
    """Here its wheels are empty; on a board a library may be missing. Settings that were there are
    kept.
    """
    place, said = made()
    assert f"for {platform.machine()} and Python {PYTHON}" in said
    settings = tmp_path / "root" / "etc" / "shoal"
    settings.mkdir(parents=True)
    (settings / "device.toml").write_text("mine")
    done = install(place, tmp_path / "root")
    assert done.returncode == 2
    assert re.search(
        r"onnxruntime does not run on this board: \w*Error: .*apt install libstdc\+\+6", done.stderr
    )
    assert (settings / "device.toml.old").read_text() == "mine"
    assert 'fleet = "lab"' in (settings / "device.toml").read_text()


def test_the_agents_user_may_enter_what_root_has_installed(made, tmp_path):
    """Whatever root's umask: with 027 no other user came into /opt/shoal, and the agent did not
    start.
    """
    place, _ = made()
    install(place, tmp_path / "root", umask=0o027)
    shoal = tmp_path / "root" / "opt" / "shoal"
    places = [shoal.parent, shoal, *shoal.rglob("*")]
    closed = [
        path
        for path in places
        if path.is_dir() and stat.S_IMODE(path.stat().st_mode) & 0o005 != 0o005
    ]
    assert (closed, stat.S_IMODE((shoal / "pyvenv.cfg").stat().st_mode)) == ([], 0o644)
    assert stat.S_IMODE((tmp_path / "root/etc/shoal/device.toml").stat().st_mode) == 0o600


def test_a_server_is_not_removed_for_an_agent(made, tmp_path):
    """Its virtual environment had lain in /opt/shoal, and was gone without a question."""
    place, _ = made()
    server = tmp_path / "root" / "opt" / "shoal" / "bin" / "pip"
    server.parent.mkdir(parents=True)
    server.write_text("a server's")
    done = install(place, tmp_path / "root")
    assert (done.returncode, "something else than a board's agent (a server?)" in done.stderr) == (
        2,
        True,
    )
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == [server]


def test_what_was_cut_off_is_installed_again(made, tmp_path):
    """A board without power after its first file: that is the agent's, though setup.sh is not there
    yet.
    """
    place, _ = made()
    with tarfile.open(place / "runtime.tar.gz") as archive:
        archive.extract(archive.next(), tmp_path / "root", filter="data")
    assert "onnxruntime does not run on this board" in install(place, tmp_path / "root").stderr
    assert (tmp_path / "root/opt/shoal/setup.sh").exists()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_the_unit_is_one_and_keeps_to_itself(tmp_path):
    """Systemd knows every line of it, and rates its exposure 2.0 or less of 10."""
    unit = tmp_path / "shoal-device.service"
    unit.write_text(
        read_part("shoal-device.service").decode().replace("/opt/shoal/bin/launch", "/bin/true")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert float(re.search(r"exposure level for .*: ([0-9.]+)", done.stdout)[1]) <= 2.0


def test_wheels_that_cannot_be_had_are_named(tmp_path, monkeypatch):
    """With where they may be put by hand; what is there is not asked for."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        Exception,
        match=r"pip cannot download .*onnxruntime==.* for aarch64 and Python 3.10: .*these wheels in",
    ):
        fetch_wheels(Board("aarch64", "3.10"), tmp_path)


def test_a_wheel_that_is_none_says_how_to_mend_it(flash, hollow):
    """A download that was cut off."""
    (broken,) = (hollow / f"{platform.machine()}-{PYTHON}").glob("numpy-*")
    broken.write_bytes(b"PK")
    with pytest.raises(Exception, match="delete it, and run this again to download it"):
        pack_runtime(load_flash_config(flash()), hollow)


def test_what_is_not_imported_stays_out(flash, hollow, tmp_path):
    """Onnxruntime's tools, numpy's tests, cffi but for its compiled half; licences stay."""
    (wheel,) = (hollow / f"{platform.machine()}-{PYTHON}").glob("numpy-*")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "onnxruntime/tools/a.py",
            "numpy/tests/a.py",
            "numpy/linalg/tests/a.py",
            "cffi/api.py",
            "a/b.pyi",
        ):
            archive.writestr(name, "unused")
        for name in (
            "numpy/testing/a.py",
            "_cffi_backend.abi3.so",
            "onnxruntime/capi/a.so",
            "numpy.dist-info/LICENSE",
        ):
            archive.writestr(name, "used")
    (tmp_path / "r.tar.gz").write_bytes(pack_runtime(load_flash_config(flash()), hollow).tree)
    with tarfile.open(tmp_path / "r.tar.gz") as inner:
        held = {
            Path(name).name: inner.extractfile(name).read()
            for name in inner.getnames()
            if name.endswith((".so", "LICENSE"))
        }
        assert not any(
            inner.extractfile(m).read() == b"unused" for m in inner.getmembers() if m.isfile()
        )
    assert set(held) == {"_cffi_backend.abi3.so", "a.so", "LICENSE"}


def test_the_check_sum_is_of_what_is_installed(made):
    """`install.sh` compares it."""
    place, _ = made()
    lines = [line.split() for line in (place / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} == {path.name for path in place.glob("*.gz")} != set()
    for said, name in lines:
        assert said == hashlib.sha256((place / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("package", ["device_runtime", "fleet_protocol"])
def test_what_a_board_imports_can_be_read_by_python_3_10(package):
    """There pydantic takes no class variable without its type, and JetPack 6 has no newer
    Python.
    """
    for path in (REPOSITORY / package).rglob("*.py"):
        assert not re.search(r": ClassVar( =|$)", path.read_text(), re.MULTILINE), path
