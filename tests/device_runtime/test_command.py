"""The device's command: configuration, exit codes, what it imports, a full disk."""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_runtime.board import installed_backends, probe
from device_runtime.settings import load_device_config
from fleet_protocol.errors import ConfigError, RefusalReason, StorageError
from fleet_protocol.messages import Refuse
from fleet_protocol.private_folders import make_private_folder
from tests.brokers import TestBroker, any_broker, free_port
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import initial_weights, samples, write_tiny_set

NPZ = {"kind": "npz", "path": "data.npz"}
AT_ONCE = {"connect_timeout_seconds": 1}


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[TestBroker]:
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def data(tmp_path) -> Path:
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return tmp_path


def exit_of(device: DeviceProcess) -> tuple[int, str]:
    device.start()
    try:
        return device.wait_exit(), device.log()
    finally:
        device.kill()


def test_paths_are_relative_to_the_configuration(tmp_path):
    """A configuration folder can be moved as a whole."""
    (tmp_path / "d.toml").write_text(
        'fleet="lab"\ndevice="pi"\nbroker="mqtts://b"\nstate_dir="state"\n'
        '[tls]\nca_file="ca.pem"\n[data]\nkind="python"\nentry_point="mine.py:load"\n'
    )
    config = load_device_config(tmp_path / "d.toml")
    assert config.state_dir == tmp_path / "state"
    assert config.address().ca_file == tmp_path / "ca.pem"
    assert config.data.entry_point == f"{tmp_path}/mine.py:load"
    assert (config.backend, config.threads, config.holdout) == ("auto", "auto", 0.1)


def test_certificates_for_a_plain_broker_are_a_mistake(tmp_path):
    """[tls] with mqtt:// would send in the clear what the operator believes encrypted."""
    (tmp_path / "d.toml").write_text(
        'fleet="lab"\ndevice="pi"\nbroker="mqtt://b"\nstate_dir="s"\n[tls]\nca_file="c"\n[data]\nkind="npz"\npath="d"\n'
    )
    with pytest.raises(ConfigError, match="write mqtts://"):
        load_device_config(tmp_path / "d.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b'kind="nzp"\npath="d"', "data: unknown kind 'nzp'; did you mean 'npz'?"),
        (b'kind="parquet"\npath="d"', "known kinds: npz, images, csv, idx, python"),
        (b'kind="python"\nentry_point="mine:load"', "write file.py:function, as in my_data.py"),
        (b'kind="npz"\npath="d\xe4"', "it is not UTF-8 text; save it as UTF-8"),
    ],
)
def test_a_mistake_in_a_table_of_data_says_what_to_write(tmp_path, table, message):
    """In the words of the file, not in those of the library that checks it."""
    top = b'fleet="lab"\ndevice="pi"\nbroker="mqtts://b"\nstate_dir="s"\n[data]\n'
    (tmp_path / "d.toml").write_bytes(top + table)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_device_config(tmp_path / "d.toml")


@pytest.mark.parametrize(
    ("place", "remedy"),
    [("file", "move the file with this name away"), ("file/state", "choose another folder")],
)
def test_a_folder_where_a_file_is_says_what_to_do(tmp_path, place, remedy):
    """The agent and the server make their folders in the same way."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"cannot make .*{place}: .*; .*{remedy}"):
        make_private_folder(tmp_path / place)


@pytest.mark.parametrize(
    ("options", "table", "code", "message"),
    [
        ({"max_widht": 0.5}, NPZ, 2, "unknown key 'max_widht'; did you mean 'max_width'?"),
        (AT_ONCE, {"kind": "npz", "path": "no.npz"}, 4, "no.npz does not exist"),
        (AT_ONCE, {"kind": "images", "path": "no"}, 4, "no does not exist"),
        (AT_ONCE, NPZ, 5, "cannot connect to the broker at mqtt://127.0.0.1:"),
        ({"state_dir": "/proc/shoal"}, NPZ, 7, "cannot make /proc/shoal"),
    ],
    ids=["unknown key", "missing file", "missing folder", "broker down", "unusable state folder"],
)
def test_errors_end_with_one_line_and_their_code(data, options, table, code, message):
    """What the operator got wrong is said in one line, with the exit code of its kind."""
    device = DeviceProcess(data, f"mqtt://127.0.0.1:{free_port()}", table, **options)
    found, log = exit_of(device)
    assert found == code
    last = log.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in log
    if code == 4:  # nobody waits for the broker to read what is wrong
        assert log.index(message) < log.index("connecting to")


def test_two_agents_cannot_share_a_state_folder(data, broker):
    """The second one says so and leaves the first alone."""
    first = DeviceProcess(data, broker.url, NPZ, device="one")
    first.start()
    try:
        first.wait_log("state=idle")
        second = DeviceProcess(
            data / "second",
            broker.url,
            {"kind": "npz", "path": "../data.npz"},
            device="two",
            state_dir=str(first.state_dir),
        )
        code, log = exit_of(second)
        assert code == 2
        assert "another agent uses" in log
        assert first.states()[-1] == "idle"
    finally:
        first.kill()


def test_the_agent_imports_nothing_it_must_not():
    """No torch, onnx or server package comes along, with any module of the device or with
    onnxruntime itself.
    """
    code = """
import importlib, pkgutil, sys
import device_runtime
for found in pkgutil.walk_packages(device_runtime.__path__, "device_runtime."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from device_runtime.training.backends import load_runtime
load_runtime()
banned = ("torch", "onnx", "models", "broker_server", "trainer_export", "sqlalchemy", "typer", "rich", "safetensors")
print([name for name in sys.modules if name.split(".")[0] in banned])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_idle_agent_has_not_loaded_the_runtime():
    """The runtime costs 20 MB; the agent loads it when there is something to train."""
    code = "import sys, device_runtime.main; print('onnxruntime' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says what lies in memory")
def test_what_loading_has_read_is_given_back():
    """Half of what is mapped of files goes, nothing that was written does, and what is used
    afterwards works.
    """
    code = """
import zlib, numpy as np, device_runtime.main, cryptography.hazmat.primitives.ciphers.aead as aead
from pathlib import Path
from device_runtime.board import proc_number
from device_runtime.training.backends.runtime import forget_loading, load_runtime
def sizes():
    return [proc_number(Path("/proc/self/status"), key) for key in ("RssFile", "RssAnon")]
def computed():
    x = np.random.default_rng(1).normal(size=(40, 40))
    sealed = aead.ChaCha20Poly1305(bytes(32)).encrypt(bytes(12), x.tobytes(), None)
    return zlib.crc32(sealed), np.linalg.inv(x @ x.T).tobytes(), load_runtime().get_available_providers()
first = computed()
before = sizes()
forget_loading("now")
after = sizes()
assert after[0] < before[0] / 2, (before, after)
assert after[1] > before[1] - 2**20, (before, after)
assert computed() == first
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr


def test_the_board_is_probed_without_extra_packages(tmp_path):
    """Memory, cores and runtimes are known; temperature and power come from the kernel's files, if
    it has them.
    """
    board = probe(tmp_path)
    assert board.cores >= 1
    assert board.ram_bytes >= board.free_ram_bytes > 0
    assert board.backends == installed_backends()
    assert "onnx" in board.backends
    assert (board.temperature_celsius, board.on_battery) == (None, None)
    for path, text in {
        "thermal/thermal_zone0/temp": "41000",
        "thermal/thermal_zone1/temp": "55500\n",
        "power_supply/BAT0/type": "Battery",
        "power_supply/BAT0/status": "Discharging",
        "power_supply/AC/type": "Mains",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    board = probe(tmp_path)
    assert (board.temperature_celsius, board.on_battery) == (55.5, True)


def small_disk(folder: Path, kilobytes: int, ballast: int) -> list[str]:
    """A command prefix that runs a command with a tiny file system of its own on ``folder``, so
    much of it taken.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    folder.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size={kilobytes}k none "{folder}"'
    script = f'{mount} && head -c {ballast}k /dev/zero > "{folder}/ballast" && exec "$@"'
    prefix = [unshare, "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    probe_run = subprocess.run(
        [*prefix, "true"], capture_output=True, text=True, timeout=20, check=False
    )
    if probe_run.returncode:
        pytest.skip(f"no mount namespaces here: {probe_run.stderr.strip()}")
    return prefix


@contextlib.contextmanager
def device_on_small_disk(
    data: Path, url: str, kilobytes: int, ballast: int = 0
) -> Iterator[DeviceProcess]:
    device = DeviceProcess(data, url, NPZ, device=f"disk-{kilobytes}")
    device.start(small_disk(device.state_dir, kilobytes, ballast))
    try:
        yield device
    finally:
        device.kill()


def test_a_full_disk_refuses_the_task_and_loses_nothing(data, broker):
    """Blobs that do not fit are refused as such; the device lives on and takes a task that fits."""
    tiny = write_tiny_set(data / "server")
    padding = initial_weights() | {"padding": np.zeros(3_000_000 // 4, np.float32)}
    with (
        scripted_server(broker.url, tiny.blobs) as server,
        device_on_small_disk(data, broker.url, 2000) as device,
    ):
        server.wait_state("idle", device.id)
        server.offer(device.id, tiny.choice(initial_weights()), task="fits")
        server.wait_update("fits")
        server.offer(device.id, tiny.choice(padding), task="huge")
        refusal = server.wait_message(Refuse, "huge")
        assert refusal.reason is RefusalReason.NO_SPACE
        assert "the disk is full: cannot write" in refusal.detail
        device.wait_log("freed ")
        requests = len(server.messages)
        server.offer(device.id, tiny.choice(initial_weights(1)), task="fits-again")
        server.wait_update("fits-again")
        assert device.states()[-1] in {"uploading", "dropping", "idle"}
        assert all(m.task == "fits-again" for m in server.messages[requests:])


def test_a_disk_without_room_for_the_record_refuses(data, broker):
    """Even the task record may not fit; the server hears that too."""
    tiny = write_tiny_set(data / "server")
    with (
        scripted_server(broker.url, tiny.blobs) as server,
        device_on_small_disk(data, broker.url, 8, 8) as device,
    ):
        server.wait_state("idle", device.id)
        server.offer(device.id, tiny.choice(initial_weights()))
        refusal = server.wait_message(Refuse)
        assert refusal.reason is RefusalReason.NO_SPACE
        assert "task.json" in refusal.detail
        device.wait_log("state=idle", times=2)
