"""Runs the tasks of virtual devices in a worker, with the code of boards.

A virtual device is a number with samples. Its task goes through
`device_runtime.training.compute.compute`, as on a board. Only the sessions are reused between
tasks, one per tier, because one process represents many boards. With the torch backend
`simulation.torch_backend.trainer` trains, and everything else stays the same.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from device_runtime.board import installed_backends
from device_runtime.training.backends import ForwardSession, LowerGraph, Sessions, TrainSession
from device_runtime.training.compute import compute
from device_runtime.training.hooks import Hooks, SelfTested
from device_runtime.training.own_model import OwnModel
from device_runtime.training.routines import Result
from device_runtime.training.task import DeviceSetup, Task, base_tensors
from device_runtime.training.update import finish
from device_runtime.training.weights_file import read_weights
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import matches
from fleet_protocol.errors import BlobError, RefusedError, ShoalError
from fleet_protocol.foreign_files import read_within
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.memory_plans import PLAN_FILES
from fleet_protocol.noise import seeded
from simulation.data.held import VirtualData
from simulation.orders import DeviceTask, Failed, Finished, WorkerSetup, WorkOrder

if TYPE_CHECKING:
    from simulation.torch_backend.trainer import TorchTrainer


class _SharedBlobs(BlobStore):
    """The blobs of a simulation.

    Args:
        updates: folder of updates, to which this process adds.
        read_only: folders that other processes write, whose blobs are read in place.
    """

    def __init__(self, updates: Path, read_only: Sequence[Path]) -> None:
        super().__init__(updates, durable=False)
        self._read_only = tuple(BlobStore(folder, durable=False) for folder in read_only)

    def path(self, digest: str) -> Path:
        for store in self._read_only:
            path = store.path(digest)
            if path.is_file():
                return path
        return super().path(digest)


class _KeptSessions(Sessions):
    """Open sessions, one per graph."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self._train: dict[Path, TrainSession] = {}
        self._forward: dict[Path, ForwardSession] = {}

    def train(
        self,
        manifest: Manifest,
        graph: Path,
        base: Mapping[str, NDArray[Any]],
        lower: LowerGraph | None = None,
    ) -> TrainSession:
        if graph not in self._train:
            self._train[graph] = super().train(manifest, graph, base, lower)
        return self._train[graph]

    def forward(
        self, manifest: Manifest, graph: Path, parameters: Mapping[str, NDArray[Any]]
    ) -> ForwardSession:
        # A session holds its parameters, so each use of a kept one loads those of the device.
        if graph not in self._forward:
            self._forward[graph] = super().forward(manifest, graph, parameters)
        self._forward[graph].load(parameters)
        return self._forward[graph]


class VirtualDevices:
    """The virtual devices of one worker.

    Raises:
        DataError: the samples cannot be read.
        StorageError: the folder of updates cannot be made.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._data = VirtualData(setup.data, setup.split, setup.augment, setup.tasks)
        self._blobs = _SharedBlobs(setup.updates, [setup.artifacts, setup.blobs])
        self._sessions = _KeptSessions()
        self._manifests: dict[str, Manifest] = {}
        self._trainers: dict[str, TorchTrainer] = {}
        runtime = installed_backends().get("onnx", "")
        # The exporter has just checked the graphs on this machine, so devices need not test them
        # again.
        self._tested = frozenset({f"onnx/train {runtime}"})

    def work(self, order: WorkOrder) -> list[Finished | Failed]:
        """Run the tasks of an order, and return a result for each.

        An error of a task affects only that task.
        """
        first = order.tasks[0]
        # Only this routine has a program for many devices; others run graph by graph, with equal
        # results.
        if self._setup.backend == "torch" and first.instructions.routine == "train":
            return self._train_with_torch(order.tasks)
        # One after another: a worker is one process with one thread.
        return [self._compute(task) for task in order.tasks]

    def _manifest(self, task: DeviceTask) -> Manifest:
        """Return the manifest of a task's tier, or of a plan; it must not have changed on disk."""
        digest = task.artifact_set.digest
        if digest not in self._manifests:
            folder = self._setup.artifacts / self._setup.arch
            self._manifests[digest] = parse_manifest(_manifest_data(folder, task.tier, digest))
        return self._manifests[digest]

    def _device_setup(self, task: DeviceTask) -> DeviceSetup:
        """Return a device's inputs of a task."""
        own_model = None
        if self._setup.pairs:
            folder = self._setup.devices / task.device
            folder.mkdir(parents=True, exist_ok=True)
            # Dealt in turn, so that the pair of a device is the same in every round and every
            # process.
            pair = self._setup.pairs[task.index % len(self._setup.pairs)]
            own_model = OwnModel(pair, folder)
        if self._setup.own_test:
            data, split = self._data.with_test(task.index)
        else:
            data = self._data.samples_of(task.index)
            split = None
        return DeviceSetup(
            data=data,
            parts=split,
            blobs=self._blobs,
            backend="onnx",
            threads=1,
            holdout=self._setup.holdout,
            own_model=own_model,
            sessions=self._sessions,
            folder=self._setup.devices / task.device,
            # Derived from device and round, because the worker and the time of a task must not
            # change its bits.
            noise=seeded(f"{task.instructions.train.seed}/{task.device}/{task.round}"),
        )

    def _compute(self, task: DeviceTask) -> Finished | Failed:
        """Run one task like a board."""
        try:
            manifest = self._manifest(task)
            outcome = compute(
                _as_received(task, manifest, self._tested),
                self._device_setup(task),
                Hooks(report=self._note_self_test),
            )
        except ShoalError as error:
            return _failed(task, error)
        return Finished(task=task.id, update=outcome.update, metrics=outcome.metrics)

    def _note_self_test(self, report: object) -> None:
        """Remember a graph that was tested, so that it is not tested again."""
        if isinstance(report, SelfTested):
            self._tested |= {report.name}

    def _trainer(self, task: DeviceTask, manifest: Manifest) -> "TorchTrainer":
        """Return the trainer of a tier, which is made once."""
        if task.tier not in self._trainers:
            from models.registry import Registry  # noqa: PLC0415
            from simulation.torch_backend.trainer import TorchTrainer  # noqa: PLC0415

            registry = Registry.zoo()
            if self._setup.models is not None:
                registry = registry.with_file(self._setup.models)
            self._trainers[task.tier] = TorchTrainer(
                registry.get(self._setup.arch),
                json.loads(self._setup.settings),
                manifest,
                device=self._setup.device,
                own=registry.own,
                base=base_tensors(manifest, self._device_setup(task).blobs),
            )
        return self._trainers[task.tier]

    def _train_with_torch(self, tasks: Sequence[DeviceTask]) -> list[Finished | Failed]:
        """Train several devices of one tier by the torch backend."""
        from simulation.torch_backend.batches import TorchJob  # noqa: PLC0415  (torch)

        try:
            manifest = self._manifest(tasks[0])
            trainer = self._trainer(tasks[0], manifest)
            setups = [self._device_setup(task) for task in tasks]
            jobs = []
            for task, setup in zip(tasks, setups, strict=True):
                weights = read_weights(self._blobs.path(task.weights.digest), manifest)
                jobs.append(
                    TorchJob(weights, _as_received(task, manifest, self._tested).schedule(setup))
                )
            started = time.monotonic()
            results = trainer.train(jobs)
        # Before or during the training of all: nobody knows whose task it was.
        except ShoalError as error:
            return [_failed(task, error) for task in tasks]
        seconds = (time.monotonic() - started) / len(tasks)
        answers: list[Finished | Failed] = []
        for task, setup, result in zip(tasks, setups, results, strict=True):
            if isinstance(result, ShoalError):
                answers.append(_failed(task, result))
                continue
            # All devices trained at the same time, so each took an equal share of it.
            figures = result.result
            trained = Result(
                result.tensors, figures.steps, seconds, figures.loss, figures.mean_loss
            )
            outcome = finish(_as_received(task, manifest, self._tested), setup, trained)
            answers.append(Finished(task=task.id, update=outcome.update, metrics=outcome.metrics))
        return answers


def _manifest_data(folder: Path, tier: str, digest: str) -> bytes:
    """Return the manifest of a tier, or of one of its plans, that has a digest.

    Raises:
        BlobError: none has it.
    """
    plans = sorted(path.name for path in (folder / tier).glob(PLAN_FILES))
    for name in ("manifest.json", *plans):
        data = read_within(folder, f"{tier}/{name}")
        if matches(data, digest):
            return data
    # Orders name sets by digest: a set that was exported again in between has other graphs.
    raise BlobError(f"the manifest of {tier} in {folder} has changed; start the simulation again")


def _as_received(task: DeviceTask, manifest: Manifest, tested: frozenset[str]) -> Task:
    """Return a task in the form that a board receives."""
    return Task(
        run=task.run,
        round=task.round,
        id=task.id,
        version=task.version,
        tier=task.tier,
        instructions=task.instructions,
        manifest=manifest,
        weights=task.weights,
        tested=tested,
    )


def _failed(task: DeviceTask, error: ShoalError) -> Failed:
    """Return an error as the result of a task."""
    reason = error.reason.value if isinstance(error, RefusedError) else ""
    return Failed(task=task.id, reason=reason, detail=str(error), exit_code=error.exit_code)
