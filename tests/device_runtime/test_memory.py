"""A board that was killed while it computed takes smaller sub-models for a while, and says why."""

import json
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from device_runtime.agent.memory import Load, MemoryRecord
from fleet_protocol.errors import RefusalReason
from fleet_protocol.messages import NeedChunks, Progress, Refuse
from tests.brokers import any_broker
from tests.device_runtime.device_process import DeviceProcess
from tests.device_runtime.fake_system import FakeSystem
from tests.device_runtime.scripted_server import ScriptedServer, scripted_server
from tests.device_runtime.tiny_set import TinySet, initial_weights, samples, write_tiny_set

LARGE = 1000
SMALL = 999
ENDLESS = {"epochs": 10**6, "batch_size": 20_000}
MIB = 2**20


@dataclass
class Board:
    """What a test of `Memory` has: the system it reads, and the memory as each start of the agent
    finds it.
    """

    system: FakeSystem
    folder: Path

    def now(self, *, free: int, kills: int = 0) -> MemoryRecord:
        self.system.write(
            "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {free * 1024} kB\nBuffers: 7 kB"
        )
        self.system.write("proc/vmstat", f"oom_kill_disable 9\noom_kill {kills}\npgfault 5")
        return MemoryRecord(self.folder, self.system.root)


@pytest.fixture
def board(tmp_path) -> Board:
    (tmp_path / "state").mkdir()
    return Board(FakeSystem(tmp_path / "root"), tmp_path / "state")


def begun(board, peak=LARGE, *, free=200, kills=0, phase="training") -> Load:
    return board.now(free=free, kills=kills).measure(phase, "w1.00-d1", peak)


def test_what_begins_is_measured(board):
    """Free memory in bytes, and the kernel's count, which other lines that begin alike do not
    change.
    """
    assert begun(board, kills=3) == Load(
        phase="training", tier="w1.00-d1", peak=LARGE, free=200 * MIB, kills=3
    )
    bare = MemoryRecord(board.folder, board.folder / "nothing").measure("training", "w1.00-d1", 5)
    assert (bare.free, bare.kills) == (0, 0)


def test_a_kill_that_the_kernel_counted_is_believed_at_once(board):
    """And remembered over restarts; what needs less is taken."""
    load = begun(board, kills=3)
    board.now(free=200, kills=4).record_death(load)
    large = board.now(free=200, kills=4).too_large
    assert large == load
    assert (
        "training of w1.00-d1 exceeded this board's memory, with 200 MiB free before"
        in large.explanation
    )
    assert [large.forbids("training", peak) for peak in (SMALL, LARGE, LARGE + 1)] == [
        False,
        True,
        True,
    ]
    assert not large.forbids("measuring", LARGE)  # forward passes need less


def test_what_killed_the_board_in_measuring_is_not_measured_again(board):
    """Nor trained."""
    board.now(free=9).record_death(begun(board, phase="measuring"), proven=True)
    large = board.now(free=9).too_large
    assert large.forbids("measuring", LARGE)
    assert large.forbids("training", LARGE)


def test_a_death_that_nobody_explains_counts_when_it_is_the_third_in_a_row(board):
    """A power cut, or a kill by hand, is none; a finished task begins the row anew, idle time does
    not.
    """
    for died, lived in ((2, True), (2, False), (1, False)):
        for _ in range(died):
            assert board.now(free=200).too_large is None
            board.now(free=200).record_death(begun(board))
        board.now(free=200).record_survival(begun(board, SMALL) if lived else None)
    assert board.now(free=200).too_large is not None


def test_it_is_tried_again_after_some_tasks_and_ever_later(board):
    """Eight, then sixteen after the next death, up to 256; once it works, everything is
    forgotten.
    """
    rests = []
    for _ in range(7):
        memory = board.now(free=200)
        memory.record_death(begun(board), proven=True)
        rests.append(json.loads((board.folder / "memory.json").read_text())["rest"])
    assert rests == [8, 16, 32, 64, 128, 256, 256]
    memory.record_survival(begun(board, LARGE))
    memory.record_death(begun(board), proven=True)
    for left in range(8, 0, -1):
        assert board.now(free=200).too_large is not None, left
        memory.record_survival(begun(board, SMALL) if left % 2 else None)
    assert board.now(free=200).too_large is None


def test_it_is_tried_again_with_much_more_memory_free(board):
    """Half as much again as before the death; a system that does not tell is not believed to have
    more.
    """
    board.now(free=200).record_death(begun(board), proven=True)
    board.now(free=299).record_survival()
    assert board.now(free=299).too_large is not None
    board.now(free=300).record_survival()
    assert board.now(free=200).too_large is None
    board.now(free=0).record_death(begun(board, free=0), proven=True)
    board.now(free=300).record_survival()
    assert board.now(free=300).too_large is not None


def test_what_kills_the_board_after_that_is_smaller_still(board):
    """The limit falls with each."""
    for peak in (LARGE, SMALL, 5):
        board.now(free=200).record_death(begun(board, peak), proven=True)
        assert board.now(free=200).too_large.peak == peak


@pytest.mark.parametrize("text", ["", "{", '{"deaths": "many"}', "\xff"])
def test_what_is_damaged_is_learnt_again(board, text):
    """A file that a power cut cut off keeps no board from starting."""
    (board.folder / "memory.json").write_text(text, encoding="latin-1")
    assert board.now(free=1).too_large is None


# The agent as a process, killed.


@dataclass
class Scene:
    """A device, its server, and sets of one architecture that need more and less memory."""

    server: ScriptedServer
    device: DeviceProcess
    tiny: TinySet
    system: FakeSystem

    def offer(self, task: str, peak: int, number: int = 1, **changes) -> None:
        manifest = self.tiny.manifest.model_copy(update={"peak_memory_bytes": peak})
        self.tiny.blobs.put(manifest.to_bytes())
        choice = replace(self.tiny, manifest=manifest).choice(initial_weights())
        self.server.offer(self.device.id, choice, task=task, round=number, **changes)

    def wait_profile(self, below: int | None) -> str | None:
        self.server.wait(
            lambda: bool(self.server.profiles) and self.server.profiles[-1].memory_below == below
        )
        return self.server.profiles[-1].lowered


@pytest.fixture
def scene(tmp_path, request) -> Iterator[Scene]:
    x, y = samples(getattr(request, "param", 20_000))
    np.savez(tmp_path / "data.npz", x=x, y=y)
    tiny = write_tiny_set(tmp_path / "blobs")
    system = FakeSystem(tmp_path / "root")
    Board(system, tmp_path).now(free=200)
    with any_broker(tmp_path) as broker, scripted_server(broker.url, tiny.blobs) as server:
        device = DeviceProcess(
            tmp_path / "d",
            broker.url,
            {"kind": "npz", "path": str(tmp_path / "data.npz")},
            holdout=0,
        )
        device.config.write_text(
            f'{device.config.read_text()}[conditions]\nroot = "{system.root}"\n'
        )
        try:
            device.start()
            server.wait_state("idle")
            yield Scene(server, device, tiny, system)
        finally:
            device.kill()


@pytest.mark.slow
def test_an_agent_that_the_kernel_kills_comes_back_smaller(scene):
    """The task is declined with the reason, the profile tells it, a smaller sub-model is
    trained.
    """
    assert scene.wait_profile(None) is None
    scene.offer("t1", LARGE, train=ENDLESS)
    scene.server.wait_message(Progress, "t1")
    scene.device.kill()
    scene.system.write("proc/vmstat", "oom_kill 1")
    scene.device.start()
    refusal = scene.server.wait_message(Refuse, "t1")
    assert refusal.reason is RefusalReason.UNSUPPORTED
    assert (
        "training of w1.00-d1 exceeded this board's memory, with 200 MiB free before"
        in refusal.detail
    )
    assert scene.wait_profile(LARGE) == refusal.detail
    scene.device.wait_log("state=idle")
    assert scene.device.states() == ["starting", "probing", "fetching", "refusing", "idle"]
    scene.offer("t2", SMALL, 2, train={"batch_size": 20_000})
    scene.server.wait_update("t2")
    scene.offer("t3", LARGE + 1, 3)
    assert scene.server.wait_message(Refuse, "t3").detail == refusal.detail
    assert not scene.server.heard(NeedChunks, "t3")  # its graphs were not even asked for


@pytest.mark.slow
def test_a_loop_of_kills_ends(scene):
    """Rounds so short that no task outlives its agent: the third agent that dies so is the last
    one.
    """
    for number in (1, 2, 3):
        scene.offer(f"t{number}", LARGE, number, train=ENDLESS, seconds_left=600.0)
        scene.server.wait_message(Progress, f"t{number}")
        scene.device.kill()
        (scene.device.state_dir / "task.json").write_text(
            re.sub(
                r'("deadline_unix": )\d+\.\d+',
                r"\g<1>1.0",
                (scene.device.state_dir / "task.json").read_text(),
            )
        )
        before = len(scene.server.statuses)
        scene.device.start()
        scene.server.wait_state("idle", after=before)
    assert "exceeded this board's memory" in (scene.wait_profile(LARGE) or "")
    assert not scene.server.heard(Refuse)  # nobody waited for any of them any more
    scene.offer("t4", LARGE, 4, train=ENDLESS)
    scene.server.wait_message(Refuse, "t4")
    scene.offer("t5", SMALL, 5, train={"batch_size": 20_000})
    scene.server.wait_update("t5")


@pytest.mark.slow
@pytest.mark.parametrize("scene", [600_000], indirect=True)
def test_memory_that_a_process_may_not_have(scene):
    """Under a limit of its address space the runtime, or numpy, says so itself; the agent lives and
    takes less.
    """
    scene.offer("t1", LARGE, train={"batch_size": 500})
    scene.server.wait_update("t1")
    now = (
        int(Path(f"/proc/{scene.device.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    )
    resource.prlimit(scene.device.pid, resource.RLIMIT_AS, (now + 40 * MIB, resource.RLIM_INFINITY))
    scene.offer("t2", LARGE, 2, train={"batch_size": 600_000})
    assert scene.server.wait_message(Refuse, "t2").reason is RefusalReason.FAILED
    assert "exceeded this board's memory" in (scene.wait_profile(LARGE) or "")
    resource.prlimit(scene.device.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    scene.offer("t3", SMALL, 3, train={"batch_size": 500})
    scene.server.wait_update("t3")
