"""A device that is killed after it has masked its update never masks it again."""

import pytest

from fleet_protocol.messages import Accept, Done, Refuse, Shares, Sum
from fleet_protocol.secure_sum import Member
from tests.device_runtime.test_killed import Scene, broker, hold_idle, make_scene, tiny
from tests.device_runtime.tiny_set import initial_weights

__all__ = ["broker", "tiny"]

SUMMING = {"clip": 1.0, "least": 2}


def deal(scene: Scene, accepts: int, shares: int) -> None:
    """Lead the device and a peer through the steps before the device masks its update.

    Args:
        scene: with the device.
        accepts: how many times the device has accepted before.
        shares: how many of these steps it has answered before.
    """
    server = scene.server
    device = scene.device.id
    weights = scene.tiny.choice(initial_weights()).weights.digest
    peer = Member("peer", weights, SUMMING["least"])
    accept = server.wait_message(Accept, count=accepts + 1)
    keys = {device: accept.keys, "peer": peer.keys}
    server.send(device, Sum, accept, keys=keys)
    dealt = peer.answer(Sum(run=accept.run, round=1, task=accept.task, keys=keys))
    answer = server.wait_message(Shares, count=shares + 1)
    sealed = {device: answer.sealed[device], "peer": dealt["sealed"][device]}
    server.send(device, Sum, accept, dealt=sealed, challenge="1" * 66)
    server.wait_message(Shares, count=shares + 2)
    server.send(device, Sum, accept, members=(device, "peer"))


@pytest.mark.attack(
    "broker",
    "Makes a restarted device mask the same update again",
    "the device drops out of the sum",
    "2026-11-28",
)
def test_a_device_that_was_killed_after_masking_leaves_the_sum(tmp_path, broker, tiny):
    """It says so at once. It dealt shares again before, and masked what was masked."""
    with make_scene(tmp_path, broker, tiny) as scene:
        scene.device.start()
        hold_idle(scene)
        server = scene.server
        server.script.acknowledge = False
        scene.offer(upload={"summing": SUMMING})
        deal(scene, 0, 0)
        server.wait_message(Done)
        scene.device.kill()
        accepts = len(server.heard(Accept))
        announced = len(server.heard(Done))
        scene.device.start()
        server.wait(lambda: bool(server.heard(Refuse)) or len(server.heard(Accept)) > accepts)
        if not server.heard(Refuse):
            # What a server does that was restarted, too, and begins its sum anew.
            deal(scene, accepts, 2)
            server.wait(lambda: len(server.heard(Done)) > announced)
        assert len({done.update.digest for done in server.heard(Done)}) == 1
        (refusal,) = server.heard(Refuse)
        assert "the keys of the masks are lost" in refusal.detail
        scene.device.wait_log("state=idle")
        assert " ".join(scene.device.states()) == "starting probing uploading refusing idle"
