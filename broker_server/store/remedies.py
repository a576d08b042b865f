"""Say why a device takes no part in training, and what helps."""

import re
from collections.abc import Mapping
from shlex import quote

from broker_server.store.records import DeviceRecord
from broker_server.store.task_records import TaskPhase, TaskRecord

SIMULATED = "simulated"
"""State of a device that never connected, because it is part of a simulation."""

REVOKED = "revoked"
"""State of a device whose certificate was revoked, or whose enrolment has ended."""

_FAILED = frozenset({TaskPhase.MISSED, TaskPhase.REFUSED, TaskPhase.DECLINED})
_IN_ROUND = re.compile(r"round (\d{1,19}): ", re.ASCII)

# Beginnings of reasons, and what helps. The other reasons say themselves what to do.
_REMEDIES = (
    (
        "offline",
        "look at its power and network; on the board run `shoal device doctor`",
    ),
    (
        "revoked",
        (
            "nothing; or if its days are over `shoal renew {device}`, else `shoal enroll {device}`"
            " anew"
        ),
    ),
    (
        "connected, and says nothing",
        "see whether its agent runs: on the board `systemctl status shoal-device`",
    ),
    ("it has not said what it is", "on the board run `shoal device doctor`"),
    (
        "in quarantine",
        "look at `shoal log`, then let it in again: `shoal devices release {device}`",
    ),
    (
        "none of the tiers",
        "export a narrower tier (`shoal export --add`), or raise max_width in its device.toml",
    ),
    (
        "not drawn",
        "nothing is wrong; round.fraction in fleet.toml says how many are asked",
    ),
    (
        "missed",
        (
            "raise round.deadline_seconds, or lower max_width in its device.toml"
            " (`shoal rounds show {round}`)"
        ),
    ),
    ("refused", "see what was wrong with its update: `shoal rounds show {round}`"),
    ("declined", "on the board run `shoal device doctor`"),
)


def absence_reason(
    device: DeviceRecord, newest: TaskRecord | None, left_out: Mapping[str, str]
) -> str:
    """Return why a device takes no part, or took none in the newest round; empty if it does.

    Args:
        device: the device.
        newest: its newest training task.
        left_out: reasons of the newest round, by device that it did not ask.
    """
    if device.state == REVOKED:
        return "revoked, or its enrolment has ended: it is no member of the fleet any more"
    if not device.online:
        last = device.profile.unable if device.profile is not None else ""
        return f"offline; the last that it said: {last}" if last else "offline"
    if device.profile is None and device.state != SIMULATED:
        return "it has not said what it is"
    if device.profile is not None and device.profile.unable:
        return device.profile.unable
    if device.id in left_out:
        return left_out[device.id]
    if newest is None or newest.phase not in _FAILED:
        return ""
    detail = f": {newest.detail}" if newest.detail else ""
    return f"round {newest.round}: {newest.phase.value}{detail}"


def remedy(device: str, reason: str) -> str:
    """Return what helps against a reason from `absence_reason`.

    Empty where nothing needs to be done, or the reason says what helps.
    """
    number = ""
    problem = reason
    # A reason may also be a device's own words, which need not have a round.
    in_round = _IN_ROUND.match(reason)
    if in_round is not None:
        number = in_round[1]
        problem = reason[in_round.end() :]
    for beginning, text in _REMEDIES:
        if problem.startswith(beginning):
            return text.replace("{round}", number).replace("{device}", quote(device))
    return ""
