"""Turns an offer into the current task or a refusal, or ignores it if it is old."""

import time

from device_runtime.agent.choosing import able_choices, choice_to_measure
from device_runtime.agent.context import Context, TaskOutcome
from device_runtime.agent.machine import Event
from device_runtime.agent.refusals import Refusal, refusal_of
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import StoredTask
from device_runtime.training.choosers import chooser_of
from fleet_protocol.data.positions import describe_positions
from fleet_protocol.errors import DataError, RefusalReason, RefusedError
from fleet_protocol.messages import Offer, Refuse, TierChoice


def begin_task(ctx: Context, offer: Offer) -> None:
    """Make an offer the current task, and post whether this board can train it."""
    problem: Refusal | None = None
    choices: tuple[TierChoice, ...] = ()
    now = time.monotonic()
    try:
        ctx.services.opened_sums.require_new(offer)
        choices = able_choices(offer, ctx.services.config, ctx.need_setup())
        _require_fitting_data(ctx, offer)  # before anything is fetched for it
        ctx.services.findings.compare_with(offer.contract)
        ctx.publish_status(with_state=False)  # sends the findings before the offer is accepted
    except (RefusedError, DataError) as error:
        choices = ()
        problem = refusal_of(error)
    if ctx.measurements.paused:
        choices = ()
        problem = (RefusalReason.BUSY, ctx.measurements.paused)
    measures_first = len(choices) > 1 and chooser_of(offer) is not None
    choice = choices[0] if choices else None
    if measures_first:
        choice = choice_to_measure(choices)
    record = StoredTask(
        phase="fetching",
        offer=offer,
        tier=(choice or offer.choices[0]).tier,
        chosen=not measures_first,
        deadline_unix=time.time() + offer.seconds_left,
    )
    ctx.hold(TaskInHand(record, deadline=now + offer.seconds_left, started=now))
    ctx.services.journal.follow(offer)
    if choice is None:
        ctx.failure = problem or _beyond_limits(ctx, offer)
        ctx.post(Event.UNSUITABLE)
        return
    taken = describe_positions(ctx.need_setup().data, offer.contract, own_labels=bool(offer.stays))
    note = f"; {taken}" if taken else ""
    ctx.services.journal.info(
        f"offer {offer.routine} tier={choice.tier} seconds_left={offer.seconds_left:g}{note}"
    )
    ctx.post(Event.OFFERED)


def _require_fitting_data(ctx: Context, offer: Offer) -> None:
    """Convert the samples to the form of an offer's contract.

    If they do not fit, their files are read again: the operator may have corrected them.

    Raises:
        DataError: they do not fit.
    """
    setup = ctx.need_setup()
    try:
        ctx.services.agreement.apply(setup.data, offer)
    except DataError:
        ctx.setup = ctx.services.samples.refresh(setup)
        if ctx.setup is setup:
            raise
        ctx.services.agreement.apply(ctx.setup.data, offer)


def _beyond_limits(ctx: Context, offer: Offer) -> Refusal:
    config = ctx.services.config
    offered = ", ".join(choice.tier for choice in offer.choices)
    limit = f"width {config.max_width:g}, depth {config.max_depth or 'any'}"
    detail = f"offered {offered}; this board is limited to {limit}"
    return RefusalReason.UNSUPPORTED, detail


def receive_offer(ctx: Context, offer: Offer) -> None:
    """Handle an offer of a task other than the current one: it is new, late, or a repetition."""
    task = ctx.task
    outcome = _outcome_of(ctx, offer)
    if outcome is not None and _is_settled(ctx, outcome):
        _answer_old_offer(ctx, offer, outcome)
    elif task is None:
        while outcome is not None and outcome in ctx.outcomes:
            ctx.outcomes.remove(outcome)
        begin_task(ctx, offer)
    elif task.offer.run == offer.run and offer.round < task.offer.round:
        ctx.services.journal.info(f"ignored an offer of the earlier round {offer.round}")
    else:
        # A server has one task for a device at a time, so it no longer wants the current one.
        ctx.services.journal.info(f"task {offer.task} replaces the current task")
        ctx.pending_offer = offer
        ctx.post(Event.SUPERSEDED)


def _outcome_of(ctx: Context, offer: Offer) -> TaskOutcome | None:
    """Return how the task of an offer last ended on this board; None if it is new."""
    for outcome in reversed(ctx.outcomes):
        if outcome.task == offer.task:
            return outcome
    return None


def _is_settled(ctx: Context, outcome: TaskOutcome) -> bool:
    """Return whether a task that ended on this board stays ended when it is offered again.

    An expired task is begun again. So is a task that ended without a refusal and is offered for the
    second time while the board is idle: the server then resumes from a backup.
    """
    if outcome.event is Event.EXPIRED:
        return False
    if outcome.refusal is not None or ctx.task is not None:
        return True
    return ctx.outcomes.count(outcome) == 1


def _answer_old_offer(ctx: Context, offer: Offer, outcome: TaskOutcome) -> None:
    """Repeat a refusal, because the broker has delivered the offer again."""
    ctx.services.journal.info(
        f"ignored the offer of task {offer.task}, which has ended on this board "
        f"({outcome.event.value})"
    )
    ctx.outcomes.append(outcome)  # counts the offers of this task
    if outcome.refusal is None or ctx.uplink.link is None:
        return
    reason, detail = outcome.refusal
    ctx.uplink.send(offer, Refuse, reason=reason, detail=detail)
