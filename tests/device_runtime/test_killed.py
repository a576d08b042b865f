"""A power cut in every state: which states the device goes through before it and after it, and what
the server hears.

Each row holds a real device in one state, kills it there with SIGKILL, starts it again and states
the two chains. Missing on purpose: ``refusing`` and ``dropping`` last a millisecond and cannot be
held; a cut there leaves the record of the state before, whose row applies (``test_task_store``
checks the map itself). ``stopped`` has nothing to lose.
"""

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_protocol.digests import blob_path
from fleet_protocol.messages import Accept, DeviceStatus, Done, NeedChunks, Refuse
from tests.brokers import TestBroker, any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.tiny_set import TinySet, initial_weights, samples, write_tiny_set

TO_IDLE = "starting probing idle"
TRAIN = "fetching training uploading dropping idle"
LONG = {
    "epochs": 6_000
}  # some seconds: long enough to be heard of and killed in, short enough to be done again
ENDLESS = {"epochs": 10**6}
MANY = 400_000  # samples of a step that lasts long enough to be killed in


@dataclass
class Scene:
    """What a row plays with."""

    server: ScriptedServer
    device: DeviceProcess
    tiny: TinySet

    def offer(self, **changes: Any) -> None:
        self.server.offer(self.device.id, self.tiny.choice(initial_weights()), **changes)

    def heard_after(self, kind: type, count: int) -> list[Any]:
        """Messages of a kind but the first ``count``."""
        return self.server.heard(kind)[count:]


@dataclass(frozen=True)
class Row:
    """One power cut.

    Attributes:
        hold: brings the device into the state and returns when it is there.
        after: lets the rest happen, once the device is started again, and checks what the server
            heard.
        before_cut: states of the first life.
        after_cut: states of the second life, from its start to its rest.
    """

    hold: Callable[[Scene], None]
    after: Callable[[Scene], None]
    before_cut: str
    after_cut: str


def hold_idle(scene: Scene) -> None:
    scene.server.wait_state("idle", scene.device.id)


def then_a_task_works(scene: Scene) -> None:
    scene.server.wait_state("idle", scene.device.id, after=len(scene.server.statuses))
    scene.offer()
    scene.server.wait_update("t1")


def hold_fetching(scene: Scene) -> None:
    hold_idle(scene)
    scene.server.script.tamper = lambda _digest, index, frame: None if index else frame
    scene.offer()
    scene.device.wait_log("blobs again")


def then_only_the_rest_is_asked_for(scene: Scene) -> None:
    first_life = scene.server.heard(NeedChunks)
    scene.server.script.tamper = lambda _digest, _index, frame: frame
    scene.server.wait_update("t1")
    manifest = scene.tiny.choice(initial_weights()).artifact_set
    second_life = [
        m for m in scene.server.heard(NeedChunks)[len(first_life) :] if m.digest == manifest.digest
    ]
    assert second_life[0].ranges == ((1, manifest.chunks),)


def hold_training(scene: Scene) -> None:
    hold_idle(scene)
    scene.offer(train=LONG)
    scene.device.wait_log("epoch 1/")


def then_it_trains_again(scene: Scene) -> None:
    requests = len(scene.server.heard(NeedChunks))
    scene.server.wait_update("t1")
    assert len(scene.server.heard(NeedChunks)) == requests
    assert len({m.update.digest for m in scene.server.heard(Done)}) == 1


def hold_sizing(scene: Scene) -> None:
    hold_idle(scene)
    other = write_tiny_set(scene.tiny.blobs.root, tier="w0.50-d1").choice(initial_weights(1))
    choices = (scene.tiny.choice(initial_weights()), other)
    sizing = {"constants": {"theta": 1e-9}, "full_bytes": 1}
    chooser = {"rule": "whalefl", "settings": sizing}
    scene.offer(choices=choices, chooser=chooser, train={"batch_size": MANY, "epochs": 1})
    scene.device.wait_log("state=sizing")


def then_it_measures_and_chooses_again(scene: Scene) -> None:
    scene.server.wait_update("t1")
    # the second life fetches nothing, so it knows nothing of its link, and takes the narrowest
    assert [message.tier for message in scene.server.heard(Accept)] == ["w0.50-d1"] * 3


def hold_measuring(scene: Scene) -> None:
    hold_idle(scene)
    scene.offer(routine="statistics", train={"batch_size": 2})
    scene.device.wait_log("state=measuring")


def then_it_measures_again(scene: Scene) -> None:
    scene.server.wait_update("t1")
    assert scene.server.heard(Done)[0].metrics.batches == 20_000


def hold_uploading(scene: Scene) -> None:
    hold_idle(scene)
    scene.server.script.acknowledge = False
    scene.offer()
    scene.server.wait_message(Done)


def then_it_is_announced_and_not_trained_again(scene: Scene) -> None:
    scene.server.script.acknowledge = True
    scene.server.wait_update("t1")
    digests = {m.update.digest for m in scene.server.heard(Done)}
    assert len(digests) == 1
    assert "training" not in scene.device.states()


def then_the_lost_chunks_are_sent(scene: Scene) -> None:
    scene.server.chunks.clear()
    then_it_is_announced_and_not_trained_again(scene)
    scene.device.wait_log("the server lacks chunks")


def hold_training_past_the_deadline(scene: Scene) -> None:
    hold_idle(scene)
    scene.offer(train=ENDLESS, seconds_left=1.0)
    scene.device.wait_log("epoch 1/")


def then_nobody_is_told(scene: Scene) -> None:
    scene.server.wait_state("idle", scene.device.id, after=len(scene.server.statuses))
    assert not scene.server.heard(Refuse)
    assert not (scene.device.state_dir / "task.json").exists()


def hold_uploading_and_damage_the_update(scene: Scene) -> None:
    hold_uploading(scene)
    digest = scene.server.heard(Done)[0].update.digest
    path = scene.device.state_dir / "objects" / blob_path(digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def then_it_is_computed_again(scene: Scene) -> None:
    scene.server.script.acknowledge = True
    scene.server.wait_update("t1")


ROWS = {
    "idle": Row(hold_idle, then_a_task_works, TO_IDLE, f"{TO_IDLE} {TRAIN}"),
    "fetching": Row(
        hold_fetching,
        then_only_the_rest_is_asked_for,
        f"{TO_IDLE} fetching",
        f"starting probing {TRAIN}",
    ),
    "sizing": Row(
        hold_sizing,
        then_it_measures_and_chooses_again,
        f"{TO_IDLE} fetching sizing",
        f"starting probing fetching sizing {TRAIN}",
    ),
    "training": Row(
        hold_training,
        then_it_trains_again,
        f"{TO_IDLE} fetching training",
        f"starting probing {TRAIN}",
    ),
    "measuring": Row(
        hold_measuring,
        then_it_measures_again,
        f"{TO_IDLE} fetching measuring",
        "starting probing fetching measuring uploading dropping idle",
    ),
    "uploading": Row(
        hold_uploading,
        then_it_is_announced_and_not_trained_again,
        f"{TO_IDLE} fetching training uploading",
        "starting probing uploading dropping idle",
    ),
    "uploading, server lost the chunks": Row(
        hold_uploading,
        then_the_lost_chunks_are_sent,
        f"{TO_IDLE} fetching training uploading",
        "starting probing uploading dropping idle",
    ),
    "uploading, update damaged on disk": Row(
        hold_uploading_and_damage_the_update,
        then_it_is_computed_again,
        f"{TO_IDLE} fetching training uploading",
        f"starting probing {TRAIN}",
    ),
    "training, back after the deadline": Row(
        hold_training_past_the_deadline,
        then_nobody_is_told,
        f"{TO_IDLE} fetching training",
        "starting probing dropping idle",
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySet:
    return write_tiny_set(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[TestBroker]:
    with any_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@contextlib.contextmanager
def make_scene(
    tmp_path: Path, broker: TestBroker, tiny: TinySet, *, count: int = 50
) -> Iterator[Scene]:
    x, y = samples(count)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    name = f"d-{abs(hash(str(tmp_path))):x}"
    device = DeviceProcess(
        tmp_path, broker.url, {"kind": "npz", "path": "data.npz"}, device=name, holdout=0
    )
    with scripted_server(broker.url, tiny.blobs) as server:
        try:
            yield Scene(server, device, tiny)
        finally:
            device.kill()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "uploading" else pytest.mark.slow) for name in ROWS],
)
def test_killed_in(name, tmp_path, broker, tiny):
    """The device goes through the row's states, is cut off, and ends in the row's states."""
    row = ROWS[name]
    with make_scene(
        tmp_path, broker, tiny, count={"measuring": 40_000, "sizing": MANY}.get(name, 50)
    ) as scene:
        scene.device.start()
        row.hold(scene)
        scene.device.kill()
        if name == "training, back after the deadline":
            with contextlib.suppress(TimeoutError):
                scene.server.wait(lambda: False, 1.0)
        scene.device.start()
        row.after(scene)
        scene.device.wait_log("state=idle", times=row.after_cut.split().count("idle"))
        assert " ".join(scene.device.states(1)) == row.before_cut
        assert " ".join(scene.device.states(2)) == row.after_cut


def test_killed_in_starting(tmp_path, broker, tiny):
    """A cut while the data is being read leaves nothing behind."""
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    loader = tmp_path / "loader.py"
    loader.write_text(
        f"import numpy as np\n"
        f"def load():\n"
        f"    open({str(fifo)!r}).read()\n"
        f"    return np.load('x.npy'), np.load('y.npy')\n"
    )
    x, y = samples(20)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    with make_scene(tmp_path, broker, tiny) as scene:
        device = DeviceProcess(
            tmp_path,
            broker.url,
            {"kind": "python", "entry_point": "loader.py:load"},
            device=scene.device.id,
        )
        scene.device = device
        try:
            device.start()
            device.wait_log("state=starting")
            device.kill()
            assert device.states() == ["starting"]
            device.start()
            fifo.write_text("go")
            hold_idle(scene)
            assert " ".join(device.states()) == TO_IDLE
        finally:
            device.kill()


def test_killed_in_probing(tmp_path, broker, tiny):
    """A cut while the broker keeps the device waiting leaves nothing behind."""
    with (
        make_scene(tmp_path, broker, tiny) as scene,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        text = scene.device.config.read_text()
        scene.device.config.write_text(
            text.replace(broker.url, f"mqtt://127.0.0.1:{silent.getsockname()[1]}")
        )
        scene.device.start()
        scene.device.wait_log("state=probing")
        scene.device.kill()
        assert scene.device.states() == ["starting", "probing"]
        scene.device.config.write_text(text)
        scene.device.start()
        hold_idle(scene)
        assert " ".join(scene.device.states()) == TO_IDLE


@pytest.mark.slow
def test_a_task_that_kills_the_agent_three_times_is_refused(tmp_path, broker, tiny):
    """Three crashes in one task end it with a refusal; a polite stop in it does not count."""
    with make_scene(tmp_path, broker, tiny) as scene:
        scene.device.start()
        hold_idle(scene)
        scene.offer(train=ENDLESS)
        for life, crash in enumerate([True, False, True, True], start=1):
            scene.device.wait_log("epoch 1/")
            if crash:
                scene.device.kill()
            else:
                assert scene.device.terminate() == 0
            assert scene.device.starts == life
            scene.device.start()
        refusal = scene.server.wait_message(Refuse)
        assert "crashed the agent 3 times" in refusal.detail
        scene.device.wait_log("state=idle")
        assert " ".join(scene.device.states()) == "starting probing refusing idle"
        scene.offer(task="t2")
        assert "exceeded this board's memory" in scene.server.wait_message(Refuse, "t2").detail
        smaller = scene.tiny.manifest.model_copy(update={"peak_memory_bytes": 0})
        scene.tiny.blobs.put(smaller.to_bytes())
        choice = replace(scene.tiny, manifest=smaller).choice(initial_weights())
        scene.server.offer(scene.device.id, choice, task="t3")
        scene.server.wait_update("t3")


@pytest.mark.slow
def test_power_cuts_are_not_held_against_a_task(tmp_path, broker, tiny):
    """A board that started anew between four kills goes on with its task, and blames neither that
    nor its memory.
    """
    with make_scene(tmp_path, broker, tiny) as scene:
        scene.device.start()
        hold_idle(scene)
        choice = scene.tiny.choice(initial_weights())
        task = scene.device.state_dir / "task.json"
        offer = scene.server.offer(scene.device.id, choice, train=ENDLESS, seconds_left=3600.0)
        for cut in range(4):
            scene.device.wait_log("epoch 1/")
            scene.device.kill()
            task.write_text(
                json.dumps({**json.loads(task.read_text()), "boot": f"start {cut} of this board"})
            )
            (task.parent / ".task.json.abcdefgh").write_text("half")
            scene.device.start()
            scene.device.wait_log(f"crashes=0, outages={cut + 1}")
        scene.device.wait_log("epoch 1/")
        assert not list(task.parent.glob(".task.json.*"))
        scene.server.cancel(scene.device.id, offer)
        scene.device.wait_log("state=idle")
        scene.offer(task="t2")
        scene.server.wait_update("t2")


@pytest.mark.slow
def test_the_status_names_the_states_that_last(tmp_path, broker, tiny):
    """An operator who watches the retained status sees the working states that take longer than a
    second go by.
    """
    with make_scene(tmp_path, broker, tiny) as scene:
        scene.device.start()
        hold_idle(scene)
        offer = scene.server.offer(
            scene.device.id, scene.tiny.choice(initial_weights()), train=ENDLESS
        )
        scene.server.wait_state("training", scene.device.id)
        scene.server.cancel(scene.device.id, offer)
        scene.server.wait_state("idle", scene.device.id, after=len(scene.server.statuses))
        mine: list[DeviceStatus] = [s for s in scene.server.statuses if s.device == scene.device.id]
        told = " ".join(s.state for s in mine)
        assert re.fullmatch("idle( fetching)? training( dropping)? idle", told), told
        scene.offer(task="t2")
        scene.server.wait_update("t2")
        scene.server.wait(lambda: scene.server.profiles[-1].step_seconds is not None)
