"""Write a global version to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.common import DEFAULT_STORE, AsJson, RunId, StoreFolder
from shoal.cli.extras import needs
from shoal.cli.grouped import grouped

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class _Options:
    store: StoreFolder = DEFAULT_STORE
    run: RunId = None
    version: Annotated[int | None, typer.Option(min=0, help="Global version; by default the newest.")] = None
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None
    file_format: Annotated[Literal["safetensors", "torch"], typer.Option("--format")] = "safetensors"
    as_json: AsJson = False


@app.command(help=__doc__)
@grouped(_Options)
def _export_weights(options: _Options) -> None:
    with needs("server"):
        from broker_server.store import queries
        from broker_server.store.export import export_safetensors
        from shoal.cli.stored import save_torch, stored_version

    from shoal.cli.console import output_console, print_json

    torch = options.file_format == "torch"
    path = options.out or Path("weights.pt" if torch else "weights.safetensors")
    exported = stored_version(options.store, options.run, options.version)
    (save_torch if torch else export_safetensors)(exported, path)
    record = exported.record
    if options.as_json:
        print_json({"path": str(path), "arch": exported.arch, **queries.plain(record)})
        return
    accuracy = "" if record.evaluation is None else f", {record.evaluation.text()}"
    output_console().print(f"version {record.number} of run {record.run}{accuracy}: {path}", highlight=False)
