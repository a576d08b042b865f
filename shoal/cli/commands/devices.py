"""List the devices of a server, release a device from quarantine, or get a device's predictions.

Example: shoal devices --watch
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.common import (
    FLEET_FILE,
    AsJson,
    BrokerUrl,
    FleetFile,
    PageUrl,
    RunId,
    StoreFolder,
)
from shoal.cli.console import print_text
from shoal.cli.listing import view_command
from shoal.extras import needs

if TYPE_CHECKING:
    from shoal.cli.views.view import View


def _load_view() -> "View[Any]":
    from shoal.cli.views.devices import DEVICES

    return DEVICES


app = view_command(_load_view, __doc__, group=True)


@app.command("release")
def _release(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    store: StoreFolder,
    url: PageUrl = "",
    run: RunId = None,
) -> None:
    """Release a device from quarantine, so that the next round can select it.

    Example: shoal devices release attic
    """
    with needs("server"):
        from shoal.sources import open_source

    # The only command of this group that changes the store.
    with open_source(store, url, read_only=False) as source:
        run_id = source.act("release", run or "", device=name)
    print_text(f"{name} is released; run {run_id} may select it again in its next round")


@app.command("predict")
def _predict(
    name: Annotated[str, typer.Argument(help="Id of the device.")],
    data: Annotated[
        Path, typer.Option(help="Samples: a .npy file, or a .json file of nested lists.")
    ],
    config: FleetFile = FLEET_FILE,
    broker: BrokerUrl = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=300, help="Seconds to wait for the board.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Get predictions from a board's model, over the fleet's broker.

    The predict table of the board's device.toml must allow requests over MQTT.

    Example: shoal devices predict attic --data samples.npy
    """
    with needs("server"):
        from shoal.cli.serving import predict_at, read_fleet

    predict_at(read_fleet(config, broker), name, data, seconds, as_json=as_json)
