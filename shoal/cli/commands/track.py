"""Write the rounds of a run to TensorBoard, MLflow, OpenTelemetry or Home Assistant.

Example: shoal track tensorboard:runs/board --watch
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from fleet_protocol.spelling import without_login
from shoal.cli.common import AsJson, RunId, StoreFolder, Watch
from shoal.cli.console import print_json, print_text
from shoal.extras import needs


def _track(
    target: Annotated[
        str,
        typer.Argument(
            help="Where to write: tensorboard:FOLDER, mlflow:http://HOST:5000,"
            " otlp:http://HOST:4318, or homeassistant:mqtt://USER:PASSWORD@HOST."
        ),
    ],
    store: StoreFolder,
    run: RunId = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store import Store, queries
        from shoal.cli.views.view import follow
        from shoal.sources import LocalStore
    with needs("tracking"):
        from shoal.tracking import open_writer, track

        # Before the store is opened, so that a wrong target fails at once.
        writer = open_writer(target)
    with closing(Store(store, read_only=True)) as opened:
        run_id = queries.find_run(opened, run).id
        # Home Assistant shows the newest run, including one that begins later.
        tracked = run if target.startswith("homeassistant:") else run_id

        def changes() -> Iterator[None]:
            """Yield whenever the store has to be read: now, and with --watch after each change."""
            if not watch:
                return iter([None])
            return follow(LocalStore(opened), tracked or "", lambda *_: None)

        rounds = track(opened, tracked, writer, changes)
    # The target of Home Assistant may contain a password.
    target = without_login(target)
    if as_json:
        print_json({"run": run_id, "target": target, "rounds": rounds})
    else:
        print_text(f"{rounds} rounds of run {run_id} written to {target}")
