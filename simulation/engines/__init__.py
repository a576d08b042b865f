"""Engines that compute the tasks of a simulation: local processes, or a Ray cluster."""

from simulation.device_tables import EngineTable
from simulation.engines.local import LocalEngine
from simulation.orders import Engine, WorkerSetup


def open_engine(config: EngineTable, setup: WorkerSetup) -> Engine:
    """Start the configured engine.

    Raises:
        ConfigError: ray is not installed.
        TransportError: the Ray cluster cannot be reached.
    """
    if config.kind == "ray":
        from simulation.engines.ray import RayEngine  # noqa: PLC0415  (an extra)

        return RayEngine(config, setup)
    return LocalEngine(config.workers, setup)
