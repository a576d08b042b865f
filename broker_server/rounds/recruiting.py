"""Who is asked in a round: waiting for enough devices, drawing some of them, and saying why others
are left out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from broker_server.rounds.dispatch import Services
from broker_server.rounds.fleet import Assignment, assign, choose, count_wanted, why_unfit
from broker_server.rounds.round_records import training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.store import LeftOut
from broker_server.updates.quarantine import quarantined
from fleet_protocol import control
from fleet_protocol.errors import TransportError

_TOLD = 3  # devices that declined, in the sentence that ends a run
_NAMED_LEFT_OUT = 1000  # a fleet of thousands must not write all its names for every round


@dataclass(frozen=True)
class Recruits:
    """The devices of a round."""

    chosen: tuple[Assignment, ...]  # with their tiers, by id
    wanted: int  # so many of their updates
    left_out: LeftOut  # who is not asked, and why


def recruit(context: RunContext, services: Services, version: int, number: int) -> Recruits:
    """Wait until enough devices are there, and draw those of a round.

    `version` counts the closed ones.

    Raises:
        TransportError: too few came in time.
        Halted: no further round is wanted now.
        StopRequested: the run shall stop here.
    """
    config = context.config
    dispatcher = services.dispatcher
    fleet = services.dispatcher.fleet
    dispatcher.pump(dispatcher.now())  # what came while the server was at work
    banned = {
        device: until
        for device, until in quarantined(services.store, context.run, config.robust).items()
        if number <= until
    }
    busy = {task.device for task in training_tasks(context, services.store, number)}
    eligible = _wait_for_devices(context, services, version, number, banned, busy)
    at_work = sum(map(fleet.is_online, busy))  # who left keeps its task, and no other's place
    wanted = count_wanted(
        len(eligible) + at_work,
        fraction=config.round.fraction,
        least=config.round.min_devices,
    )
    wanted = max(0, wanted - at_work)
    chosen = choose(
        eligible,
        wanted=wanted,
        over_selection=config.round.over_selection,
        seed=config.seed,
        number=number,
    )
    asked = {item.device for item in chosen}
    profiles = fleet.profiles()
    reasons = {}
    for device in sorted(
        fleet.known - asked, key=lambda device: (not fleet.is_online(device), device)
    ):
        if device in banned:
            reasons[device] = (
                f"in quarantine up to round {banned[device]}: its updates were refused"
            )
        elif device not in profiles:
            reasons[device] = fleet.why_away(device)
        else:
            unfit = why_unfit(profiles[device], context.tiers, config.tiers)
            reasons[device] = unfit or (
                "at work for an earlier round" if device in busy else "not drawn"
            )
    named = dict(list(reasons.items())[:_NAMED_LEFT_OUT])
    if config.round.buffer is not None:
        wanted = min(config.round.buffer, len(chosen) + at_work)
    return Recruits(chosen, wanted, LeftOut(reasons=named, more=len(reasons) - len(named)))


def _wait_for_devices(
    context: RunContext,
    services: Services,
    version: int,
    number: int,
    banned: Collection[str],
    busy: Collection[str],
) -> Mapping[str, Assignment]:
    config = context.config
    dispatcher = services.dispatcher
    deadline = dispatcher.now() + config.round.wait_seconds
    told: tuple[str, ...] | None = None
    unfit: Mapping[str, str] = {}
    while True:
        # Levels are dealt among all that are there, or who is busy or in quarantine would move
        # those of the others.
        dealt = assign(
            dispatcher.fleet.profiles(),
            context.tiers,
            config.tiers,
            seed=config.seed,
            version=version,
        )
        # Who is in quarantine takes part where there were too few without: one refusal more costs
        # less than the run.
        for absent in ({*banned, *busy}, {*busy}):
            eligible = {device: item for device, item in dealt.items() if device not in absent}
            if (
                len(eligible) + sum(map(dispatcher.fleet.is_online, busy))
                >= config.round.min_devices
            ):
                return eligible
        online = dispatcher.fleet.online
        if told != online:
            told = online
            stamp = dispatcher.reporter.stamp
            needed = config.round.min_devices
            event = control.FleetChanged(
                **stamp, online=online, eligible=len(eligible), needed=needed
            )
            dispatcher.reporter.emit(event)
            there = dispatcher.fleet.profiles()
            whys = {
                name: why_unfit(profile, context.tiers, config.tiers)
                for name, profile in there.items()
            }
            before = unfit
            unfit = {name: why for name, why in whys.items() if why}
            for name, why in sorted(unfit.items() - before.items()):
                dispatcher.reporter.note("unfit", why, number, name)
        dispatcher.operator.require_go()
        if dispatcher.now() >= deadline:
            reasons = sorted({**unfit, **dispatcher.fleet.declined}.items())[:_TOLD]
            declined = "".join(f"{name}: {why}. " for name, why in reasons)
            raise TransportError(
                f"{len(eligible)} eligible devices after {config.round.wait_seconds:g} s, "
                f"{config.round.min_devices} needed; {len(online)} online: {', '.join(online) or 'none'}. {declined}"
                "Are the devices started, on this broker and in this fleet, and can they train one of the tiers "
                f"{', '.join(item.tier.id for item in context.tiers)}?"
            )
        dispatcher.pump(deadline)
