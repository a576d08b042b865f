"""``shoal device``: the agent on a board."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Run the agent on this board.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Run the agent on this board."""


@app.command("run")
def _run(config: Annotated[Path, typer.Option(help="The board's configuration, device.toml.")]) -> None:
    """Connect to the fleet's broker and train what the server asks for, until stopped."""
    from device_runtime.main import run_device  # noqa: PLC0415  (onnxruntime, needed here alone)

    sys.exit(run_device(config))
