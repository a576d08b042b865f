"""Start a run on a running server, or on a new server that serves only this run.

If fleet.toml has the table `model.export`, the command first exports the model if it has changed.
With --board, the command also runs boards on this machine until the run ends.

Example: shoal run --board attic.toml --board barn.toml
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import FLEET_FILE, AsJson, BrokerUrl, FleetFile, NewName
from shoal.extras import needs


def _run(
    config: FleetFile = FLEET_FILE,
    name: NewName = None,
    broker: BrokerUrl = None,
    board: Annotated[
        list[Path] | None,
        typer.Option(
            help="Configuration of a board that this command runs on this machine until the run"
            " ends; repeat it for each board. The board's log is written next to this file.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from shoal.cli.local_boards import read_boards
        from shoal.cli.serving import do_run, prepare_fleet

    # Before the model is exported, which takes longer than an error in a file should.
    read_boards(board or ())
    settings = prepare_fleet(config, broker)
    if name is not None:
        settings = settings.model_copy(update={"run_name": name})
    exit_code = do_run(settings, as_json=as_json, boards=board or ())
    if exit_code:
        raise typer.Exit(exit_code)
