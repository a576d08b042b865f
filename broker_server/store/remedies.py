"""Explains why a device does not take part in training, and what to do."""

import re
from collections.abc import Mapping
from shlex import quote

from broker_server.store.records import DeviceRecord
from broker_server.store.task_records import TaskPhase, TaskRecord

SIMULATED = "simulated"
"""State of a device that never connected, because it is part of a simulation."""

REVOKED = "revoked"
"""State of a device whose certificate was revoked, or whose enrolment has expired."""

_FAILED = frozenset({TaskPhase.MISSED, TaskPhase.REFUSED, TaskPhase.DECLINED})
_IN_ROUND = re.compile(r"round (\d{1,19}): ", re.ASCII)

# Beginnings of reasons, and their remedies. The other reasons include what to do.
_REMEDIES = (
    (
        "offline",
        "check its power and network; on the board, run `shoal device doctor`",
    ),
    (
        "revoked",
        (
            "if its enrolment has expired, run `shoal renew {device}`; to let a revoked device"
            " back in, run `shoal enroll {device}`"
        ),
    ),
    (
        "connected,",
        "check whether its agent is running: on the board, run `systemctl status shoal-device`",
    ),
    ("it has not sent its profile", "on the board, run `shoal device doctor`"),
    (
        "in quarantine",
        "check `shoal log`, then admit it again: `shoal devices release {device}`",
    ),
    (
        "none of the tiers",
        "export a narrower tier (`shoal export --add`), or raise max_width in its device.toml",
    ),
    (
        "not drawn",
        "nothing is wrong; round.fraction in fleet.toml sets how many devices are selected",
    ),
    (
        "missed",
        (
            "raise round.deadline_seconds, or lower max_width in its device.toml"
            " (`shoal rounds show {round}`)"
        ),
    ),
    ("refused", "find out what was wrong with its update: `shoal rounds show {round}`"),
    ("declined", "on the board, run `shoal device doctor`"),
)


def absence_reason(
    device: DeviceRecord, newest: TaskRecord | None, left_out: Mapping[str, str]
) -> str:
    """Return why a device does not take part, or did not in the newest round; empty if it does.

    Args:
        device: the device.
        newest: its newest training task.
        left_out: reasons of the newest round, by device that it did not select.
    """
    # The strongest reason first: a revoked device needs no other.
    if device.state == REVOKED:
        return "revoked, or its enrolment has expired: it is no longer a member of the fleet"
    if not device.online:
        # An agent that could not train reports why before it ends.
        last = device.profile.unable if device.profile is not None else ""
        return f"offline; its last report: {last}" if last else "offline"
    # Devices of a simulation have no profile.
    if device.profile is None and device.state != SIMULATED:
        return "it has not sent its profile"
    if device.profile is not None and device.profile.unable:
        return device.profile.unable
    if device.id in left_out:
        return left_out[device.id]
    if newest is None or newest.phase not in _FAILED:
        return ""
    detail = f": {newest.detail}" if newest.detail else ""
    return f"round {newest.round}: {newest.phase.value}{detail}"


def remedy(device: str, reason: str) -> str:
    """Return the remedy for a reason from `absence_reason`.

    Empty if nothing needs to be done, or if the reason says what to do.
    """
    number = ""
    problem = reason
    # A reason may also be a device's own text, which need not have a round.
    in_round = _IN_ROUND.match(reason)
    if in_round is not None:
        number = in_round[1]
        problem = reason[in_round.end() :]
    # Reasons begin with fixed words, which `absence_reason` and the rounds write.
    for beginning, text in _REMEDIES:
        if problem.startswith(beginning):
            return text.replace("{round}", number).replace("{device}", quote(device))
    return ""
