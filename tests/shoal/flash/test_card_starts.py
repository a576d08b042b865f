"""A card in an emulated board, as a member of a fleet: it joins by itself over TLS, trains beside
another device, loses its supply at random moments, and goes on.
"""

import os
import random
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from broker_server.service.authority import enroll, found_fleet
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig, ModelConfig, TrainConfig
from broker_server.settings.rounds import RoundConfig
from fleet_protocol import control
from models.registry import Registry, infer_layout
from shoal.flash.image import Card, make_card
from shoal.local_fleet import LocalDevice, LocalFleet
from simulation.data.datasets import load_dataset
from tests.brokers import free_port
from tests.shoal.flash.emulated import FIRMWARE, Board
from tests.shoal.flash.mirror import needs_mirror
from tests.shoal.flash.watch import Watch, joined, weights_of
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

START_SECONDS, TASK_SECONDS = 3600.0, 1800.0  # an emulated processor beside other work
CARD_BYTES = 2 << 30
CUTS = int(os.environ.get("CUTS") or 1)
SSH = '[ssh]\nkeys = ["{key}.pub"]\n[settings]\nmax_width = 0.25\nholdout = 0.0\n'


@pytest.fixture
def fleet(flash, tmp_path):
    """A fleet with identities, a model, and other samples than those of `flash`; settings of its
    runs.
    """
    port = free_port()
    lab = tmp_path / "lab"
    # 10.0.2.2 is what an emulated board calls this computer; its broker listens to this computer
    # alone.
    found_fleet(lab, NewFleet("lab", "10.0.2.2", port, url="mosquitto", listen="127.0.0.1"))
    data = load_dataset("digits")
    images = np.pad(
        np.kron(data.train_x, np.ones((3, 3), np.float32)), [(0, 0), (0, 0), (2, 2), (2, 2)]
    )
    for name, part in (("train", slice(80)), ("barn", slice(80, 160))):
        np.savez(tmp_path / f"{name}.npz", x=images[part], y=data.train_y[part])
    conv = Registry.zoo().get("conv")
    settings = conv.settings({"input_shape": (1, 28, 28)})
    layout = infer_layout(conv, settings)
    tiers = [layout.tier(width) for width in (1.0, 0.5, 0.25)]
    export_architecture(
        ExportRequest(conv, settings, tiers, Recipe()),
        tmp_path / "artifacts",
        ExportOptions(formats=("onnx",)),
    )

    def config(store):
        return FleetConfig(
            fleet="lab",
            store=tmp_path / store,
            broker=BrokerConfig(
                url="mosquitto", port=port, listen="127.0.0.1", identity=lab / "server.enrolment"
            ),
            model=ModelConfig(artifacts=tmp_path / "artifacts", arch="conv"),
            # How long to wait is this test's affair, not the server's.
            round=RoundConfig(
                rounds=1 + CUTS // 4,
                min_devices=2,
                quorum=1.0,
                wait_seconds=24 * 3600,
                deadline_seconds=24 * 3600,
            ),
            # Small steps: where a maximum falls to the other side, for the last bit of a sum, it
            # moves less than 1e-4.
            train=TrainConfig(learning_rate=0.005, epochs=5, batch_size=40),
        )

    return config


def barn(tmp_path, port, *more):
    """The other devices, as processes of this computer; the broker's port is in fleet.toml only."""
    one = LocalDevice(
        "barn", tmp_path / "barn.npz", 0.5, enrolment=tmp_path / "lab/devices/barn.enrolment"
    )
    folder = tmp_path / f"beside-{len(more)}"
    broker = f"mqtts://127.0.0.1:{port}"
    return LocalFleet(folder, fleet="lab", broker=broker, devices=[one, *more])


def make(config, card):
    """Build it, say how long that took and what came out, and put it on a larger card."""
    began = time.monotonic()
    for said in make_card(
        Card(config, card.with_suffix(".img.zst")), lambda _disk: False, lambda *_: None
    ):
        print(said)
    print(f"built and packed in {time.monotonic() - began:.0f} s")
    assert card.with_suffix(".img.zst").stat().st_size < 100e6
    shutil.copy(card, card.with_suffix(".made"))
    with card.open("r+b") as file:
        file.truncate(CARD_BYTES)


def cut(board, beside, watch, finished, draw):
    """Let it lose its supply: first while it trains, then at moments drawn over starting and
    training.
    """
    began = time.monotonic()
    board.start()
    watch.wait(joined, START_SECONDS, "the board", beside.check)
    print(
        f"joined after {time.monotonic() - began:.0f} s, {board.cpu_seconds():.0f} s of processors"
    )
    watch.wait(
        lambda e: isinstance(e, control.DeviceProgressed) and e.device == "pi-1",
        TASK_SECONDS,
        "an epoch",
        beside.check,
    )
    span = time.monotonic() - began
    print(f"first epoch after {span:.0f} s, {board.cpu_seconds():.0f} s of processors")
    process = "$(systemctl show -p MainPID --value shoal-device)"
    said = board.does(f"date; sudo id -un; grep -E 'Name|VmRSS|VmHWM' /proc/{process}/status")
    print(said)
    assert "root" in said.split()
    moment = draw.uniform(0, 5)
    done = 0
    while not finished.wait(moment) and done < CUTS:
        board.lose_power()
        done += 1
        seen = [
            watch.count(kind)
            for kind in (control.DeviceAccepted, control.DeviceProgressed, control.UpdateReceived)
        ]
        print(f"cut {done} after {moment:.1f} s; so far accepted, epochs, updates: {seen}")
        board.start()
        began = time.monotonic()
        moment = draw.uniform(0, 1.3 * span) if done < CUTS else START_SECONDS + TASK_SECONDS
    print(f"{done} cuts; finished {time.monotonic() - began:.0f} s after the last")
    assert done >= 1


@pytest.mark.arm
@pytest.mark.timeout((2 + CUTS) * (START_SECONDS + TASK_SECONDS))
@needs_mirror
@pytest.mark.skipif(
    not shutil.which("qemu-system-aarch64") or not FIRMWARE.exists(), reason="qemu is not installed"
)
def test_a_card_joins_its_fleet_and_outlives_power_cuts(flash, fleet, tmp_path):  # noqa: PLR0915
    """Its update, and what its fleet has learnt, are those of an x86-64 device that nothing happens
    to, within 1e-4.
    """
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    print(f"\nSEED={seed}")
    pi = enroll(tmp_path / "lab", "pi-1")
    key = tmp_path / "id"
    enroll(tmp_path / "lab", "barn")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=60
    )
    keys = dict.fromkeys(("fleet", "device", "server"))
    flash_toml = flash(
        SSH.format(key=key), board="generic-arm64", python='"3.13"', enrolment=f'"{pi}"', **keys
    )
    card = tmp_path / "card.img"
    make(flash_toml, card)
    board = Board(card, tmp_path / "serial.log", key)
    finished = threading.Event()
    watch = Watch(tmp_path / "store")
    alone = Watch(tmp_path / "undisturbed")
    servers = []

    def serve(config):
        try:
            with Server(config.fleet, config.store, config.broker, listener=watch) as server:
                servers.append(server)
                return server.run(config)
        finally:
            finished.set()

    with ThreadPoolExecutor(1) as pool:
        disturbed = fleet("store")
        running = pool.submit(serve, disturbed)
        try:
            with barn(tmp_path, disturbed.broker.port) as beside:
                cut(board, beside, watch, finished, random.Random(seed))
                beside.check()
            assert running.result(TASK_SECONDS).status == "finished"
        except BaseException:
            print(board.said())
            for server in servers:
                server.stop()
            raise
        finally:
            board.lose_power()
    native = LocalDevice("pi-1", tmp_path / "train.npz", 0.25, enrolment=pi)
    config = fleet("undisturbed")
    with (
        barn(tmp_path, config.broker.port, native),
        Server(config.fleet, config.store, config.broker, listener=alone) as server,
    ):
        assert server.run(config).status == "finished"
    sent = watch.update()
    same = alone.update()
    assert sent.keys() == same.keys()
    furthest = max(float(np.abs(sent[name] - same[name]).max()) for name in same)
    print(f"the update of the arm64 board is at most {furthest:.1e} from that of an x86-64 device")
    assert furthest < 1e-4
    found = weights_of(tmp_path / "store")
    expected = weights_of(tmp_path / "undisturbed")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4)
    updates = [
        e for e in watch.events if isinstance(e, control.UpdateReceived) and e.device == "pi-1"
    ]
    print(f"agent's memory at most {max(e.metrics.resident_bytes for e in updates) / 1e6:.0f} MB")
    with card.open("rb") as file, card.with_suffix(".made").open("rb") as made:
        table = np.frombuffer(file.read(512)[446:510], np.uint8).reshape(4, 16)
        _, root, data, _ = (int.from_bytes(row[8:12].tobytes(), "little") * 512 for row in table)
        file.seek(root)
        made.seek(root)
        for _ in range((data - root) >> 20):
            assert file.read(1 << 20) == made.read(1 << 20), "the root was written"
    about = subprocess.run(
        ["/sbin/dumpe2fs", "-h", f"{card}?offset={data}"],
        capture_output=True,
        text=True,
        check=True,
    )
    blocks = int(about.stdout.partition("Block count:")[2].split()[0])
    assert blocks * 4096 > 0.99 * (CARD_BYTES - data)
