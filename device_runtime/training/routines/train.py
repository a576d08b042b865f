"""The routine ``train``: epochs of the sent sub-model on the board's samples, then its accuracy on
held-out ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from device_runtime.board import installed_backends
from device_runtime.training.accelerators import Trial
from device_runtime.training.backends import (
    ForwardSession,
    Sessions,
    TrainSession,
    step_graph_key,
)
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.epochs import TrainResult, self_test, train
from device_runtime.training.hooks import Hooks, SelfTested, Settled, TaskStopped
from device_runtime.training.labels import label_mask, present_labels
from device_runtime.training.measuring import EVAL, STATS, HeldOut, judge
from device_runtime.training.routines.routine import (
    NoSettings,
    Result,
    Routine,
    missing_graph,
)
from device_runtime.training.task import DeviceSetup, Task, base_tensors
from device_runtime.training.weights_file import read_weights
from fleet_protocol.errors import RefusedError, ShoalError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Evaluation

Tensors = dict[str, NDArray[Any]]


def _graphs(manifest: Manifest, setup: DeviceSetup) -> tuple[str, ...]:
    wanted = [_step_key(manifest, setup)]
    _, held_out = setup.split()
    if len(held_out) and EVAL in manifest.graphs:
        wanted += [EVAL, *([STATS] if manifest.statistics else [])]
    if not set(wanted) <= manifest.graphs.keys():
        raise missing_graph(manifest, f"backend {setup.backend}")
    return tuple(wanted)


def _step_key(manifest: Manifest, setup: DeviceSetup) -> str:
    key = step_graph_key(setup.backend, manifest)
    if key is None:
        raise missing_graph(manifest, f"backend {setup.backend}")
    return key


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    setup = replace(setup, data=setup.data.fit_to(task.manifest))
    tensors, result = _accelerated(task, setup, hooks)
    evaluation = _evaluate(task, setup, tensors, hooks)
    return Result(tensors, result.steps, result.seconds, result.loss, result.mean_loss, evaluation)


def _accelerated(task: Task, setup: DeviceSetup, hooks: Hooks) -> tuple[Tensors, TrainResult]:
    """Train on the accelerator that the board's trials settle on.

    Where it fails, once more on the CPU.
    """
    if setup.accelerators is None:
        return _train(task, setup, hooks)
    key = _step_key(task.manifest, setup)
    asked = task.instructions.train
    graph = f"{task.manifest.graphs[key].digest} {installed_backends()[setup.backend]}"
    batch = min(asked.micro_batch or asked.batch_size, setup.examples)

    def on(provider: str) -> DeviceSetup:
        return replace(setup, sessions=Sessions(setup.threads, provider))

    settled = setup.accelerators.settle(
        graph, task.manifest, batch, lambda name: _opened(task, on(name), key), hooks
    )
    hooks.report(settled)
    try:
        return _train(task, on(settled.provider), hooks)
    except Exception as error:
        foreign = isinstance(error, RefusedError) or not isinstance(error, ShoalError | TaskStopped)
        if settled.provider == CPU or not foreign:
            raise
        why = f"{settled.provider} failed in a task: {type(error).__name__}: {error}"[:500]
    hooks.report(Settled(CPU, why))
    done = _train(task, setup, hooks)
    setup.accelerators.note(
        f"{graph} {settled.provider}", Trial(fault=why)
    )  # what the CPU can do was its fault
    return done


def _opened(task: Task, setup: DeviceSetup, key: str) -> TrainSession:
    path = setup.blobs.path(task.manifest.graphs[key].digest)
    return setup.opening.train(task.manifest, path, base_tensors(task.manifest, setup.blobs))


def _train(task: Task, setup: DeviceSetup, hooks: Hooks) -> tuple[Tensors, TrainResult]:
    """Train; returns the parameters and what training said, after its session is gone."""
    manifest = task.manifest
    key = _step_key(manifest, setup)
    session = _opened(task, setup, key)
    name = f"{key} {installed_backends()[setup.backend]}"
    if name not in task.tested:
        self_test(session, manifest)
        hooks.report(SelfTested(name))
    read_weights(setup.blobs.path(task.weights.digest), manifest, into=session.reset())
    session.anchor(task.instructions.train.proximal_mu)
    session.take_pieces(task.instructions.train.micro_batch)
    kept = _kept_states(task, setup)
    session.load_states(kept.get(task.tier, {}))
    result = train(session, manifest, task.schedule(setup), hooks)
    _keep_states(task, setup, kept | {task.tier: session.states()})
    return session.parameters(), result


def _kept_states(task: Task, setup: DeviceSetup) -> dict[str, Tensors]:
    """What optimizers of former rounds left, by tier; nothing unless the run wants them kept."""
    if task.instructions.train.optimizer_state == "reset" or not task.manifest.states:
        return {}
    return setup.files("optimizer").load_tiers(task.run, task.round)


def _keep_states(task: Task, setup: DeviceSetup, states: Mapping[str, Tensors]) -> None:
    if task.instructions.train.optimizer_state == "keep" and task.manifest.states:
        setup.files("optimizer").save_tiers(task.run, task.round, states)


def _evaluate(
    task: Task, setup: DeviceSetup, parameters: Tensors, hooks: Hooks
) -> Evaluation | None:
    manifest = task.manifest
    settings = task.instructions.train
    chosen, held_out = setup.split()

    def opened(key: str) -> ForwardSession:
        graph = setup.blobs.path(manifest.graphs[key].digest)
        return setup.opening.forward(
            manifest, graph, {**base_tensors(manifest, setup.blobs), **parameters}
        )

    mask = label_mask(
        present_labels(setup.data.y[chosen], manifest.classes),
        manifest.classes,
        masked=settings.mask_labels,
    )
    judged = HeldOut(setup.data, held_out, settings.batch_size, mask)
    return judge(opened, manifest, task.schedule(setup), judged, hooks)


ROUTINE = Routine(name="train", phase="training", settings=NoSettings, graphs=_graphs, run=_run)
