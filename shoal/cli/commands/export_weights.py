"""Write a global version to a file or folder, and print the Python code that loads it.

The transformers format writes a folder for from_pretrained, with the adapters merged. The peft
format writes only the adapters.

Example: shoal export-weights --best --format torch --out model.pt
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.common import AsJson, PageUrl, RunId, StoreFolder
from shoal.cli.grouped import grouped
from shoal.extras import needs


@dataclass(frozen=True)
class _Options:
    store: StoreFolder
    url: PageUrl = ""
    run: RunId = None
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of the global version; by default, the promoted version, or the newest"
            " version if none is promoted.",
        ),
    ] = None
    best: Annotated[
        bool, typer.Option("--best", help="Use the version with the best evaluation.")
    ] = False
    tier: Annotated[
        str | None,
        typer.Option(help="Tier, such as w0.50-d2; by default, the whole model."),
    ] = None
    artifacts: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the exported sets, for a restored store; by default, the folder in"
            " the run's configuration."
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="File or folder to write.")] = None
    file_format: Annotated[
        Literal["safetensors", "torch", "onnx", "transformers", "peft"],
        typer.Option("--format", help="Format; transformers and peft write folders."),
    ] = "safetensors"
    as_json: AsJson = False


@grouped(_Options)
def _export_weights(options: _Options) -> None:
    with needs("server"):
        from broker_server.store import queries
        from shoal.cli.views.versions import choose_version
        from shoal.downloads import SUFFIXES, Selection, save
        from shoal.sources import open_source

    from shoal.cli.console import error_console, print_json, print_text

    if options.best and options.version is not None:
        raise ConfigError("--best and --version both select a version; give only one of them")
    path = options.out or Path(f"weights{SUFFIXES.get(options.file_format, '')}")
    with open_source(options.store, options.url) as source:
        run, version = choose_version(source, options.run or "", best=options.best)
        number = version if options.version is None else options.version
        selection = Selection(run.id, number, options.tier, options.file_format)
        download = save(source, run, selection, path, options.artifacts)
    record = download.record
    if options.as_json:
        described = queries.to_json_values(record)
        print_json(
            {
                "path": str(path),
                "arch": run.arch,
                **described,
                "load": "\n".join(download.lines),
            }
        )
        return
    accuracy = "" if record.evaluation is None else f", {record.evaluation.text()}"
    print_text(f"version {record.number} of run {run.shown}{accuracy}: {path}")
    if download.note:
        error_console().print(
            f"note: {download.note}", markup=False, highlight=False, soft_wrap=True
        )
    for line in download.lines:
        print_text(f"  {line}")
