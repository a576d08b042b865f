"""Writes the rounds of a run to TensorBoard, MLflow, OpenTelemetry or Home Assistant."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from broker_server.store import Store, queries
from fleet_protocol.errors import ConfigError
from shoal.tracking.home_assistant import HomeAssistant
from shoal.tracking.mlflow_runs import MlflowRuns
from shoal.tracking.tensorboard import TensorBoard
from shoal.tracking.traces import Traces
from shoal.tracking.writer import Writer, values_of

__all__ = ["HomeAssistant", "Writer", "open_writer", "track", "values_of"]

_WRITERS: Mapping[str, Callable[[str], Writer]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "mlflow": MlflowRuns,
        "otlp": Traces,
        "homeassistant": HomeAssistant,
    }
)
_EXAMPLES = (
    "tensorboard:FOLDER, mlflow:http://HOST:5000, otlp:http://HOST:4318, homeassistant:mqtt://HOST"
)


def open_writer(target: str) -> Writer:
    """Return the writer of a target.

    Args:
        target: ``tensorboard:FOLDER``, ``mlflow:ADDRESS`` of a tracking server, ``otlp:ADDRESS`` of
            a collector of traces, or ``homeassistant:ADDRESS`` of its broker.

    Raises:
        ConfigError: the target has another form.
        ModuleNotFoundError: the package for the target is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in _WRITERS or not place:
        raise ConfigError(f"{target!r} is not a target; give one of {_EXAMPLES}")
    return _WRITERS[kind](place)


def track(
    opened: Store,
    run: str | None,
    writer: Writer,
    changes: Callable[[], Iterator[object]],
) -> int:
    """Write the rounds of a run that have ended, after each change of the store.

    Args:
        opened: the store.
        run: id of the run; None for the newest run at each change.
        writer: where to write.
        changes: yields whenever to read the store, the first time at once.

    Returns:
        The number of rounds that were written.

    Raises:
        ConfigError: there is no such run.
        StorageError: the target does not accept them.
    """
    written = 0
    for _ in changes():
        written += writer.update(opened, queries.find_run(opened, run))
    # The status is read again, because the run may have ended since the last change.
    writer.end(queries.find_run(opened, run).status)
    return written
