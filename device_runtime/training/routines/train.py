"""The routine ``train``: epochs of the sent sub-model on the board's samples.

Then it is judged on held-out ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from device_runtime.board import installed_backends
from device_runtime.training.accelerators import Accelerators, Trial
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
    graphs = [_step_key(manifest, setup)]
    _training, held_out = setup.split()
    if len(held_out) and EVAL in manifest.graphs:
        graphs.append(EVAL)
        if manifest.statistics:
            graphs.append(STATS)
    if not set(graphs) <= manifest.graphs.keys():
        raise missing_graph(manifest, f"backend {setup.backend}")
    return tuple(graphs)


def _step_key(manifest: Manifest, setup: DeviceSetup) -> str:
    key = step_graph_key(setup.backend, manifest)
    if key is None:
        raise missing_graph(manifest, f"backend {setup.backend}")
    return key


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    setup = replace(setup, data=setup.data.fit_to(task.manifest))
    if setup.accelerators is None:
        tensors, result = _train(task, setup, hooks)
    else:
        tensors, result = _train_accelerated(task, setup, setup.accelerators, hooks)
    evaluation = _evaluate(task, setup, tensors, hooks)
    return Result(tensors, result.steps, result.seconds, result.loss, result.mean_loss, evaluation)


def _train_accelerated(
    task: Task,
    setup: DeviceSetup,
    accelerators: Accelerators,
    hooks: Hooks,
) -> tuple[Tensors, TrainResult]:
    """Train on the accelerator that the board's trials settle on; where it fails, on the CPU."""
    key = _step_key(task.manifest, setup)
    settings = task.instructions.train
    # A trial counts for one graph on one runtime: another version may compute otherwise.
    graph = f"{task.manifest.graphs[key].digest} {installed_backends()[setup.backend]}"
    batch = min(settings.micro_batch or settings.batch_size, setup.examples)
    settled = accelerators.settle(
        graph,
        task.manifest,
        batch,
        lambda provider: _open_step(task, _on_provider(setup, provider), key),
        hooks,
    )
    hooks.report(settled)
    try:
        return _train(task, _on_provider(setup, settled.provider), hooks)
    except Exception as error:
        if settled.provider == CPU or not _may_be_of_provider(error):
            raise
        why = f"{settled.provider} failed in a task: {type(error).__name__}: {error}"[:500]
    hooks.report(Settled(CPU, why))
    trained = _train(task, setup, hooks)
    # Noted only now: what the CPU can do was the provider's fault.
    accelerators.note(f"{graph} {settled.provider}", Trial(fault=why))
    return trained


def _on_provider(setup: DeviceSetup, provider: str) -> DeviceSetup:
    return replace(setup, sessions=Sessions(setup.threads, provider))


def _may_be_of_provider(error: Exception) -> bool:
    """Return whether an error may be a provider's: numbers that are not finite, or its own kind."""
    return isinstance(error, RefusedError) or not isinstance(error, ShoalError | TaskStopped)


def _open_step(task: Task, setup: DeviceSetup, key: str) -> TrainSession:
    path = setup.blobs.path(task.manifest.graphs[key].digest)
    return setup.opening.train(task.manifest, path, base_tensors(task.manifest, setup.blobs))


def _train(task: Task, setup: DeviceSetup, hooks: Hooks) -> tuple[Tensors, TrainResult]:
    """Train; return the parameters and what training said, after its session is gone."""
    manifest = task.manifest
    settings = task.instructions.train
    key = _step_key(manifest, setup)
    session = _open_step(task, setup, key)
    name = f"{key} {installed_backends()[setup.backend]}"
    # Before the weights are read: the test overwrites the parameters.
    if name not in task.tested:
        self_test(session, manifest)
        hooks.report(SelfTested(name))
    # Weights first: the anchor is what the parameters are when it is set.
    read_weights(setup.blobs.path(task.weights.digest), manifest, into=session.reset())
    session.anchor(settings.proximal_mu)
    session.split_batches(settings.micro_batch)
    kept = _kept_states(task, setup)
    session.load_states(kept.get(task.tier, {}))
    result = train(session, manifest, task.schedule(setup), hooks)
    _keep_states(task, setup, kept | {task.tier: session.states()})
    return session.parameters(), result


def _kept_states(task: Task, setup: DeviceSetup) -> dict[str, Tensors]:
    """Return what optimizers of former rounds left, by tier; nothing unless the run keeps them."""
    if task.instructions.train.optimizer_state == "reset" or not task.manifest.states:
        return {}
    return setup.files("optimizer").load_tiers(task.run, task.round)


def _keep_states(task: Task, setup: DeviceSetup, states: Mapping[str, Tensors]) -> None:
    if task.instructions.train.optimizer_state == "keep" and task.manifest.states:
        setup.files("optimizer").save_tiers(task.run, task.round, states)


def _evaluate(
    task: Task, setup: DeviceSetup, parameters: Tensors, hooks: Hooks
) -> Evaluation | None:
    """Judge the trained model on held-out samples."""
    manifest = task.manifest
    settings = task.instructions.train
    training, held_out = setup.split()

    def open_graph(key: str) -> ForwardSession:
        graph = setup.blobs.path(manifest.graphs[key].digest)
        tensors = {**base_tensors(manifest, setup.blobs), **parameters}
        return setup.opening.forward(manifest, graph, tensors)

    labels = present_labels(setup.data.y[training], manifest.classes)
    mask = label_mask(labels, manifest.classes, masked=settings.mask_labels)
    samples = HeldOut(setup.data, held_out, settings.batch_size, mask)
    return judge(open_graph, manifest, task.schedule(setup), samples, hooks)


ROUTINE = Routine(
    name="train",
    phase="training",
    settings=NoSettings,
    graphs=_graphs,
    run=_run,
)
