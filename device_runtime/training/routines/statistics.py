"""The routine ``statistics``: one forward pass that measures the batch norms of the sent model.

See specification 1.6.
"""

import time
from dataclasses import replace

from device_runtime.training.hooks import Hooks
from device_runtime.training.measuring import STATS, measure
from device_runtime.training.routines.routine import (
    NoSettings,
    Result,
    Routine,
    missing_graph,
)
from device_runtime.training.task import DeviceSetup, Task, base_tensors
from device_runtime.training.weights_file import read_weights
from fleet_protocol.manifest import Manifest


def _graphs(manifest: Manifest, _bench: DeviceSetup) -> tuple[str, ...]:
    if STATS not in manifest.graphs:
        raise missing_graph(manifest, "statistics")
    return (STATS,)


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    manifest = task.manifest
    setup = replace(setup, data=setup.data.fit_to(manifest))
    started = time.monotonic()
    parameters = {
        **base_tensors(manifest, setup.blobs),
        **read_weights(setup.blobs.path(task.weights.digest), manifest),
    }
    session = setup.opening.forward(
        manifest, setup.blobs.path(manifest.graphs[STATS].digest), parameters
    )
    tensors, count = measure(session, manifest, task.schedule(setup), hooks)
    return Result(tensors, count, time.monotonic() - started)


ROUTINE = Routine(
    name="statistics",
    phase="measuring",
    settings=NoSettings,
    graphs=_graphs,
    run=_run,
)
