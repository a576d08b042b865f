"""A board that chooses its sub-model, against a real broker: by what its link and processor are in
this very round.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from device_runtime.agent.choosing import choice_to_measure, weights_to_measure
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Accept, BlobRef, Chooser, Done, TierChoice
from fleet_protocol.sizing import Sizing, SizingConstants
from tests.brokers import TestBroker, any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.tiny_set import TinySet, initial_weights, samples, write_tiny_set

WIDTHS = (1.0, 0.5, 0.25)
DELAY = 3.0  # seconds for each chunk on a slow link, of which the weights have one
PROBED = "fetching sizing fetching training uploading dropping idle"

# The whole model is taken where it and the round's steps need four seconds at the most, the
# narrowest from eight on.
BY_TIME = SizingConstants(theta=0.3, stall=0.0, gamma=1.0, efficiency="reciprocal_of_sum")


@pytest.fixture(scope="module")
def tiers(tmp_path_factory) -> tuple[TinySet, ...]:
    """Sub-models of three widths, which are the same but for their name, in one store."""
    root = tmp_path_factory.mktemp("tiers")
    return tuple(write_tiny_set(root, tier=f"w{width:.2f}-d1") for width in WIDTHS)


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[TestBroker]:
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def server(broker, tiers) -> Iterator[ScriptedServer]:
    with scripted_server(broker.url, tiers[0].blobs) as running:
        yield running


@pytest.fixture
def device(tmp_path, broker, server) -> Iterator[DeviceProcess]:
    x, y = samples(50)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    running = DeviceProcess(
        tmp_path,
        broker.url,
        {"kind": "npz", "path": "data.npz"},
        device="chooser",
        holdout=0.2,
        # Chunks that are asked for again would be late, too, and those behind them.
        repair_seconds=4 * DELAY,
    )
    running.start()
    try:
        server.wait_state("idle", "chooser")
        yield running
    finally:
        running.kill()


def sized(constants: SizingConstants = BY_TIME) -> Chooser:
    sizing = Sizing(constants=constants, full_bytes=2_000)
    return Chooser(rule="whalefl", settings=sizing.model_dump(mode="json", by_alias=True))


def choices(tiers: tuple[TinySet, ...], seed: int) -> tuple[TierChoice, ...]:
    return tuple(item.choice(initial_weights(seed + place)) for place, item in enumerate(tiers))


def slow(_digest: str, _index: int, frame: bytes) -> bytes:
    threading.Event().wait(DELAY)
    return frame


def play(server: ScriptedServer, number: int, offered: tuple[TierChoice, ...], **changes) -> str:
    """One round; the tier whose update came."""
    task = f"t{number}"
    said = {"choices": offered, "task": task, "round": number, "chooser": sized()}
    server.offer("chooser", offered[0], **said | changes)
    server.wait_update(task)
    return server.heard(Done)[-1].tier or offered[0].tier


def test_a_link_that_is_slow_now_narrows_this_round(device, server, tiers):
    """Fast, slow and fast again: the choice follows at once, although the last round says otherwise
    each time.
    """
    taken = [play(server, 1, choices(tiers, 10))]
    server.script.tamper = slow
    taken.append(play(server, 2, choices(tiers, 20)))
    server.script.tamper = lambda _digest, _index, frame: frame
    taken.append(play(server, 3, choices(tiers, 30)))
    assert taken == ["w1.00-d1", "w0.25-d1", "w1.00-d1"]
    device.wait_log("state=idle", times=4)
    assert " ".join(device.states()) == f"starting probing idle {PROBED} {PROBED} {PROBED}"
    said = [
        "w0.25-d1",
        "",
        "w0.25-d1",
        "w0.25-d1",
        "w0.25-d1",
        "",
    ]  # what is measured, and what is taken
    assert [message.tier for message in server.heard(Accept)] == said


def test_what_is_measured_leaves_no_trace_in_the_update(device, server, tiers):
    """The steps that were timed train nothing: the update is that of a board that was offered the
    tier alone.
    """
    offered = choices(tiers, 40)
    assert play(server, 1, offered) == "w1.00-d1"
    assert play(server, 2, offered[:1], chooser=None, round=1) == "w1.00-d1"
    chosen, alone = (tensors_in(server.updates[task]) for task in ("t1", "t2"))
    assert chosen.keys() == alone.keys() != set()
    for name, value in alone.items():
        np.testing.assert_array_equal(chosen[name], value)


def test_samples_that_were_only_timed_are_still_new(device, server, tiers):
    """A board that waits for new samples (`conditions.new_data`) would give the task back that it
    has just sized.
    """
    said = {"choices": choices(tiers, 70), "chooser": sized(), "train": {"epochs": 100_000}}
    server.offer("chooser", said["choices"][0], **said)
    device.wait_log("epoch 1/")
    assert "sizing" in device.states()
    assert not (device.state_dir / "memory.json").exists()


def test_a_board_that_may_train_one_tier_alone_has_nothing_to_measure(device, server, tiers):
    """Nor has one that chooses nothing."""
    assert play(server, 1, choices(tiers, 50)[:1]) == "w1.00-d1"
    assert play(server, 2, choices(tiers, 60), chooser=None) == "w1.00-d1"
    assert "sizing" not in device.states()


def test_the_link_is_timed_by_what_has_enough_bytes_and_is_not_here():
    """The smallest weights with 64 kB behind their first chunk, or else the largest; what the board
    has since it was judged takes no time on the link.
    """

    def offered(*sizes: int) -> list[TierChoice]:
        refs = [
            BlobRef(digest=f"{place:064x}", size=size, chunk_bytes=1024)
            for place, size in enumerate(sizes)
        ]
        return [
            TierChoice(tier=f"w{1 / 2**i:.2f}-d1", artifact_set=ref, weights=ref)
            for i, ref in enumerate(refs)
        ]

    for sizes, here, timed in (
        ((900_000, 225_000, 56_000), (), 225_000),
        ((900, 225, 56), (), 900),
        ((9_000_000, 90_000), (), 90_000),
        ((900_000, 225_000, 56_000), (225_000,), 900_000),
        ((900_000, 225_000, 56_000), (225_000, 900_000), 56_000),
        ((900, 225, 56), (900, 225, 56), None),
    ):
        choices = offered(*sizes)
        on_disk = {choice.weights.digest for choice in choices if choice.weights.size in here}
        weights = weights_to_measure(choices, on_disk.__contains__)
        assert choice_to_measure(choices).weights.size == sizes[-1]
        assert (weights.size if weights else None) == timed
