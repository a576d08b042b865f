"""Writes a run to a tracking server of MLflow."""

import os
from collections.abc import Callable
from typing import Any

from broker_server.store import RunRecord, queries
from broker_server.store.rows import config_json
from fleet_protocol.errors import StorageError
from fleet_protocol.spelling import without_login
from shoal.tracking.writer import RoundWriter, values_of

_ROUND_TAG = "shoal.round"
_RUN_TAG = "shoal.run"
_END_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

# Limits of MLflow's REST API.
_PARAM_LETTERS = 500
_PARAMS_AT_ONCE = 100


class MlflowRuns(RoundWriter):
    """A run of an experiment with the fleet's name; it resumes after the last written round."""

    def __init__(self, address: str) -> None:
        # Without this, MLflow retries an unreachable address for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        # Without this, MLflow prints an address into the JSON output of a command.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient  # noqa: PLC0415  (an extra)

        self._address = address
        self._client = self._call(MlflowClient, tracking_uri=address)

    def begin(self, run: RunRecord) -> int:
        """Find the run on the server, or create it with its settings."""
        experiment = self._experiment(f"shoal/{run.fleet}")
        # MLflow gives its runs its own ids, so the tag finds the one of this run.
        query = f"tags.`{_RUN_TAG}` = '{run.id}'"
        runs = self._call(self._client.search_runs, [experiment], query)
        if runs:
            self._run = runs[0].info.run_id
            # Rounds that an earlier command has written are not written again.
            return int(runs[0].data.tags.get(_ROUND_TAG, "0")) + 1
        tags = {_RUN_TAG: run.id, "model": run.arch}
        created_ms = int(run.created_at * 1000)
        shown_name = run.name or run.id
        created = self._call(self._client.create_run, experiment, created_ms, tags, shown_name)
        self._run = created.info.run_id
        self._write_settings(run)
        return 1

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if there is none."""
        experiment = self._call(self._client.get_experiment_by_name, name)
        if experiment:
            return str(experiment.experiment_id)
        return str(self._call(self._client.create_experiment, name))

    def _write_settings(self, run: RunRecord) -> None:
        """Write the settings of a run as parameters."""
        from mlflow.entities import Param  # noqa: PLC0415

        params = []
        for key, value in queries.flat_settings(config_json(run)):
            params.append(Param(key, str(value)[:_PARAM_LETTERS]))
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            batch = params[start : start + _PARAMS_AT_ONCE]
            self._call(self._client.log_batch, self._run, params=batch)

    def write(self, view: queries.RoundView) -> None:
        """Write the values of a round, and mark the round as written."""
        from mlflow.entities import Metric, RunTag  # noqa: PLC0415

        number = view.round.number
        ended_ms = int((view.round.ended_at or 0) * 1000)
        metrics = [Metric(name, value, ended_ms, number) for name, value in values_of(view)]
        # In one request, so that a round with values is always marked as written.
        tags = [RunTag(_ROUND_TAG, str(number))]
        self._call(self._client.log_batch, self._run, metrics, tags=tags)

    def end(self, status: str) -> None:
        """End the run on the server as well, unless it is in progress."""
        if status in _END_STATUS:
            ended_ms = int(self._ended_at * 1000) if self._ended_at else None
            self._call(self._client.set_terminated, self._run, _END_STATUS[status], ended_ms)

    def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call a function of MLflow, and raise its errors as StorageErrors."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            return function(*values, **named)
        except MlflowException as error:
            raise StorageError(
                without_login(f"MLflow at {self._address} did not accept the values: {error}")
            ) from error
