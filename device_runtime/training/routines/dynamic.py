"""The routine ``dynamic`` of FedDyn: training with a pull that remembers the rounds before.

The method and its paper are in `broker_server.strategies.feddyn`, and specification 9 has the
steps. A device trains around the weights that the server sent, moved by its memory: the sum of what
it was pulled back in all its rounds. It keeps the memory for each tier, in files between rounds,
and no update contains it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from device_runtime.training.epochs import TrainResult, train
from device_runtime.training.hooks import Hooks
from device_runtime.training.routines.routine import NoSettings, Result, Routine
from device_runtime.training.routines.train import (
    evaluate_trained,
    graphs_of_training,
    keep_states,
    kept_states,
    open_with_weights,
    train_where_fastest,
)
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.errors import RefusalReason, RefusedError

NAME = "dynamic"
FILES = "dynamic"
"""Prefix of the files in which a board keeps its memory."""

Tensors = dict[str, NDArray[Any]]


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    setup = replace(setup, data=setup.data.fit_to(task.manifest))
    # The whole training is one unit: if an accelerator fails, all of it is repeated.
    tensors, result = train_where_fastest(task, setup, hooks, _train)
    evaluation = evaluate_trained(task, setup, tensors, hooks)
    return Result(tensors, result.steps, result.seconds, result.loss, result.mean_loss, evaluation)


def _train(task: Task, setup: DeviceSetup, hooks: Hooks) -> tuple[Tensors, TrainResult]:
    """Train around the moved weights, and keep the memory of this round."""
    session = open_with_weights(task, setup, hooks)
    parameters = session.parameters()
    sent: Tensors = {}
    for spec in task.manifest.trained:
        # Copies, because the next step writes over the session's.
        sent[spec.name] = parameters[spec.name].copy()
    files = setup.files(FILES)
    kept = files.load_tiers(task.run, task.round)
    memory = kept.get(task.tier)
    if memory is not None:
        _check(memory, sent, task)
        session.move_anchor(memory)
    states = kept_states(task, setup)
    session.load_states(states.get(task.tier, {}))
    result = train(session, task.manifest, task.schedule(setup), hooks)
    keep_states(task, setup, states | {task.tier: session.states()})
    trained = session.parameters()
    kept[task.tier] = next_memory(memory, sent, trained)
    files.save_tiers(task.run, task.round, kept)
    return trained, result


def next_memory(
    memory: Mapping[str, NDArray[Any]] | None,
    sent: Mapping[str, NDArray[Any]],
    trained: Mapping[str, NDArray[Any]],
) -> Tensors:
    """Return the memory after a round: what it was, minus the change of this round.

    Args:
        memory: the memory of the round before; None before the first.
        sent: trained parameters as they were sent, by name.
        trained: parameters after training, among them these.
    """
    after: Tensors = {}
    for name, before in sent.items():
        change = trained[name] - before
        after[name] = -change if memory is None else memory[name] - change
    return after


def _check(memory: Mapping[str, NDArray[Any]], sent: Tensors, task: Task) -> None:
    """Refuse a memory that belongs to another model.

    Raises:
        RefusedError: a parameter is missing there, or has another shape.
    """
    for name, value in sent.items():
        remembered = memory.get(name)
        if remembered is None or remembered.shape != value.shape:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"what this board remembers for {task.tier} has no {name} of shape "
                f"{list(value.shape)}: the artifacts of {task.manifest.arch} changed during the "
                "run; start a new run",
            )


ROUTINE = Routine(
    name=NAME,
    phase="training",
    settings=NoSettings,
    graphs=graphs_of_training,
    run=_run,
)
