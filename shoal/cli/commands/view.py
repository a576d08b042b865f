"""Show a store as a page in the browser, and as an API.

Only operators can change anything.

Example: shoal view --port 8420
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import project_store
from shoal.extras import needs


def _view(
    store: Annotated[
        Path,
        typer.Argument(
            help="Folder of a store, or of results of `reproduce`.",
            default_factory=project_store,
            show_default="the store of fleet.toml here, or runs/store",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; beyond loopback a token is needed."),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    ] = 8420,
    token_file: Annotated[
        Path | None, typer.Option(help="Ask for the token in this file; it is made.")
    ] = None,
    actions: Annotated[
        bool,
        typer.Option("--actions", help="Let act whoever has operator.token of the store."),
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

    store = store_of(store)
    Store(
        store, read_only=True
    ).close()  # a store that cannot be read is said here, not in the page
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
