"""Make a store from a file of `shoal backup`, once all of it was checked, and whose it is."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.console import print_json, print_rows, say
from shoal.cli.extras import needs


def _restore(
    file: Annotated[Path, typer.Argument(help="The backup.")],
    store: Annotated[Path, typer.Argument(help="Folder to make.")],
    folder: Annotated[
        Path | None, typer.Option(help="The fleet's folder, where the store is not to lie in it.")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Take a backup that is not signed, or that another has signed, and show its runs."
        ),
    ] = False,
    most_files: Annotated[int | None, typer.Option(min=1, help="Most blobs, if not 100,000.")] = None,
    most_bytes: Annotated[int | None, typer.Option(min=1, help="Most bytes, if not 64 GB.")] = None,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.service.backup_keys import known_keys
        from broker_server.settings.named import names_in
        from broker_server.store import Store
        from broker_server.store.restoring import MOST_BYTES, MOST_FILES, restore

    known = known_keys(store, folder)
    rows: list[dict[str, str]] = []

    def look(made: Store) -> None:
        for run in made.runs():
            rows.extend(
                {"run": run.id, "setting": each.setting, "kind": each.kind, "names": each.value}
                for each in names_in(run.config)
            )

    statements = restore(
        file,
        store,
        known=known,
        trust=trust,
        most_files=most_files or MOST_FILES,
        most_bytes=most_bytes or MOST_BYTES,
        look=look,
    )
    signed_by = [statement.shown for statement in statements]
    foreign = not any(statement.key in known for statement in statements)
    if as_json:
        said = {"path": str(store), "signed_by": signed_by}
        print_json({**said, "named": rows} if foreign else said)
        return
    say(f"{store} is what {file} holds, signed by {' and '.join(signed_by) or 'nobody'}")
    if foreign:
        print_rows("what its runs name, and this server does not take", rows, empty="its runs name nothing")
