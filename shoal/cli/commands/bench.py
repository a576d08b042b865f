"""Measure how a server bears many devices."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.extras import needs
from shoal.cli.grouped import grouped

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback(help=__doc__)
def _bench() -> None: ...


@dataclass(frozen=True)
class _Options:
    devices: Annotated[int, typer.Option(min=1, help="Light devices, which speak the protocol but do not train.")] = 200
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; the first warms up and is not counted.")] = 4
    payload: Annotated[int, typer.Option(min=1024, help="Bytes of an update, and of the weights sent.")] = 400_000
    broker: Annotated[str, typer.Option(help="mosquitto, embedded, or mqtt://host:port of a running one.")] = (
        "mosquitto"
    )
    port: Annotated[int, typer.Option(help="Port of a broker that is started.")] = 18830
    processes: Annotated[int, typer.Option(min=1, help="Processes that hold the devices.")] = 2
    deadline: Annotated[float, typer.Option(min=1, help="Seconds until a round closes without the missing.")] = 120.0
    folder: Annotated[Path, typer.Option(help="Folder for the store.")] = Path("runs/bench")
    as_json: AsJson = False


@app.command("fleet")
@grouped(_Options)
def _fleet(options: _Options) -> None:
    """Rounds of many light devices, beside the bare fan-out and fan-in of the same bytes over the same broker."""
    with needs("server"):
        from shoal.bench.fleet import FleetBench, bench_fleet

    chosen = dataclasses.asdict(options)
    as_json, size, seconds = (chosen.pop(name) for name in ("as_json", "payload", "deadline"))
    figures = bench_fleet(FleetBench(**chosen, payload_bytes=size, deadline_seconds=seconds))
    if as_json:
        print(json.dumps(dataclasses.asdict(figures), indent=1))
        return
    ratio = figures.round_seconds / figures.bare_seconds
    merged = f"{figures.merged} of {figures.asked} merged"
    print(f"{figures.devices} devices, updates of {figures.update_bytes} bytes, {merged}")
    print(f"round           {figures.round_seconds:8.2f} s    bare {figures.bare_seconds:.2f} s, ratio {ratio:.2f}")
    print(
        f"server CPU      {figures.cpu_ms_per_update:8.2f} ms an update, bare {figures.bare_cpu_ms_per_update:.2f} ms"
    )
    print(f"server memory   {figures.resident_bytes / 1e6:8.0f} MB at most")
    print(f"wire / payload  {figures.wire_bytes / max(1, figures.payload_bytes):8.3f} of the server")
    for kind, size in figures.bytes_by_kind.items():
        print(f"  {kind:<24} {size:>14} bytes at the devices")
