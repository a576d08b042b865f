"""What a board has learnt of its memory: what killed it in computing is too large, for a while.

Nobody tells a process why it is killed. The kernel counts whom it kills for want of memory
(``oom_kill`` of ``/proc/vmstat``); a death that it does not explain is taken for one when it is the
third in a row.
"""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from device_runtime.board import proc_number
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel

DEATHS = 3
_REST = 8  # tasks after which what was too large is tried again, doubled with every failure
_LONGEST_REST = 256
_WELL_ABOVE = 1.5  # times the memory that was free then, at which it is tried again at once


class Load(FrozenModel):
    """What is computed, and how much memory there was for it.

    Attributes:
        phase: the state of the agent.
        tier: of the sub-model.
        peak: bytes that it is predicted to need.
        free: bytes that were free before.
        kills: number of processes that the kernel had killed until then.
    """

    phase: str
    tier: str
    peak: int
    free: int
    kills: int

    def forbids(self, phase: str, peak: int) -> bool:
        """Return whether something is as large as this, which was too large.

        What killed the board in training may still be measured.
        """
        return phase in {"training", self.phase} and peak >= self.peak

    @property
    def explanation(self) -> str:
        """Sentence that this was too large, and when it is tried again."""
        return (
            f"{self.phase} {self.tier} took this board out of memory, "
            f"with {self.free / 2**20:.0f} MiB free before; it takes smaller ones now, "
            "and tries it again after some rounds, or with half as much again free"
        )


class _Learnt(FrozenModel):
    """The file.

    Attributes:
        deaths: in a row.
        too_large: what was too large, None for nothing.
        rest: for so many tasks it is not tried again.
        times: how often it was too large.
        samples: at the last finished task.
    """

    deaths: int = 0
    too_large: Load | None = None
    rest: int = 0
    times: int = 0
    samples: int = 0


class MemoryRecord:
    """What has been learnt, kept in a state folder; `root` has ``proc`` in it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._path = folder / "memory.json"
        self._proc = root / "proc"
        self.learnt = _Learnt()
        with contextlib.suppress(OSError, ValidationError):  # what is lost is learnt again
            self.learnt = _Learnt.model_validate_json(self._path.read_bytes())

    def measure(self, phase: str, tier: str, peak: int) -> Load:
        """Return what begins, with the board as it is now."""
        free = proc_number(self._proc / "meminfo", "MemAvailable")
        kills = proc_number(self._proc / "vmstat", "oom_kill")
        return Load(phase=phase, tier=tier, peak=peak, free=free, kills=kills)

    @property
    def too_large(self) -> Load | None:
        """Load that nothing may be as large as; None where everything may be tried."""
        return self.learnt.too_large if self.learnt.rest else None

    def record_death(self, load: Load, *, proven: bool = False) -> None:
        """Record that the agent was killed while it computed.

        Args:
            load: what it computed.
            proven: the runtime has said itself that memory was lacking.
        """
        # A single death may have had any cause; the kernel's count, or a third one, proves it.
        deaths = self.learnt.deaths + 1
        kernel_kills = self.measure("", "", 0).kills
        if not (proven or deaths >= DEATHS or kernel_kills > load.kills):
            self._save(deaths=deaths)
            return
        times = self.learnt.times
        rest = min(_REST * 2**times, _LONGEST_REST)
        self._save(deaths=0, too_large=load, rest=rest, times=times + 1)

    def record_survival(self, load: Load | None = None, samples: int = 0) -> None:
        """Record that a task was computed on so many samples, or, without a load, that time passed.

        Either brings what was too large nearer to being tried again.
        """
        too_large = self.learnt.too_large
        free = self.measure("", "", 0).free
        # Free memory of 0 means that the system does not tell.
        roomy = too_large is not None and 0 < _WELL_ABOVE * too_large.free <= free
        self._save(rest=0 if roomy else max(0, self.learnt.rest - 1))
        if load is None:
            return
        self._save(deaths=0, samples=samples)
        if too_large and load.phase == too_large.phase and load.peak >= too_large.peak:
            self._save(too_large=None, rest=0, times=0)  # as much has gone well

    def _save(self, **changes: object) -> None:
        learnt = self.learnt.model_copy(update=changes)
        if learnt == self.learnt:
            return
        self.learnt = learnt
        # Of a full disk the server hears when there is an update to keep.
        with contextlib.suppress(StorageError):
            write_atomically(self._path, learnt.model_dump_json().encode())
