"""`shoal device doctor`: every thing that keeps a board from training is named, with what to do and
its exit code.
"""

import json
import queue
import subprocess
import sys
import time

import numpy as np
import pytest

from device_runtime import doctor
from device_runtime.doctor import examine
from fleet_protocol.data.terms import CONTRACT_FILE, DataContract
from fleet_protocol.messages import ServerStatus
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, open_transport
from tests.brokers import free_port, mosquitto_broker
from tests.device_runtime.device_process import REPOSITORY
from tests.device_runtime.tiny_set import samples
from tests.refusing_brokers import dynamic_security

CHECKS = [
    "system",
    "packages",
    "clock",
    "board",
    "radio",
    "configuration",
    "state folder",
    "runtime",
    "providers",
    "data",
    "network",
    "broker",
    "access rules",
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """With a server of the fleet lab, which has announced itself."""
    with mosquitto_broker(tmp_path_factory.mktemp("broker")) as running:
        link = open_transport(BrokerAddress.parse(running.url), "server", queue.SimpleQueue())
        link.connect(10)
        status = ServerStatus(fleet="lab", online=True)
        link.publish(Topics("lab").server_status, status.to_bytes(), retain=True)
        link.drain(time.monotonic() + 10)
        link.close()
        yield running


@pytest.fixture
def board(tmp_path, broker):
    """A configuration by its changed lines; all is well without."""
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)

    def write(**changes):
        lines = {
            "fleet": "lab",
            "device": "pi-1",
            "broker": broker.url,
            "state_dir": "state",
        } | changes
        text = "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in lines.items() if key != "data"
        )
        path = changes.get("data", "data.npz")
        (tmp_path / "device.toml").write_text(f'{text}[data]\nkind = "npz"\npath = "{path}"\n')
        return tmp_path / "device.toml"

    return write


def ill(config):
    """Findings that are not well, by check."""
    return {finding.check: finding for finding in examine(config) if finding.level != "ok"}


def test_a_healthy_board(board):
    """Every check passes, and says what it has seen."""
    findings = list(examine(board()))
    assert [finding.check for finding in findings] == CHECKS
    assert [finding for finding in findings if finding.level != "ok"] == []
    said = {finding.check: finding.detail for finding in findings}
    assert said["data"].startswith("50 samples of shape")
    assert "device pi-1 of fleet lab" in said["configuration"]
    assert "the server of fleet lab has announced itself" in said["broker"]


@pytest.mark.parametrize(
    ("changes", "check", "code", "words"),
    [
        ({"max_widht": 0.5}, "configuration", 2, "did you mean 'max_width'?"),
        ({"backend": "ort-training"}, "runtime", 2, "pip install 'shoal[device-training]'"),
        ({"data": "none.npz"}, "data", 4, "none.npz does not exist"),
        (
            {"broker": "mqtt://no.such.host.invalid", "insecure": True},
            "network",
            5,
            "the host name 'no.such.host.invalid' is unknown",
        ),
        ({"broker": "mqtt://192.0.2.1"}, "configuration", 2, "insecure = true"),
        ({"broker": f"mqtt://127.0.0.1:{free_port()}"}, "network", 5, 'listen = "0.0.0.0"'),
        ({"state_dir": "/proc/shoal"}, "state folder", 7, "/proc/shoal cannot be written"),
    ],
)
def test_what_keeps_a_board_from_training(board, changes, check, code, words):
    """One failure, with the exit code of its kind."""
    if changes.get("backend") == "ort-training" and "ort-training" in doctor.installed_backends():
        pytest.skip("onnxruntime-training is installed")
    found = ill(board(**changes))
    first = next(iter(found.values()))
    assert (first.check, first.level, first.exit_code) == (check, "failed", code)
    assert words in found[check].detail


@pytest.mark.slow
def test_a_provider_that_does_not_work_is_a_warning(board, tmp_path):
    """The CPU does its work; what trials have found stands beside it."""
    config = board()
    said = {finding.check: finding for finding in examine(config)}["providers"]
    assert (said.level, said.detail) == ("ok", "the CPU; [runtime] providers names nothing else")
    config.write_text(
        config.read_text() + '[runtime]\nproviders = ["CPU", "NowhereExecutionProvider"]\n'
    )
    trial = '{"b3-abcdefgh onnxruntime 1.0 CPU": {"speed": 1.5}}'
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "providers.json").write_text(trial)
    found = ill(config)
    assert list(found) == ["providers"]
    assert found["providers"].detail.startswith("Nowhere does not work on this board: ")
    assert "(the CPU is used instead); graph " in found["providers"].detail
    assert found["providers"].detail.endswith(": CPU makes 1.50 steps in the time of one CPU step")
    config.write_text(config.read_text().replace(', "NowhereExecutionProvider"', ""))
    assert ill(config) == {}


@pytest.mark.parametrize(
    ("rights", "missing"),
    [
        (
            [
                "publish shoal/#",
                "subscribe shoal/v1/lab/devices/#",
                "subscribe shoal/v1/lab/server/#",
            ],
            {"subscribe to shoal/v1/lab/blobs/#": "topic read shoal/v1/lab/blobs/#"},
        ),
        (
            ["publish shoal/v1/lab/devices/#", "subscribe shoal/#"],
            {"publish on shoal/v1/lab/uploads/#": "topic write shoal/v1/lab/uploads/#"},
        ),
        (
            ["publish shoal/v1/lab/uploads/#", "subscribe shoal/v1/lab/blobs/#"],
            {
                "subscribe to shoal/v1/lab/server/status": "topic read shoal/v1/lab/server/status",
                "subscribe to shoal/v1/lab/devices/pi-1/task": "devices/pi-1/task`",
                "publish on shoal/v1/lab/devices/pi-1/status": "devices/pi-1/status`",
                "publish on shoal/v1/lab/devices/pi-1/profile": "devices/pi-1/profile`",
                "publish on shoal/v1/lab/devices/pi-1/reply": "devices/pi-1/reply`",
            },
        ),
    ],
    ids=["blobs", "uploads", "most"],
)
@pytest.mark.slow
def test_access_rules_that_do_not_fit_are_named_with_the_topic(board, tmp_path, rights, missing):
    """It said "no server has announced itself", or that all is well."""
    with dynamic_security(tmp_path, rights) as guarded:
        found = ill(board(broker=guarded.login("board")))
    detail = found["access rules"].detail
    assert found["access rules"].level == "failed"
    assert "Not authorized" in detail
    for right, rule in missing.items():
        assert right in detail
        assert rule in detail
    assert detail.count("`topic ") == len(missing)


def test_rules_of_a_file_that_forbid_a_message_are_named(board, tmp_path):
    """Mosquitto refuses the message; a subscription it would accept, and deliver nothing."""
    rules = tmp_path / "acl"
    rules.write_text("topic read shoal/#\ntopic write shoal/v1/lab/devices/#\n")
    with mosquitto_broker(tmp_path, more=f"acl_file {rules}") as guarded:
        found = ill(board(broker=guarded.url))
    assert "publish on shoal/v1/lab/uploads/#" in found["access rules"].detail
    assert found["access rules"].exit_code == 5


def test_another_fleet_is_a_warning(board):
    """A wrong name is silent on both sides otherwise; the server may also just not be there yet."""
    found = ill(board(fleet="labb"))
    assert list(found) == ["broker"]
    assert found["broker"].level == "warning"
    assert "is `fleet` spelled as in fleet.toml" in found["broker"].detail


def test_what_the_system_lacks(board, monkeypatch):
    """A 32-bit Python, a clock before the installation, little memory, packages."""
    config = board()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "maxsize", 2**31 - 1)
        assert "install a 64-bit system" in ill(config)["system"].detail
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        assert "certificates will not seem to be valid yet" in ill(config)["clock"].detail
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_LITTLE_MEMORY", 2**60)
        assert "too little for the agent" in ill(config)["board"].detail
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "find_spec", lambda _name: None)
        assert (
            "not installed: paho-mqtt; pip install 'shoal[device]'"
            in ill(config)["packages"].detail
        )


def test_the_command(board):
    """A line for each check, JSON on demand, and the exit code of the first failure."""

    def run(*arguments, package="shoal"):
        command = [
            sys.executable,
            "-m",
            package,
            "device",
            "doctor",
            "--config",
            str(board(data="none.npz")),
            *arguments,
        ]
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
        )

    printed = run()
    parsed = run("--json")
    assert (printed.returncode, parsed.returncode) == (4, 4)
    assert [line.split()[0] for line in printed.stdout.splitlines()].count("ok") == len(CHECKS) - 1
    assert [entry["check"] for entry in json.loads(parsed.stdout)] == CHECKS
    lean = run("--json", package="device_runtime")  # as a board has it, which lacks typer and rich
    assert (lean.returncode, [entry["check"] for entry in json.loads(lean.stdout)]) == (4, CHECKS)


def test_labels_that_are_taken_by_position_are_said(board, tmp_path):
    """Arrays have no names: that their labels fit is the user's word, and a table's numbers are
    refused.
    """
    (tmp_path / "state").mkdir()
    contract = DataContract(labels=tuple(f"kind {place}" for place in range(10)))
    (tmp_path / "state" / CONTRACT_FILE).write_bytes(contract.to_bytes())
    config = board()
    said = {finding.check: finding for finding in examine(config)}["data"]
    assert said.level == "ok"
    words = (
        "they fit the fleet's contract, where labels are assigned by position (0 is 'kind 0', 9 "
        "is 'kind 9')"
    )
    assert said.detail.endswith(words)
    (tmp_path / "data.csv").write_text("a,label\n1,0\n2,1\n")
    config.write_text(config.read_text().replace('"npz"', '"csv"').replace("data.npz", "data.csv"))
    refused = ill(config)["data"]
    assert (refused.level, refused.exit_code) == ("failed", 4)
    assert "has numbers as labels" in refused.detail
    config.write_text(config.read_text() + 'labels = ["kind 3", "kind 1"]\n')
    assert (
        "by position" not in {finding.check: finding for finding in examine(config)}["data"].detail
    )
