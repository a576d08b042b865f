"""The routine ``private``: a board trains the sent sub-model, and keeps a part of it for itself.

Parts that stay on the board (FedPer, FedRep, FedBN), or a copy of the whole model that is pulled
towards the weights of the fleet (Ditto); the papers are cited in
`broker_server.strategies.private_parts`, and specification 6 has the steps. A board keeps its
private values for each width and depth, in files between rounds, and no update contains them. If
the units of a width move, it keeps them by their positions in the whole model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from device_runtime.training.backends import TrainSession
from device_runtime.training.epochs import TrainResult, train
from device_runtime.training.hooks import Hooks
from device_runtime.training.kept_units import keep_at, values_at
from device_runtime.training.own_model_files import sub_model_of
from device_runtime.training.own_settings import read_settings
from device_runtime.training.routines.routine import Result, Routine
from device_runtime.training.routines.train import (
    evaluate_trained,
    graphs_of_training,
    keep_states,
    kept_states,
    open_with_weights,
    train_where_fastest,
)
from device_runtime.training.schedule import TrainingSchedule
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.units import Positions, read_units

NAME = "private"
FILES = "private"
"""Prefix of the files in which a board keeps what is its own."""

Tensors = dict[str, NDArray[Any]]


class PrivateSettings(FrozenModel):
    """A board's private parts, and how it trains them.

    Attributes:
        private_epochs: passes in which only the parts that stay are trained, before the others;
            None trains all parameters together.
        copy_model: keep a copy of the whole model, and train it after the update.
        mu: strength of the pull of this copy towards the weights that were sent.
        adapt_epochs: passes over the samples before the evaluation, of which nothing is kept or
            sent; None for none.
        compare: whether the board also evaluates the model of the fleet without what is its own.
    """

    private_epochs: int | None = Field(default=None, ge=1, le=10_000)
    copy_model: bool = False
    mu: float = Field(default=0.0, ge=0)
    adapt_epochs: int | None = Field(default=None, ge=1, le=10_000)
    compare: bool = False


@dataclass(frozen=True)
class _TrainedModels:
    """The result of training.

    Attributes:
        sent: parameters of the update.
        own: the whole model that the board evaluates.
        fleet: the model without the board's own parts: trained parameters of the update, and the
            other parameters as received, if the board compares them.
        result: result of the training of the update.
    """

    sent: Tensors
    own: Tensors
    fleet: Tensors
    result: TrainResult


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    # Before anything is opened, so that wrong data is refused without a session.
    setup = replace(setup, data=setup.data.fit_to(task.manifest))
    settings = read_settings(PrivateSettings, task.instructions.settings, f"routine {NAME}")

    def train_on(task: Task, setup: DeviceSetup, hooks: Hooks) -> _TrainedModels:
        if settings.copy_model:
            return _train_with_copy(task, setup, hooks, settings)
        return _train_with_parts(task, setup, hooks, settings)

    # The whole training is one unit: if an accelerator fails, all of it is repeated.
    trained = train_where_fastest(task, setup, hooks, train_on)
    evaluation = evaluate_trained(task, setup, trained.own, hooks)
    shared_evaluation = None
    if settings.compare:
        shared_evaluation = evaluate_trained(task, setup, trained.fleet, hooks)
    result = trained.result
    return Result(
        trained.sent,
        result.steps,
        result.seconds,
        result.loss,
        result.mean_loss,
        evaluation,
        shared_evaluation,
    )


def _train_with_parts(
    task: Task, setup: DeviceSetup, hooks: Hooks, settings: PrivateSettings
) -> _TrainedModels:
    """Train the sent sub-model with the board's own values of the parts that stay."""
    session = open_with_weights(task, setup, hooks)
    stays: list[str] = []
    shared: list[str] = []
    for spec in task.manifest.parameters:
        own_names = stays if spec.name in task.instructions.stays else shared
        own_names.append(spec.name)
    sent_weights: Tensors = {}
    if settings.compare:
        sent_weights = _copies(session)
    files = setup.files(FILES)
    kept = files.load_tiers(task.run, task.round)
    # Before the optimizer's states, which belong to these values.
    sub_model = sub_model_of(task.tier)
    units = read_units(setup.blobs.path(task.weights.digest), task.manifest)
    _put_own(session, kept.get(sub_model), stays, task, units)
    schedule = task.schedule(setup)
    if settings.private_epochs is not None:
        # First the private parts against fixed shared ones, then the reverse (FedRep).
        session.hold(shared)
        train(session, task.manifest, _of_epochs(schedule, settings.private_epochs), hooks)
        # The optimizer begins the second phase as it would without the first.
        session.reset()
        session.hold(stays)
    states = kept_states(task, setup)
    session.load_states(states.get(task.tier, {}))
    result = train(session, task.manifest, schedule, hooks)
    keep_states(task, setup, states | {task.tier: session.states()})
    own = _copies(session)
    # A board that gets another width next time has values of other shapes there.
    kept[sub_model] = _to_keep(kept.get(sub_model), own, stays, units)
    files.save_tiers(task.run, task.round, kept)
    # The only place where an update is made: private parts cannot enter it.
    update = {name: own[name] for name in shared}
    judged = _adapted(task, session, schedule, settings, hooks)
    return _TrainedModels(update, judged or own, sent_weights | update, result)


def _train_with_copy(
    task: Task, setup: DeviceSetup, hooks: Hooks, settings: PrivateSettings
) -> _TrainedModels:
    """Train the update, then the board's own copy of the model, which the sent weights pull."""
    session = open_with_weights(task, setup, hooks)
    sent_weights = _copies(session)
    states = kept_states(task, setup)
    session.load_states(states.get(task.tier, {}))
    schedule = task.schedule(setup)
    result = train(session, task.manifest, schedule, hooks)
    keep_states(task, setup, states | {task.tier: session.states()})
    update = _copies(session)
    files = setup.files(FILES)
    kept = files.load_tiers(task.run, task.round)
    # The pull is towards the weights of the fleet, and not towards the update that was just
    # trained.
    session.load(sent_weights, settings.mu)
    sub_model = sub_model_of(task.tier)
    units = read_units(setup.blobs.path(task.weights.digest), task.manifest)
    _put_own(session, kept.get(sub_model), list(sent_weights), task, units)
    train(session, task.manifest, schedule, hooks)
    own = _copies(session)
    kept[sub_model] = _to_keep(kept.get(sub_model), own, list(own), units)
    files.save_tiers(task.run, task.round, kept)
    judged = _adapted(task, session, schedule, settings, hooks)
    return _TrainedModels(update, judged or own, update, result)


def _adapted(
    task: Task,
    session: TrainSession,
    schedule: TrainingSchedule,
    settings: PrivateSettings,
    hooks: Hooks,
) -> Tensors | None:
    """Train the board's own model further for its evaluation; None without such passes."""
    if settings.adapt_epochs is None:
        return None
    # All parameters move, and the optimizer begins as in a round.
    session.reset()
    train(session, task.manifest, _of_epochs(schedule, settings.adapt_epochs), hooks)
    return _copies(session)


def _put_own(
    session: TrainSession,
    own: Mapping[str, NDArray[Any]] | None,
    names: Sequence[str],
    task: Task,
    units: Mapping[str, Positions],
) -> None:
    """Write what the board has kept into the session; in its first round the sent values stay.

    Raises:
        RefusedError: what was kept is of another model.
    """
    if own is None:
        return
    current = session.parameters()
    for name in names:
        value = own.get(name)
        if value is not None and name in units and value.ndim == current[name].ndim:
            value = values_at(value, units[name], current[name])
        if value is None or value.shape != current[name].shape:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"the private values of this board for {task.tier} have no {name} of shape "
                f"{list(current[name].shape)}: the artifacts of {task.manifest.arch} or "
                "private.parts changed during the run; start a new run",
            )
        np.copyto(current[name], value)


def _to_keep(
    before: Mapping[str, NDArray[Any]] | None,
    own: Tensors,
    names: Sequence[str],
    units: Mapping[str, Positions],
) -> Tensors:
    """Return what the board keeps of its own values after a round."""
    kept: Tensors = {}
    for name in names:
        if name in units:
            earlier = None if before is None else before.get(name)
            kept[name] = keep_at(earlier, units[name], own[name])
        else:
            kept[name] = own[name]
    return kept


def _copies(session: TrainSession) -> Tensors:
    """Return the parameters now; copies, because the next step writes over the session's."""
    return {name: value.copy() for name, value in session.parameters().items()}


def _of_epochs(schedule: TrainingSchedule, epochs: int) -> TrainingSchedule:
    settings = schedule.settings.model_copy(update={"epochs": epochs, "steps": None})
    return replace(schedule, settings=settings)


ROUTINE = Routine(
    name=NAME,
    phase="training",
    settings=PrivateSettings,
    graphs=graphs_of_training,
    run=_run,
)
