"""A card in an emulated board: it joins by itself, trains, loses its supply in the middle, and goes on."""

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from fleet_protocol.messages import Progress
from fleet_protocol.weights import decode_weights
from shoal.flash.image import Card, make_card
from tests.brokers import mosquitto_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import initial_weights, write_tiny_set
from tests.shoal.flash.mirror import needs_mirror

FIRMWARE = Path("/usr/share/qemu-efi-aarch64/QEMU_EFI.fd")
START_SECONDS, TASK_SECONDS = 1500.0, 600.0  # an emulated processor beside other work
CARD_BYTES = 2 << 30


class Board:
    """A board with a card in it; its network is this computer's, which it knows as 10.0.2.2."""

    def __init__(self, card, log):
        self.log = log
        command = ["nice", "qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "1024"]
        command += ["-accel", "tcg,thread=multi", "-bios", str(FIRMWARE)]
        command += ["-drive", f"if=none,id=card,file={card},format=raw,cache=writethrough"]
        command += ["-device", "virtio-blk-pci,drive=card", "-device", "virtio-rng-pci"]
        command += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
        self._command = [*command, "-display", "none", "-monitor", "none", "-serial", f"file:{log}"]
        self._process = None

    def start(self):
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)

    def lose_power(self):
        """At once, whatever it does."""
        if self._process:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def said(self):
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


@pytest.mark.arm
@pytest.mark.timeout(2 * START_SECONDS + 2 * TASK_SECONDS + 1200)
@needs_mirror
@pytest.mark.skipif(not shutil.which("qemu-system-aarch64") or not FIRMWARE.exists(), reason="qemu is not installed")
def test_a_card_joins_trains_and_outlives_a_power_cut(flash, tmp_path):
    """Its update after the cut is that of a device which nothing happened to, and its root has grown to the card."""
    task = {"epochs": 3000, "seed": 3}
    card = tmp_path / "card.img"
    tiny, weights = write_tiny_set(tmp_path / "tiny"), initial_weights()
    with mosquitto_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        keys = {"python": '"3.13"', "insecure": "true", "server": f'"mqtt://10.0.2.2:{broker.port}"'}
        began = time.monotonic()
        list(make_card(Card(flash(board="generic-arm64", **keys), card), lambda _disk: False, lambda *_: None))
        print(f"built in {time.monotonic() - began:.0f} s")
        with card.open("r+b") as file:
            file.truncate(CARD_BYTES)
        board = Board(card, tmp_path / "serial.log")

        def joined(after=0):
            return any(status.device == "pi-1" and status.online for status in server.statuses[after:])

        try:
            board.start()
            began = time.monotonic()
            server.wait(joined, START_SECONDS, f"the board; it said {board.said()}")
            server.wait(lambda: server.statuses[-1].state == "idle", START_SECONDS, "idle")
            print(f"joined after {time.monotonic() - began:.0f} s")
            server.offer("pi-1", tiny.choice(weights), task="t1", train=task, seconds_left=3 * START_SECONDS)
            server.wait(lambda: any(m.epoch > 0 for m in server.heard(Progress, "t1")), TASK_SECONDS, "an epoch")
            board.lose_power()
            before = len(server.statuses)
            assert "t1" not in server.updates
            board.start()
            began = time.monotonic()
            server.wait(lambda: joined(before), START_SECONDS, "the board, after its supply came back")
            print(f"back after {time.monotonic() - began:.0f} s")
            server.wait(lambda: "t1" in server.updates, TASK_SECONDS, "the update")
        except TimeoutError:
            print(board.said())
            raise
        finally:
            board.lose_power()
        here = DeviceProcess(tmp_path, broker.url, {"kind": "npz", "path": "train.npz"}, device="here")
        here.start()
        try:
            server.wait_state("idle", "here")
            server.offer("here", tiny.choice(weights), task="t2", train=task)
            expected = decode_weights(server.wait_update("t2"))
        finally:
            here.kill()
        found = decode_weights(server.updates["t1"])
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4)
    start = (4 + 192) << 20
    about = subprocess.run(
        ["/sbin/dumpe2fs", "-h", f"{card}?offset={start}"], capture_output=True, text=True, check=True
    )
    blocks = int(about.stdout.partition("Block count:")[2].split()[0])
    assert blocks * 4096 > 0.99 * (CARD_BYTES - start)
