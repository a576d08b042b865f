"""The ways of docs/howto.md: each command is there, each key is read, and what one machine can do
is done.
"""

import contextlib
import importlib.util
import json
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from paho.mqtt.subscribe import simple

from broker_server.store import Store
from fleet_protocol.configuration import load_config
from tests.brokers import free_port, mosquitto_broker, needs_mosquitto
from tests.documents.reference import FILES, commands, keys_of
from tests.shoal.view.stores import RUN, made

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "howto.md").read_text()
TYPED = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", TEXT, re.MULTILINE)]
BLOCKS = re.findall(r"^```toml\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PATIENCE = 500  # seconds
# Other tests do the same as some of the rest.
EXECUTED = {
    "init": "tests/shoal/test_templates.py",
    "export": "tests/shoal/test_templates.py",
    "enroll": "tests/test_howto.py",
    "up": "tests/test_howto.py",
    "device": "tests/test_howto.py",
    "simulate": "tests/simulation/test_ray.py",
    "flash": "tests/shoal/flash",
    "track": "tests/test_howto.py",
}


def test_every_command_can_be_typed():
    """The command is there, with each of its options, and somewhere it is executed."""
    known = {path.removeprefix("shoal "): options for path, _, options in commands()}
    assert len(TYPED) > 8
    for program, *words in TYPED:
        assert program == "shoal"
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        options = {word for typed, _ in known[name] for word in re.findall(r"--[\w-]+", typed)}
        assert {word for word in words if word.startswith("--")} <= options, words
        assert (ROOT / EXECUTED[words[0]]).exists()


@pytest.mark.parametrize(("name", "text"), BLOCKS)
def test_every_key_is_read(name, text):
    """In the table in which it stands, and by the file that the block names."""
    table = ""
    found = {(re.sub(r", .*", "]", key.table), key.name) for key in keys_of(FILES[name][0])}
    for line in text.splitlines():
        if line.startswith("["):
            table = line
        elif line:
            assert (table, line.split(" = ")[0]) in found, line


def test_no_block_is_left_out():
    """Each names its file."""
    assert len(BLOCKS) == TEXT.count("```toml") == 3


def typed_in(title):
    """The commands of a section, with this machine in the place of others."""
    (section,) = (
        part
        for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)
        if part.startswith(f"{title}\n")
    )
    lines = re.findall(r"^    (\S.*)$", section.replace("192.168.1.10", "127.0.0.1"), re.MULTILINE)
    return [[sys.executable, "-m", *shlex.split(line)] for line in lines]


def run(words, folder):
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@contextlib.contextmanager
def started(words, folder):
    """A process beside the test, which ends well when it is asked to."""
    path = folder / f"{words[3]}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    try:
        yield path
    finally:
        process.terminate()
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == 0, path.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_of_ones_own_is_explained(tmp_path):
    """Every tensor with what is cut from it, before anything is exported."""
    init, export = typed_in("Use your own model and data")
    run(init, tmp_path)
    said = run(export, tmp_path / "my-project")
    assert "w0.50" in said or "0.5" in said
    assert not (tmp_path / "my-project" / "artifacts").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mosquitto_lets_an_enrolled_board_in(tmp_path):
    """Server, Mosquitto and board as typed, but for the port; the server sees the board."""
    needs_mosquitto()
    init, enroll, up, device, elsewhere = typed_in("Run Mosquitto in production")
    run([*init, "--port", str(free_port())], tmp_path)
    run(enroll, tmp_path)
    fleet = tmp_path / "lab" / "fleet.toml"
    fleet.write_text(fleet.read_text().replace('"0.0.0.0"', '"127.0.0.1"'))
    shutil.copy(tmp_path / "lab" / "devices" / "pi-1.enrolment", tmp_path)
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4))
    (tmp_path / "device.toml").write_text(
        'state_dir = "state"\n[data]\nkind = "npz"\npath = "train.npz"\n'
    )
    with started(up, tmp_path) as server, started(device, tmp_path) as board:
        deadline = time.monotonic() + PATIENCE
        seen = []
        while not seen and time.monotonic() < deadline:
            time.sleep(1)
            if (tmp_path / "lab" / "store" / "shoal.db").exists():
                found = run([*up[:3], "devices", "--store", "lab/store", "--json"], tmp_path)
                seen = [view["device.id"] for view in json.loads(found) if view["device.online"]]
        assert seen == ["pi-1"], server.read_text() + board.read_text()
    shutil.rmtree(tmp_path / "lab")
    run(elsewhere, tmp_path)
    assert 'url = "mqtts://broker.lab:8883"' in fleet.read_text()
    assert (tmp_path / "lab" / "mosquitto" / "README.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_simulates_here_without_an_address(tmp_path):
    """The block as it stands, but for the cluster, beside the least that a simulation needs."""
    ((name, engine),) = [(name, text) for name, text in BLOCKS if "ray" in text]
    rest = (
        'out = "runs"\n[model]\narch = "mlp"\nwidths = [1, 0.5]\n[data]\nname = '
        '"digits"\ntrain_limit = 200\n'
    )
    shorter = engine.replace('address = "192.168.1.10:6379"\n', "").replace(
        "workers = 16", "workers = 1"
    )
    assert shorter.count("\n") == engine.count("\n") - 1
    (tmp_path / name).write_text(f"{rest}[devices]\ncount = 2\n[round]\nrounds = 1\n{shorter}")
    (simulate,) = typed_in("Simulate on a Ray cluster")
    for _ in range(
        5
    ):  # a machine with much else to do does not start Ray within the time that Ray allows
        done = subprocess.run(
            simulate, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if "timed out during startup" not in done.stderr:
            break
        assert "Ray cannot be started on this machine" in done.stderr
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    with closing(Store(tmp_path / "runs" / "store", read_only=True)) as store:
        assert [record.status for record in store.runs()] == ["finished"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_bundle_for_a_jetson_is_made_and_stays_off_other_boards(tmp_path):
    """The block and the command as they stand; a real Jetson is what cannot be had here, and
    `install.sh` says so.
    """
    if subprocess.run(
        ["pip", "download", "-q", "--no-deps", "-d", tmp_path / "w", "tomli"], check=False
    ).returncode:
        pytest.skip("pip reaches no index")
    ((name, text),) = [(name, text) for name, text in BLOCKS if "jetson" in text]
    (tmp_path / name).write_text(text)
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4))
    shoal = [sys.executable, "-m", "shoal"]
    run([*shoal, "init", "lab", "--host", "127.0.0.1"], tmp_path)
    run([*shoal, "enroll", "jetson-1", "--folder", "lab"], tmp_path)
    (bundle,) = typed_in("Set up a Jetson")
    run(bundle, tmp_path)
    (made,) = tmp_path.glob("*.tar")
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path / "board", filter="data")
    (place,) = (tmp_path / "board").iterdir()
    with tarfile.open(place / "runtime.tar.gz") as runtime:
        compiled = [name for name in runtime.getnames() if ".cpython-" in name]
    assert any("onnxruntime" in name for name in compiled)
    assert [name for name in compiled if "cpython-310-aarch64" not in name] == []
    if platform.machine() != "aarch64":
        typed = [place / "install.sh", tmp_path / "root"]
        done = subprocess.run(typed, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode != 0
        assert "aarch64" in done.stdout + done.stderr
        assert not (tmp_path / "root" / "opt").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_home_is_told(tmp_path):
    """Until who typed it ends it, also after the run; the broker of the home holds what it was
    told.
    """
    (track,) = typed_in("See the fleet in Home Assistant")
    store = made(tmp_path)
    with closing(Store(store)) as opened:
        opened.end_run(RUN, "finished", None)
    with mosquitto_broker(tmp_path) as broker:
        words = [word.replace("127.0.0.1", broker.url.partition("//")[2]) for word in track]
        assert words != track
        with subprocess.Popen(
            [*words, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as told:
            simple("shoal-state/#", hostname="127.0.0.1", port=broker.port)
            told.send_signal(signal.SIGINT)
            out, _ = told.communicate(timeout=60)
    assert (told.returncode, RUN in out) == (0, True)


@pytest.mark.parametrize(("name", "text"), [block for block in BLOCKS if block[0] == "fleet.toml"])
def test_a_fleet_reads_the_block(tmp_path, name, text):
    """Its values, too, are ones that may stand there."""
    (tmp_path / name).write_text(f'fleet = "f"\n[model]\narch = "a"\n{text}')
    assert load_config(tmp_path / name, FILES[name][0]).model.arch == "a"
