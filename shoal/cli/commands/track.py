"""Write the rounds of a run to TensorBoard, MLflow or OpenTelemetry, or show the fleet in Home
Assistant.
"""

from contextlib import closing
from functools import partial
from typing import Annotated

import typer

from fleet_protocol.spelling import without_login
from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder, Watch
from shoal.cli.console import print_json, say
from shoal.cli.extras import needs


def _track(
    target: Annotated[
        str,
        typer.Argument(
            help="tensorboard:FOLDER, mlflow:http://HOST:5000, otlp:http://HOST:4318, or homeassistant:mqtt://USER:PASSWORD@HOST."
        ),
    ],
    store: StoreFolder = DEFAULT_STORE,
    run: RunId = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.store import Store, queries
        from shoal.cli.stored import watched
    with needs("tracking"):
        from shoal.tracking import track, tracking

        writer = tracking(target)
    with closing(Store(store, read_only=True)) as opened:
        found = queries.find_run(opened, run)
        of = (
            run if target.startswith("homeassistant:") else found.id
        )  # a home shows the newest, whichever that is
        looks = partial(watched, opened, of, lambda *_: None) if watch else partial(iter, [None])
        rounds = track(opened, of, writer, looks)
    target = without_login(target)
    if as_json:
        print_json({"run": found.id, "target": target, "rounds": rounds})
    else:
        say(f"{rounds} rounds of run {found.id} written to {target}")
