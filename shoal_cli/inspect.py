"""``shoal status``, ``devices``, ``rounds``, ``log``, ``export-weights``: what is stored of a run."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from broker_server import queries
from broker_server.export import ExportedVersion, export_safetensors, load_version
from broker_server.store import RoundRecord, Store
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from shoal_cli.console import bytes_text, output_console, print_json, print_rows, seconds_text

__all__ = ["add_to"]

StoreFolder = Annotated[Path, typer.Option("--store", help="Folder of the server's store.")]
Run = Annotated[str | None, typer.Option(help="Id of a run, or its beginning; by default the newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_STORE = Path("runs/store")


@contextmanager
def _opened(folder: Path) -> Iterator[Store]:
    store = Store(folder, read_only=True)
    try:
        yield store
    finally:
        store.close()


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _status(store: StoreFolder = DEFAULT_STORE, run: Run = None, as_json: AsJson = False) -> None:
    """Show how a run stands."""
    with _opened(store) as opened:
        view = queries.status(opened, run)
    if as_json:
        print_json(queries.plain(view))
        return
    console = output_console()
    if view.run is None:
        console.print(f"no run yet in {store}; {view.online} of {view.devices} devices online")
        return
    accuracy = "not evaluated" if view.evaluation is None else view.evaluation.summary
    console.print(f"run [bold]{view.run.id}[/] of {view.run.arch}: {view.run.status}", highlight=False)
    if view.run.detail:
        console.print(f"  {view.run.detail}", highlight=False, markup=False)
    console.print(f"  {view.closed} of {view.rounds} rounds closed, {accuracy}", highlight=False)
    if view.round is not None:
        console.print(f"  round {view.round.number} is {view.round.state.value}", highlight=False)
    console.print(f"  {view.online} of {view.devices} devices online when last heard of", highlight=False)
    console.print(
        f"  {bytes_text(view.run.wire_bytes)} on the wire, {bytes_text(view.run.payload_bytes)} payload",
        highlight=False,
    )
    refused = ", ".join(f"{count} {reason}" for reason, count in view.refusals.items()) or "nothing"
    console.print(f"  refused: {refused}", highlight=False)


def _devices(store: StoreFolder = DEFAULT_STORE, run: Run = None, as_json: AsJson = False) -> None:
    """List the devices that were ever seen, with their part in a run."""
    with _opened(store) as opened:
        views = queries.devices(opened, run)
    if as_json:
        print_json(queries.plain(views))
        return
    rows = []
    for view in views:
        profile = view.device.profile
        rows.append(
            {
                "device": view.device.id,
                "online": "yes" if view.device.online else "no",
                "board": "-" if profile is None else f"{profile.arch}, {profile.cores} cores",
                "tier": view.tier or "-",
                "samples": "-" if view.examples is None else str(view.examples),
                "merged": str(view.merged),
                "missed": str(view.missed),
                "refused": str(view.refused),
                "own accuracy": f"{view.evaluation.accuracy:.4f}" if view.evaluation else "-",
                "training": seconds_text(view.train_seconds),
                "memory": "-" if view.resident_bytes is None else bytes_text(view.resident_bytes),
                "last seen": _clock(view.device.last_seen_at),
            }
        )
    print_rows("devices", rows, empty="no device was ever seen")


def _tier_accuracy(record: RoundRecord, tier: str) -> str:
    found = record.evaluation.tiers.get(tier) if record.evaluation else None
    return f"{found.accuracy:.4f}" if found else "-"


def _rounds(store: StoreFolder = DEFAULT_STORE, run: Run = None, as_json: AsJson = False) -> None:
    """List the rounds of a run."""
    with _opened(store) as opened:
        views = queries.rounds(opened, run)
    if as_json:
        print_json(queries.plain(views))
        return
    tiers = dict.fromkeys(tier for view in views if view.round.evaluation for tier in view.round.evaluation.tiers)
    rows = [
        {
            "round": str(view.round.number),
            "state": view.round.state.value,
            "accuracy": f"{view.round.evaluation.accuracy:.4f}" if view.round.evaluation else "-",
            "loss": f"{view.round.evaluation.loss:.4f}" if view.round.evaluation else "-",
            "on devices": f"{view.device_accuracy:.4f}" if view.device_accuracy is not None else "-",
            **{tier: _tier_accuracy(view.round, tier) for tier in tiers},
            "updates": ", ".join(f"{count} {phase}" for phase, count in view.phases.items()),
            "time": seconds_text(view.seconds),
            "note": view.round.reason or view.round.note or "",
        }
        for view in views
    ]
    print_rows("rounds", rows, empty="no round yet")


def _log(
    store: StoreFolder = DEFAULT_STORE,
    run: Run = None,
    last: Annotated[int, typer.Option(min=1, help="So many of the newest lines.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what the server noted."""
    with _opened(store) as opened:
        events = queries.log(opened, run, last=last)
    if as_json:
        print_json(queries.plain(events))
        return
    console = output_console()
    for event in events:
        where = " ".join(part for part in (f"round {event.round}" if event.round else "", event.device or "") if part)
        console.print(
            f"{_clock(event.at)} {event.kind:18} {where:24} {event.detail}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if not events:
        console.print("the log is empty")


def _export_weights(
    store: StoreFolder = DEFAULT_STORE,
    run: Run = None,
    version: Annotated[int | None, typer.Option(min=0, help="Global version; by default the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    file_format: Annotated[Literal["safetensors", "torch"], typer.Option("--format")] = "safetensors",
    as_json: AsJson = False,
) -> None:
    """Write a global version to a file."""
    suffix = {"safetensors": "safetensors", "torch": "pt"}[file_format]
    path = out or Path(f"weights.{suffix}")
    with _opened(store) as opened:
        exported = load_version(opened, run=run, version=version)
    if file_format == "safetensors":
        export_safetensors(exported, path)
    else:
        _save_torch(exported, path)
    record = exported.record
    if as_json:
        print_json({"path": str(path), "arch": exported.arch, **queries.plain(record)})
        return
    accuracy = "" if record.evaluation is None else f", accuracy {record.evaluation.accuracy:.4f}"
    output_console().print(f"version {record.number} of run {record.run}{accuracy}: {path}", highlight=False)


def _save_torch(exported: ExportedVersion, path: Path) -> None:
    """Write what ``torch.load(path, weights_only=True)`` reads: ``state_dict``, ``statistics`` and ``metadata``."""
    try:
        import torch  # noqa: PLC0415  (the one command of this file that needs it)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--format torch needs torch, which is not installed here; take --format safetensors, "
            "which torch reads through safetensors.torch.load_file"
        ) from error

    def tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}

    buffer = io.BytesIO()
    torch.save(
        {
            "state_dict": tensors(exported.weights),
            "statistics": tensors(exported.statistics),
            "metadata": exported.metadata,
        },
        buffer,
    )
    write_atomically(path, buffer.getvalue())


def add_to(app: typer.Typer) -> None:
    """Register the commands.

    Args:
        app: the application.
    """
    app.command("status")(_status)
    app.command("devices")(_devices)
    app.command("rounds")(_rounds)
    app.command("log")(_log)
    app.command("export-weights")(_export_weights)
