"""The routines by name. A new one is one file and one row here."""

from collections.abc import Mapping
from types import MappingProxyType

from device_runtime.training.own_settings import read_settings
from device_runtime.training.routines import mutual, statistics, train
from device_runtime.training.routines.routine import Result, Routine
from device_runtime.training.task import DeviceSetup
from fleet_protocol.encodings import ENCODINGS
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Instructions

__all__ = ["ROUTINES", "Result", "Routine", "may_join", "routine_of"]

ROUTINES: Mapping[str, Routine] = MappingProxyType(
    {routine.name: routine for routine in (train.ROUTINE, statistics.ROUTINE, mutual.ROUTINE)}
)


def routine_of(instructions: Instructions) -> Routine:
    """Return the routine that a task asks for.

    Raises:
        RefusedError: there is none of that name.
    """
    routine = ROUTINES.get(instructions.routine)
    if routine is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"no routine {instructions.routine!r} on this board (it has {', '.join(ROUTINES)}); "
            "update its Shoal",
        )
    return routine


def may_join(instructions: Instructions, setup: DeviceSetup) -> Routine:
    """Check that a board can do what a task asks, before anything is fetched; return its routine.

    Raises:
        RefusedError: it does not know the routine or the update's encoding, a setting is wrong, or
            the board lacks what the routine needs.
    """
    routine = routine_of(instructions)
    _check_encoding(instructions.upload.encoding, routine)
    read_settings(routine.settings, instructions.settings, f"routine {routine.name}")
    routine.join(instructions, setup)
    return routine


def _check_encoding(encoding: str, routine: Routine) -> None:
    """Raise a RefusedError where an update of a routine cannot have an encoding."""
    is_known = encoding in ENCODINGS
    # Statistics are no difference to what was sent, which encodings are made for.
    is_for_training = encoding != "fp32"
    if is_known and (routine.phase == "training" or not is_for_training):
        return
    raise RefusedError(
        RefusalReason.UNSUPPORTED,
        f"no upload encoding {encoding!r} for {routine.name} on this board "
        f"(it has {', '.join(ENCODINGS)}); update its Shoal, "
        'or run with [upload] encoding = "fp32"',
    )
