"""Serve a store as a web page and as an API.

Only operators can make changes.

Example: shoal view --port 8420
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import StoreFolder
from shoal.extras import needs


def _view(
    store: StoreFolder,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a store, or of results from `reproduce`; use it instead of --store.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; any address other than loopback requires a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port."),
    ] = 8420,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Require the token in this file; the file is created if it is missing."),
    ] = None,
    actions: Annotated[
        bool,
        typer.Option(
            "--actions", help="Allow actions with the token in the store's file operator.token."
        ),
    ] = False,
) -> None:
    with needs("view"):
        from shoal.view.serving import serving
        from shoal.view.tables import store_of

    import threading

    from broker_server.settings.fleet import ViewConfig
    from broker_server.store import Store
    from fleet_protocol.signals import on_signals
    from shoal.cli.console import error_console

    store = store_of(store if folder is None else folder)
    Store(store, read_only=True).close()  # report an unreadable store here, not on the page
    # A thread serves the page, so this one only waits for a signal.
    done = threading.Event()
    with (
        serving(store, ViewConfig(port=port, host=host, actions=actions), token_file) as address,
        on_signals(lambda _: done.set()),
    ):
        error_console().print(
            f"{store} at {address}; stop with Ctrl-C",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if token_file is not None:
            error_console().print(
                f"log in with the token in {token_file}",
                highlight=False,
                soft_wrap=True,
            )
        done.wait()
