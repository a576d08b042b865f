"""Check the signature and contents of a backup, and restore the store from it.

Example: shoal restore store.zip store
"""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.console import print_json, print_rows, print_text
from shoal.extras import needs


def _restore(
    file: Annotated[Path, typer.Argument(help="Backup file.")],
    store: Annotated[Path, typer.Argument(help="Folder to create.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="The fleet's folder, if the store is outside it."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Accept a backup that is unsigned or signed by somebody else, and list the"
            " backup's runs.",
        ),
    ] = False,
    most_files: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of blobs to restore; 100,000 by default."),
    ] = None,
    most_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of bytes to restore; 64 GB by default."),
    ] = None,
    lost_rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of rounds that the lost server may have closed after the backup; with"
            " central noise, these rounds count twice in epsilon.",
        ),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.service.backup_keys import known_keys
        from broker_server.settings.named import list_named_settings
        from broker_server.store import Store
        from broker_server.store.privacy_spent import count_rounds_again
        from broker_server.store.restoring import MOST_BYTES, MOST_FILES, restore

    keys = known_keys(store, folder)
    rows: list[dict[str, str]] = []

    # `restore` calls this only for a backup that no known key has signed.
    def list_names(restored: Store) -> None:
        for run in restored.runs():
            for named in list_named_settings(run.config):
                rows.append(
                    {
                        "run": run.id,
                        "setting": named.setting,
                        "kind": named.kind,
                        "names": named.value,
                    }
                )

    statements = restore(
        file,
        store,
        known=keys,
        trust=trust,
        most_files=most_files or MOST_FILES,
        most_bytes=most_bytes or MOST_BYTES,
        inspect=list_names,
    )
    with contextlib.closing(Store(store)) as opened:
        # Runs without central noise are left as they are.
        repeated = count_rounds_again(opened, lost_rounds)
    signed_by = [statement.shown for statement in statements]
    # One known signature is enough.
    is_foreign = not any(statement.key in keys for statement in statements)
    if as_json:
        record: dict[str, object] = {"path": str(store), "signed_by": signed_by}
        if repeated:
            record["counted_twice"] = repeated
        if is_foreign:
            record["named"] = rows
        print_json(record)
        return
    print_text(f"restored {store} from {file}, signed by {' and '.join(signed_by) or 'nobody'}")
    for run, numbers in repeated.items():
        rounds = ", ".join(str(number) for number in numbers)
        print_text(
            f"{run} adds central noise: round {rounds} counts twice in epsilon, because the lost "
            "server may have released its sum. If it closed more rounds after the backup, restore "
            "again with --lost-rounds"
        )
    if is_foreign:
        print_rows(
            "names in its runs; this server ignores them",
            rows,
            empty="its runs contain no names",
        )
