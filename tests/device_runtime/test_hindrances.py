"""What keeps a board from training is said where somebody may look: on its console, by `doctor`, in
`shoal devices`.

A board that is not reached by the network can say nothing in the third. What is found before a
board starts, by `shoal flash` or `install.sh`, stands in tests/shoal/flash; a card that fills up
while it works, in `test_command.py`.
"""

import contextlib
import datetime as dt
import errno
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from broker_server.store import Store
from device_runtime import doctor
from device_runtime.doctor import examine
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.messages import DeviceProfile
from tests.brokers import any_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import FLEET, scripted_server
from tests.device_runtime.tiny_set import samples

NPZ = {"kind": "npz", "path": "data.npz"}
YEARS = 10 * 365 * 86_400
# Programs that Python runs before the agent, in place of another system.
SYSTEMS = {
    "32 bits": "import sys, device_runtime.board\nclass Sys:\n    maxsize = 2**31 - "
    "1\ndevice_runtime.board.sys = Sys",
    "no runtime": "import device_runtime.board\ndevice_runtime.board.BACKEND_PACKAGES = ()",
    "behind": f"import time\nnow = time.time\ntime.time = lambda: now() - {YEARS}",
    "none": "",
}


@pytest.fixture
def board(tmp_path):
    """A device's process on a system that lacks something, with samples unless they are to be
    missing.
    """
    x, y = samples(50)

    def make(url, system, data="data.npz"):
        np.savez(tmp_path / "data.npz", x=x, y=y)
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "sitecustomize.py").write_text(SYSTEMS[system])
        device = DeviceProcess(tmp_path, url, NPZ | {"path": data})
        device.start(prefix=("env", f"PYTHONPATH={tmp_path / 'lib'}{os.pathsep}{REPOSITORY}"))
        return device

    return make


@pytest.mark.parametrize(
    ("system", "data", "code", "words"),
    [
        ("none", "none.npz", 4, "none.npz does not exist"),
        ("32 bits", "data.npz", 2, "install a 64-bit system (Raspberry Pi OS 64-bit)"),
        ("no runtime", "data.npz", 2, "pip install 'shoal[device]'"),
    ],
)
def test_a_board_that_ends_leaves_word(board, typed, tmp_path, system, data, code, words):
    """On its console, with the exit code of its kind; and the fleet knows why it never came."""
    with (
        any_broker(tmp_path) as broker,
        scripted_server(broker.url, BlobStore(tmp_path / "blobs")) as server,
    ):
        device = board(broker.url, system, data)
        assert device.wait_exit() == code
        server.wait(lambda: bool(server.profiles), what="profile")
    assert words in device.log().strip().splitlines()[-1]
    assert (words in server.profiles[-1].unable, server.profiles[-1].examples) == (True, 0)
    with contextlib.closing(Store(tmp_path / "store")) as store:
        store.record_device(DeviceProfile(profile=server.profiles[-1], fleet=FLEET, device="pi-1"))
    said = typed("devices", "--store", "store", "--json").stdout
    assert "offline; its last report: " in said
    assert words in said


def test_a_clock_that_is_far_off_is_told_and_does_no_harm(board, tmp_path):
    """The agent joins all the same: a fleet's own certificates count from 1970."""
    with (
        any_broker(tmp_path) as broker,
        scripted_server(broker.url, BlobStore(tmp_path / "blobs")) as server,
    ):
        device = board(broker.url, "behind")
        try:
            server.wait_state("idle")
        finally:
            device.kill()
    assert "synchronise the clock (timedatectl set-ntp true), or set it" in device.log()


@pytest.fixture
def tomorrow(tmp_path):
    """The port of a TLS server whose certificate begins tomorrow; the certificate lies in
    ca.pem.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    begin = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(
        name, name, key.public_key(), 1, begin, begin + dt.timedelta(days=1)
    )
    made = made.add_extension(
        x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
    )
    (tmp_path / "ca.pem").write_bytes(
        made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    link = listening.accept()[0]
                    with (
                        contextlib.suppress(OSError),
                        link,
                        context.wrap_socket(link, server_side=True),
                    ):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_certificate_that_is_not_valid_yet(tomorrow, tmp_path):
    """By the board's clock: it, and not the certificate, is mostly wrong. `doctor` and the agent
    say so.
    """
    np.savez(tmp_path / "data.npz", **dict(zip("xy", samples(50), strict=True)))
    device = DeviceProcess(
        tmp_path, f"mqtts://localhost:{tomorrow}", NPZ, connect_timeout_seconds=2
    )
    device.config.write_text(device.config.read_text() + '[tls]\nca_file = "ca.pem"\n')
    doctor = [sys.executable, "-m", "device_runtime", "doctor", "--config", str(device.config)]
    found = subprocess.run(
        doctor, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    device.start()
    assert (found.returncode, device.wait_exit()) == (5, 5)
    for said in (found.stdout.strip().splitlines()[-1], device.log().strip().splitlines()[-1]):
        assert "its certificate is not valid yet according to this computer's clock" in said
        assert "which shows 20" in said
        assert "timedatectl set-ntp true" in said


def test_a_radio_without_a_country(tmp_path, monkeypatch):
    """Raspberry Pi OS switches it off until somebody says where it is; another radio may be off."""
    monkeypatch.setattr(doctor, "_RADIOS", tmp_path)
    for name, kind, soft in (("rfkill0", "bluetooth", "1"), ("rfkill1", "wlan", "0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (tmp_path / name / "soft").write_text(f"{soft}\n")

    def radio():
        return {finding.check: finding for finding in examine(tmp_path / "none.toml")}["radio"]

    assert radio().level == "ok"
    (tmp_path / "rfkill1" / "soft").write_text("1\n")
    assert radio().level == "warning"
    assert "set `country` in [network] of flash.toml" in radio().detail


def test_a_full_card_in_doctor(tmp_path, monkeypatch):
    """Nobody is sent to look at permissions."""
    np.savez(tmp_path / "data.npz", **dict(zip("xy", samples(50), strict=True)))
    device = DeviceProcess(tmp_path, "mqtt://127.0.0.1:1", NPZ)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    found = {finding.check: finding for finding in examine(device.config)}["state folder"]
    assert (found.level, found.exit_code) == ("failed", 7)
    assert "No space left on device; free some space, or use a larger card" in found.detail


def test_an_old_python_is_named():
    """Before anything is imported that it cannot read."""
    old = (
        "import sys, runpy; sys.version_info = (3, 9, 18); runpy.run_module('device_runtime', "
        "run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", old],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "and Shoal needs 3.10 or newer: install one" in done.stderr
    assert "Traceback" not in done.stderr
