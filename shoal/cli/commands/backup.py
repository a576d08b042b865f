"""Back up a store to one signed file; the server can keep running.

Example: shoal backup store.zip
"""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import HERE, AsJson, FleetFolder, StoreFolder
from shoal.cli.console import print_json, print_text
from shoal.extras import needs


def _backup(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[FOLDER] FILE",
            help="File to write, for example store.zip; a folder before it overrides --store.",
        ),
    ],
    store: StoreFolder,
    folder: FleetFolder = HERE,
    as_json: AsJson = False,
) -> None:
    with needs("server"):
        from broker_server.service.backup_keys import signers
        from broker_server.store.backup import back_up
        from broker_server.store.restoring import MOST_BYTES, MOST_FILES

    *folders, file = paths
    if len(folders) > 1:
        raise typer.BadParameter(f"{file} is one path too many; write: shoal backup [FOLDER] FILE")
    if folders:
        (store,) = folders
    keys = signers(store, folder)
    blobs = back_up(store, file, keys)
    size = file.stat().st_size
    signed_by = [signer.words for signer in keys]
    if as_json:
        print_json({"path": str(file), "blobs": blobs, "bytes": size, "signed_by": signed_by})
        return
    print_text(f"saved {store} with {blobs} blobs in {file}, signed by {' and '.join(signed_by)}")
    # `restore` refuses a backup above these bounds unless its options raise them.
    if blobs > MOST_FILES or size > MOST_BYTES:
        print_text(f"the backup is large: restore it with --most-files {blobs} --most-bytes {size}")
