"""What a board has learnt of its memory: a sub-model in whose computation it was killed is too
large, for a while.

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
_REST = 8
_LONGEST_REST = 256
_WELL_ABOVE = 1.5


class Load(FrozenModel):
    """What is computed in a state, how much it is predicted to need, and what was free before.

    Bytes.

    With it the number of processes that the kernel had killed until then.
    """

    phase: str
    tier: str
    peak: int
    free: int
    kills: int

    def forbids(self, phase: str, peak: int) -> bool:
        """Whether something is as large.

        What killed the board in training may still be measured.
        """
        return phase in {"training", self.phase} and peak >= self.peak

    @property
    def said(self) -> str:
        """That it was too large."""
        return (
            f"{self.phase} {self.tier} took this board out of memory, with {self.free / 2**20:.0f} MiB free before; it"
            " takes smaller ones now, and tries it again after some rounds, or with half as much again free"
        )


class _Learnt(FrozenModel):
    """Deaths in a row; what was too large, for how many tasks, how often.

    And the samples at the last finished task.
    """

    deaths: int = 0
    too_large: Load | None = None
    rest: int = 0
    times: int = 0
    samples: int = 0


class Memory:
    """What has been learnt, kept in a state folder; `root` has ``proc`` in it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._path = folder / "memory.json"
        self._proc = root / "proc"
        self.learnt = _Learnt()
        with contextlib.suppress(OSError, ValidationError):  # what is lost is learnt again
            self.learnt = _Learnt.model_validate_json(self._path.read_bytes())

    def load(self, phase: str, tier: str, peak: int) -> Load:
        """What begins, with the board as it is now."""
        free = proc_number(self._proc / "meminfo", "MemAvailable")
        kills = proc_number(self._proc / "vmstat", "oom_kill")
        return Load(phase=phase, tier=tier, peak=peak, free=free, kills=kills)

    @property
    def too_large(self) -> Load | None:
        """What nothing that is computed may be as large as.

        None where nothing was too large, or it may be again.
        """
        return self.learnt.too_large if self.learnt.rest else None

    def died(self, load: Load, *, proven: bool = False) -> None:
        """The agent was killed while it computed.

        Proven if the runtime has said itself that memory was lacking.
        """
        deaths = self.learnt.deaths + 1
        times = self.learnt.times
        if proven or deaths >= DEATHS or self.load("", "", 0).kills > load.kills:
            self._keep(
                deaths=0,
                too_large=load,
                rest=min(_REST * 2**times, _LONGEST_REST),
                times=times + 1,
            )
        else:
            self._keep(deaths=deaths)

    def lived(self, load: Load | None = None, samples: int = 0) -> None:
        """A task was computed on so many samples, or some idle time has passed."""
        learnt = self.learnt
        large = self.learnt.too_large
        more = large is not None and 0 < _WELL_ABOVE * large.free <= self.load("", "", 0).free
        self._keep(rest=0 if more else max(0, learnt.rest - 1))
        if load is not None:
            self._keep(deaths=0, samples=samples)
        if large and load and load.phase == large.phase and load.peak >= large.peak:
            self._keep(too_large=None, rest=0, times=0)

    def _keep(self, **changes: object) -> None:
        if (learnt := self.learnt.model_copy(update=changes)) != self.learnt:
            self.learnt = learnt
            with contextlib.suppress(
                StorageError
            ):  # a full disk is told when there is something to keep
                write_atomically(self._path, learnt.model_dump_json().encode())
