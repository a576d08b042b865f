"""Records which sub-models exceed a board's memory, so that it avoids them for a while.

A killed process is not informed of the reason. The kernel counts processes that it kills for lack
of memory (``oom_kill`` in ``/proc/vmstat``). A death that this count does not explain is blamed on
memory if it is the third in a row.
"""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from device_runtime.board import proc_number
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError
from fleet_protocol.frozen import FrozenModel

DEATHS = 3
_REST = 8  # tasks after which a load that was too large is tried again; doubled with every failure
_LONGEST_REST = 256
_WELL_ABOVE = (
    1.5  # it is tried again immediately with this multiple of the memory that was free before
)


class Load(FrozenModel):
    """A computation, and how much memory was free for it.

    Attributes:
        phase: the state of the agent.
        tier: tier of the sub-model.
        peak: predicted peak memory in bytes.
        free: bytes that were free before.
        kills: number of processes that the kernel had killed before.
    """

    phase: str
    tier: str
    peak: int
    free: int
    kills: int

    def forbids(self, phase: str, peak: int) -> bool:
        """Return whether a load is at least as large as this one, which was too large.

        A tier that killed the board in training may still be measured.
        """
        return phase in {"training", self.phase} and peak >= self.peak

    @property
    def explanation(self) -> str:
        """Explain that this load was too large, and when it is tried again."""
        return (
            f"{self.phase} of {self.tier} exceeded this board's memory, with"
            f" {self.free / 2**20:.0f} MiB free before; the board now trains smaller sub-models,"
            " and retries this one after some rounds, or when 50 % more memory is free"
        )


class _Learnt(FrozenModel):
    """The file's content.

    Attributes:
        deaths: in a row.
        too_large: the load that was too large; None for none.
        rest: number of tasks before it is tried again.
        times: how often it was too large.
        samples: number at the last finished task.
    """

    deaths: int = 0
    too_large: Load | None = None
    rest: int = 0
    times: int = 0
    samples: int = 0


class MemoryRecord:
    """The record in a state folder; `root` is the folder that contains ``proc``."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._path = folder / "memory.json"
        self._proc = root / "proc"
        self.learnt = _Learnt()
        with contextlib.suppress(OSError, ValidationError):  # a lost record is learnt again
            self.learnt = _Learnt.model_validate_json(self._path.read_bytes())

    def measure(self, phase: str, tier: str, peak: int) -> Load:
        """Return the load of a computation that begins, with the board as it is now."""
        free = proc_number(self._proc / "meminfo", "MemAvailable")
        kills = proc_number(self._proc / "vmstat", "oom_kill")
        return Load(phase=phase, tier=tier, peak=peak, free=free, kills=kills)

    @property
    def too_large(self) -> Load | None:
        """Return the load that nothing may equal or exceed; None if everything may be tried."""
        return self.learnt.too_large if self.learnt.rest else None

    def record_death(self, load: Load, *, proven: bool = False) -> None:
        """Record that the agent was killed while it computed.

        Args:
            load: load of that computation.
            proven: the runtime itself has reported that memory was lacking.
        """
        # A single death can have any cause; the kernel's count, or a third death in a row, proves
        # it.
        deaths = self.learnt.deaths + 1
        kernel_kills = self.measure("", "", 0).kills
        if not (proven or deaths >= DEATHS or kernel_kills > load.kills):
            self._save(deaths=deaths)
            return
        times = self.learnt.times
        rest = min(_REST * 2**times, _LONGEST_REST)
        self._save(deaths=0, too_large=load, rest=rest, times=times + 1)

    def record_survival(self, load: Load | None = None, samples: int = 0) -> None:
        """Record that a task finished with this many samples or, without a load, that time passed.

        Both bring the next try of a load that was too large nearer.
        """
        too_large = self.learnt.too_large
        free = self.measure("", "", 0).free
        # Free memory of 0 means that the system does not report it.
        roomy = too_large is not None and 0 < _WELL_ABOVE * too_large.free <= free
        self._save(rest=0 if roomy else max(0, self.learnt.rest - 1))
        if load is None:
            return
        self._save(deaths=0, samples=samples)
        if too_large and load.phase == too_large.phase and load.peak >= too_large.peak:
            self._save(too_large=None, rest=0, times=0)  # as many tasks have succeeded

    def _save(self, **changes: object) -> None:
        learnt = self.learnt.model_copy(update=changes)
        if learnt == self.learnt:
            return
        self.learnt = learnt
        # The server is informed of a full disk when there is an update to save.
        with contextlib.suppress(StorageError):
            write_atomically(self._path, learnt.model_dump_json().encode())
