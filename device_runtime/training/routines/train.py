"""The routine ``train``: epochs of the sent sub-model on the board's samples.

Then it evaluates it on held-out samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from numpy.typing import NDArray

from device_runtime.board import installed_backends
from device_runtime.training.accelerators import Accelerators, Trial
from device_runtime.training.backends import (
    ForwardSession,
    LowerGraph,
    Sessions,
    TrainSession,
    step_graph_key,
    step_in_parts,
)
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.epochs import TrainResult, self_test, train
from device_runtime.training.hooks import ChosenProvider, Hooks, SelfTested, TaskStopped
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
from fleet_protocol.graph_parts import ABOVE, BELOW
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Evaluation

Tensors = dict[str, NDArray[Any]]
T = TypeVar("T")


def graphs_of_training(manifest: Manifest, setup: DeviceSetup) -> tuple[str, ...]:
    """Return the graphs that a board needs to train on its samples, and to judge the result."""
    # Only these are fetched, so a board that holds nothing out loads no eval graph.
    graphs = list(_step_keys(manifest, setup))
    _training, held_out = setup.split()
    if len(held_out) and EVAL in manifest.graphs:
        graphs.append(EVAL)
        if manifest.statistics:
            graphs.append(STATS)
    if not set(graphs) <= manifest.graphs.keys():
        raise missing_graph(manifest, f"backend {setup.backend}")
    return tuple(graphs)


def _step_keys(manifest: Manifest, setup: DeviceSetup) -> tuple[str, ...]:
    """Return the graphs of a training step; the first changes the parameters."""
    if setup.kept_outputs is not None and step_in_parts(setup.backend, manifest):
        return (ABOVE, BELOW)
    key = step_graph_key(setup.backend, manifest)
    if key is None:
        raise missing_graph(manifest, f"backend {setup.backend}")
    return (key,)


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    setup = replace(setup, data=setup.data.fit_to(task.manifest))
    tensors, result = train_where_fastest(task, setup, hooks, _train)
    evaluation = evaluate_trained(task, setup, tensors, hooks)
    return Result(tensors, result.steps, result.seconds, result.loss, result.mean_loss, evaluation)


def train_where_fastest(
    task: Task, setup: DeviceSetup, hooks: Hooks, train_on: Callable[[Task, DeviceSetup, Hooks], T]
) -> T:
    """Train on the accelerator that the board's trials settle on, or on the CPU.

    Args:
        task: what is trained.
        setup: setup of the board.
        hooks: receive what the board settles on.
        train_on: trains with the sessions of a setup; it is called again, on the CPU, where the
            accelerator fails.
    """
    if setup.accelerators is None:
        return train_on(task, setup, hooks)
    return _train_accelerated(task, setup, setup.accelerators, hooks, train_on)


def _train_accelerated(
    task: Task,
    setup: DeviceSetup,
    accelerators: Accelerators,
    hooks: Hooks,
    train_on: Callable[[Task, DeviceSetup, Hooks], T],
) -> T:
    """Train on the accelerator that the board's trials chose or, if it fails, on the CPU."""
    # The graph that changes the parameters decides: the part below is only inference.
    key = _step_keys(task.manifest, setup)[0]
    settings = task.instructions.train
    # A trial is valid for one graph on one runtime: another version may compute otherwise.
    graph = f"{task.manifest.graphs[key].digest} {installed_backends()[setup.backend]}"
    batch = min(settings.micro_batch or settings.batch_size, setup.examples)
    settled = accelerators.settle(
        graph,
        task.manifest,
        batch,
        lambda provider: _open_step(task, _on_provider(setup, provider)),
        hooks,
    )
    hooks.report(settled)
    try:
        return train_on(task, _on_provider(setup, settled.provider), hooks)
    except Exception as error:
        if settled.provider == CPU or not _may_be_of_provider(error):
            raise
        why = f"{settled.provider} failed in a task: {type(error).__name__}: {error}"[:500]
    hooks.report(ChosenProvider(CPU, why))
    trained = train_on(task, setup, hooks)
    # Recorded only now: if the CPU could train, the fault was the provider's.
    accelerators.note(f"{graph} {settled.provider}", Trial(fault=why))
    return trained


def _on_provider(setup: DeviceSetup, provider: str) -> DeviceSetup:
    return replace(setup, sessions=Sessions(setup.threads, provider))


def _may_be_of_provider(error: Exception) -> bool:
    """Return whether a provider may have caused an error: non-finite numbers, or its class."""
    return isinstance(error, RefusedError) or not isinstance(error, ShoalError | TaskStopped)


def _open_step(task: Task, setup: DeviceSetup) -> TrainSession:
    manifest = task.manifest
    step, *below = _step_keys(manifest, setup)
    paths = [setup.blobs.path(manifest.graphs[key].digest) for key in (step, *below)]
    lower = None
    if below:
        outputs = setup.kept_outputs if setup.keeps_files else None
        lower = LowerGraph(paths[1], outputs, installed_backends()[setup.backend])
    return setup.opening.train(manifest, paths[0], base_tensors(manifest, setup.blobs), lower)


def _train(task: Task, setup: DeviceSetup, hooks: Hooks) -> tuple[Tensors, TrainResult]:
    """Train; return the parameters and the result once the session is closed."""
    session = open_with_weights(task, setup, hooks)
    kept = kept_states(task, setup)
    session.load_states(kept.get(task.tier, {}))
    result = train(session, task.manifest, task.schedule(setup), hooks)
    keep_states(task, setup, kept | {task.tier: session.states()})
    return session.parameters(), result


def open_with_weights(task: Task, setup: DeviceSetup, hooks: Hooks) -> TrainSession:
    """Open the step of a task, tested on this board, with the weights that the server sent."""
    manifest = task.manifest
    settings = task.instructions.train
    key = _step_keys(manifest, setup)[0]
    session = _open_step(task, setup)
    name = f"{key} {installed_backends()[setup.backend]}"
    # Before the weights are read: the test overwrites the parameters.
    if name not in task.tested:
        self_test(session, manifest)
        hooks.report(SelfTested(name))
    # Weights first: setting the anchor copies the present parameters.
    read_weights(setup.blobs.path(task.weights.digest), manifest, into=session.reset())
    session.anchor(settings.proximal_mu)
    session.split_batches(settings.micro_batch)
    # Also those that the task leaves out: a session may still have the numbers of a task before.
    session.turn_knobs(settings.knobs)
    return session


def kept_states(task: Task, setup: DeviceSetup) -> dict[str, Tensors]:
    """Return the optimizer states of earlier rounds by tier; empty unless the run keeps them."""
    if task.instructions.train.optimizer_state == "reset" or not task.manifest.states:
        return {}
    return setup.files("optimizer").load_tiers(task.run, task.round)


def keep_states(task: Task, setup: DeviceSetup, states: Mapping[str, Tensors]) -> None:
    """Keep what optimizers left, by tier, for the next round of a run that keeps it."""
    # Only at the end: a task that fails leaves the states of the round before.
    if task.instructions.train.optimizer_state == "keep" and task.manifest.states:
        setup.files("optimizer").save_tiers(task.run, task.round, states)


def evaluate_trained(
    task: Task, setup: DeviceSetup, parameters: Tensors, hooks: Hooks
) -> Evaluation | None:
    """Evaluate the trained model on held-out samples.

    Args:
        task: what was trained.
        setup: setup of the board.
        parameters: parameters of the model, by name.
        hooks: may stop it.

    Returns:
        None where the board holds no samples out, or their labels do not count.
    """
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
    graphs=graphs_of_training,
    run=_run,
)
