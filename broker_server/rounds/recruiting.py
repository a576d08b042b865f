"""Chooses the devices of a round: waits for enough, and draws some of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from broker_server.rounds.dispatch import Services
from broker_server.rounds.round_records import training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.summing import why_no_sum
from broker_server.rounds.tier_assignment import (
    Assignment,
    assign,
    tier_names,
    why_unfit,
)
from broker_server.stages.selection import choose, count_wanted
from broker_server.store import LeftOut
from broker_server.updates.quarantine import quarantined
from fleet_protocol import control
from fleet_protocol.errors import TransportError
from fleet_protocol.messages import Profile

_MOST_REASONS = 3  # devices that declined, in the sentence that ends a run
_MOST_LEFT_OUT = 1000  # a fleet of thousands must not write all its names for every round


@dataclass(frozen=True)
class Recruits:
    """The devices of a round."""

    chosen: tuple[Assignment, ...]  # with their tiers, by id
    wanted: int  # number of updates after which the round does not wait for more
    left_out: LeftOut  # devices that are not selected, and why


def recruit(
    context: RunContext,
    services: Services,
    version: int,
    number: int,
    while_waiting: Callable[[], None] = lambda: None,
) -> Recruits:
    """Wait until enough devices are online, and draw those of a round.

    Args:
        context: the run.
        services: services of the run.
        version: number of the newest version, which counts the closed rounds.
        number: number of the round.
        while_waiting: called about once a second while devices are awaited.

    Raises:
        TransportError: too few devices connected in time.
        Halted: the operator has stopped or held the run.
        StopRequested: the server must end.
    """
    # Handle the messages that arrived while the server merged.
    services.dispatcher.pump(services.dispatcher.now())
    return _Recruiting(context, services, version, number).recruit(while_waiting)


class _Recruiting:
    """The recruiting of one round."""

    def __init__(self, context: RunContext, services: Services, version: int, number: int) -> None:
        self._context = context
        self._config = context.config
        self._dispatcher = services.dispatcher
        self._fleet = services.dispatcher.fleet
        self._version = version
        self._number = number
        self._quarantine: dict[str, int] = {}
        quarantine = quarantined(services.store, context.run, context.config)
        for device, until in quarantine.items():
            if number <= until:
                self._quarantine[device] = until
        tasks = training_tasks(context, services.store, number)
        self._busy = {task.device for task in tasks}  # with a task of an earlier round
        self._unfit: Mapping[str, str] = {}  # why devices cannot take part, as last reported

    def recruit(self, while_waiting: Callable[[], None]) -> Recruits:
        config = self._config.round
        eligible = self._wait_for_devices(while_waiting)
        # A device that goes offline keeps its task, but takes no other device's place.
        at_work = self._busy_online()
        total = count_wanted(
            len(eligible) + at_work, fraction=config.fraction, least=config.min_devices
        )
        wanted = max(0, total - at_work)
        chosen = choose(
            eligible,
            wanted=wanted,
            over_selection=config.over_selection,
            seed=self._config.seed,
            number=self._number,
        )
        left_out = self._left_out({assignment.device for assignment in chosen})
        if config.buffer is not None:
            wanted = min(config.buffer, len(chosen) + at_work)
        return Recruits(chosen, wanted, left_out)

    def _busy_online(self) -> int:
        return sum(map(self._fleet.is_online, self._busy))

    # Waiting.

    def _wait_for_devices(self, while_waiting: Callable[[], None]) -> Mapping[str, Assignment]:
        """Return the eligible devices as soon as there are enough."""
        deadline = self._dispatcher.now() + self._config.round.wait_seconds
        reported: tuple[str, ...] | None = None
        while True:
            eligible = self._eligible()
            too_few_for_sums = ""
            if self._are_enough(eligible):
                too_few_for_sums = self._too_few_for_sums(eligible)
                if not too_few_for_sums:
                    return eligible
            online = self._fleet.online
            if reported != online:
                reported = online
                self._report_waiting(len(eligible))
                if too_few_for_sums:
                    self._dispatcher.reporter.note("waiting", too_few_for_sums, self._number)
            self._dispatcher.operator.require_go()
            if self._dispatcher.now() >= deadline:
                raise TransportError(too_few_for_sums or self._shortage(len(eligible)))
            self._dispatcher.pump(deadline)
            while_waiting()

    def _eligible(self) -> Mapping[str, Assignment]:
        # Levels are dealt among all devices that are online: otherwise devices that are busy or in
        # quarantine would change the levels of the others.
        assignments = assign(
            self._fleet.profiles(),
            self._context.tiers,
            self._config.tiers,
            seed=self._config.seed,
            version=self._version,
        )
        eligible = _without(assignments, {*self._quarantine, *self._busy})
        if self._are_enough(eligible):
            return eligible
        # Devices in quarantine take part if the others are too few: one more refusal costs less
        # than the run.
        return _without(assignments, self._busy)

    def _are_enough(self, eligible: Mapping[str, Assignment]) -> bool:
        return len(eligible) + self._busy_online() >= self._config.round.min_devices

    def _too_few_for_sums(self, eligible: Mapping[str, Assignment]) -> str:
        config = self._config.round
        drawn = count_wanted(len(eligible), fraction=config.fraction, least=config.min_devices)
        asked = self._context.method.instructions("train", self._version)
        return why_no_sum(asked.upload.summing, eligible.values(), drawn, config.quorum)

    def _report_waiting(self, eligible: int) -> None:
        """Report which devices are online, and record which can no longer take part."""
        reporter = self._dispatcher.reporter
        event = control.FleetChanged(
            **reporter.stamp,
            online=self._fleet.online,
            eligible=eligible,
            needed=self._config.round.min_devices,
        )
        reporter.emit(event)
        before = self._unfit
        self._unfit = self._find_unfit()
        for device, reason in sorted(self._unfit.items() - before.items()):
            reporter.note("unfit", reason, self._number, device)

    def _find_unfit(self) -> dict[str, str]:
        unfit = {}
        for device, profile in self._fleet.profiles().items():
            reason = why_unfit(profile, self._context.tiers, self._config.tiers)
            if reason:
                unfit[device] = reason
        return unfit

    def _shortage(self, eligible: int) -> str:
        """Describe why a run ends for lack of devices."""
        config = self._config.round
        online = self._fleet.online
        reasons = sorted({**self._unfit, **self._fleet.declined}.items())[:_MOST_REASONS]
        declined = ""
        for device, reason in reasons:
            declined += f"{device}: {reason}. "
        tiers = tier_names(self._context.tiers)
        devices = "device" if eligible == 1 else "devices"
        return (
            f"{eligible} eligible {devices} after {config.wait_seconds:g} s, "
            f"{config.min_devices} needed; {len(online)} online: "
            f"{', '.join(online) or 'none'}. {declined}Have the devices been started, with "
            f"this broker and this fleet, and can they train one of the tiers {tiers}?"
        )

    # Devices that are left out.

    def _left_out(self, asked: Collection[str]) -> LeftOut:
        """Explain why devices are not selected: first those that are online, each group by id."""
        profiles = self._fleet.profiles()
        online: dict[str, str] = {}
        offline: dict[str, str] = {}
        for device in sorted(self._fleet.known - set(asked)):
            group = online if self._fleet.is_online(device) else offline
            group[device] = self._reason_left_out(device, profiles.get(device))
        reasons = list({**online, **offline}.items())
        named = dict(reasons[:_MOST_LEFT_OUT])
        return LeftOut(reasons=named, more=len(reasons) - len(named))

    def _reason_left_out(self, device: str, profile: Profile | None) -> str:
        if device in self._quarantine:
            until = self._quarantine[device]
            why = "its updates were refused, or rounds waited for it without an answer"
            return f"in quarantine up to round {until}: {why}"
        if profile is None:
            return self._fleet.why_away(device)
        unfit = why_unfit(profile, self._context.tiers, self._config.tiers)
        if unfit:
            return unfit
        return "at work for an earlier round" if device in self._busy else "not drawn"


def _without(
    assignments: Mapping[str, Assignment], absent: Collection[str]
) -> dict[str, Assignment]:
    present = {}
    for device, assignment in assignments.items():
        if device not in absent:
            present[device] = assignment
    return present
