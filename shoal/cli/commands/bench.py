"""Load-test a server with many lightweight devices.

Example: shoal bench fleet --devices 200
"""

from dataclasses import asdict, dataclass

import typer

from shoal.bench.settings import FleetBench
from shoal.cli.common import AsJson
from shoal.cli.console import print_json
from shoal.cli.grouped import grouped
from shoal.extras import needs

app = typer.Typer(no_args_is_help=True, add_completion=False)

_OPTIONS = {
    "devices": typer.Option(
        min=1, help="Number of lightweight devices; they use the protocol but do not train."
    ),
    "rounds": typer.Option(
        min=2, help="Number of rounds; the first is a warm-up and is not counted."
    ),
    "payload_bytes": typer.Option(
        "--payload",
        min=1024,
        help="Size in bytes of each update, and of the weights that each device receives.",
    ),
    "broker": typer.Option(
        help="Broker: mosquitto, embedded, or mqtt://host:port of a running broker."
    ),
    "port": typer.Option(help="Port of the broker that the command starts."),
    "processes": typer.Option(min=1, help="Number of processes that simulate the devices."),
    "deadline_seconds": typer.Option(
        "--deadline", min=1, help="Seconds until a round closes without the missing devices."
    ),
    "receivers": typer.Option(
        min=0,
        help="Number of processes that receive updates for the server; with 0, the server"
        " receives them.",
    ),
    "folder": typer.Option(help="Folder for the store."),
}


# Without a callback, typer would leave out the name of the only command.
@app.callback(help=__doc__)
def _bench() -> None: ...


@dataclass(frozen=True)
class _Options(FleetBench):
    as_json: AsJson = False


@app.command("fleet")
@grouped(_Options, _OPTIONS)
def _fleet(options: _Options) -> None:
    """Time rounds with many lightweight devices, and a plain exchange of the same number of bytes.

    Example: shoal bench fleet --devices 200 --rounds 5
    """
    with needs("server"):
        from shoal.bench.fleet import bench_fleet

    figures = bench_fleet(options)
    if options.as_json:
        print_json(asdict(figures))
        return
    beside = (
        f"bare paho {figures.paho_seconds:.2f} s, ratio "
        f"{figures.round_seconds / figures.paho_seconds:.2f}"
    )
    print(
        f"{figures.devices} devices, {figures.update_bytes} bytes each, {figures.merged} of"
        f" {figures.asked} updates merged"
    )
    print(f"round           {figures.round_seconds:8.2f} s    {beside}")
    print(
        f"server CPU      {figures.cpu_ms_per_update:8.2f} ms an update, paho's "
        f"{figures.paho_cpu_ms_per_update:.2f}"
    )
    print(f"server memory   {figures.resident_bytes / 1e6:8.0f} MB at most")
    print(
        f"wire / payload  {figures.wire_bytes / max(1, figures.payload_bytes):8.3f} of the server"
    )
    for kind, size in figures.bytes_by_kind.items():
        print(f"  {kind:<24} {size:>14} bytes at the devices")
