"""A board whose runtime does not work joins and says why; where the runtime works, it is tried
once.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from device_runtime import self_test as module
from device_runtime.board import installed_backends
from device_runtime.self_test import self_test
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import blob_digest
from fleet_protocol.manifest import Manifest
from tests.brokers import any_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import packaged, samples

WRONG = """
import sys, sysconfig
del sys.modules["onnxruntime"]
sys.path.insert(0, sysconfig.get_path("platlib"))
import onnxruntime
onnxruntime.SessionIOBinding.bind_ortvalue_output = lambda *_: None
onnxruntime.InferenceSession.run_with_iobinding = lambda *_: None
"""
CHAINED = """
try:
    raise ImportError("libblas.so.3: cannot open it")
except ImportError as error:
    raise ImportError("you should not,\\n  relaunch it") from error
"""
BROKEN = {
    "a library is missing": (
        "raise ImportError('libgomp.so.1: cannot open shared object file')",
        "libgomp.so.1: cannot open shared object file",
    ),
    "a library is missing to what was imported": (CHAINED, "libblas.so.3: cannot open it"),
    "a package is missing": ("import flatbufers", "No module named 'flatbufers'"),
    "another processor": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGILL)",
        "died of SIGILL: is it built for this processor?",
    ),
    "half a package": ("", "has no attribute 'SessionOptions'"),
    "wrong arithmetic": (WRONG, "change the loss from 0.0 to 0.0"),
}


def broken(folder: Path, code: str) -> str:
    """A path for Python on which another onnxruntime comes first."""
    (folder / "lib" / "onnxruntime").mkdir(parents=True)
    (folder / "lib" / "onnxruntime" / "__init__.py").write_text(code)
    return os.pathsep.join([str(folder / "lib"), str(REPOSITORY)])


def test_what_works_is_tried_once(tmp_path, monkeypatch):
    """The state folder remembers it, until the runtime, Python or Shoal is another."""
    assert self_test(tmp_path, "onnx") == ""
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, "raise SystemExit('tried again')"))
    assert self_test(tmp_path, "onnx") == ""
    monkeypatch.setattr(module, "runtime_version", lambda: "another")
    assert "tried again" in self_test(tmp_path, "onnx")


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_work_is_named_with_what_to_do(tmp_path, monkeypatch, kind):
    """Whatever it does to the process that tries it; and it is not remembered as working."""
    code, words = BROKEN[kind]
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, code))
    said = self_test(tmp_path / "state", "onnx")
    runtime = installed_backends()["onnx"]
    assert said.startswith(f"{runtime} does not work on this board: ")
    assert words in said
    assert f"pip install --force-reinstall {runtime.split()[0]}" in said
    assert not (tmp_path / "state").exists()


def test_the_set_that_is_trained_is_the_one_that_the_tests_know():
    """Its manifest as it is made, and a graph whose steps are those of numpy (`test_training`)."""
    folder = Path(module.__file__).parent / "self_test_set"
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = Manifest.model_validate_json(found["manifest.json"])
    made = packaged()
    assert found["manifest.json"] == made["manifest.json"]
    assert found["train.onnx"] == made["train.onnx"]
    assert manifest.graphs["onnx/train"].digest == blob_digest(found["train.onnx"])


def test_a_test_that_hangs_has_an_end(tmp_path, monkeypatch):
    """A board that waits for ever would never join."""
    monkeypatch.setenv("PYTHONPATH", broken(tmp_path, "import threading\nthreading.Event().wait()"))
    monkeypatch.setattr(module, "_SECONDS", 1.0)
    said = self_test(tmp_path, "onnx")
    assert "has computed nothing within" in said
    assert "restart the agent" in said


def test_a_board_that_cannot_train_joins_and_says_why(tmp_path):
    """In its status, where the server and `shoal devices` find it."""
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    path = broken(tmp_path, BROKEN["a library is missing"][0])
    with (
        any_broker(tmp_path) as broker,
        scripted_server(broker.url, BlobStore(tmp_path / "blobs")) as server,
    ):
        device = DeviceProcess(
            tmp_path, broker.url, {"kind": "npz", "path": str(tmp_path / "data.npz")}
        )
        device.start(prefix=("env", f"PYTHONPATH={path}"))
        try:
            server.wait_state("idle")
        finally:
            device.kill()
    profile = server.profiles[0]
    assert "libgomp.so.1" in profile.unable
    assert "this board has joined, but it cannot train" in device.log()
