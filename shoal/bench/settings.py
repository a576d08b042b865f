"""What a bench of rounds is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True)
class FleetBench:
    """What is measured; the options of ``shoal bench fleet``.

    The embedded broker drops chunks of readers that fall behind, which a fleet asks for again and
    the baseline cannot.
    """

    devices: Annotated[
        int,
        Option(min=1, help="Light devices, which speak the protocol but do not train."),
    ] = 200
    rounds: Annotated[int, Option(min=2, help="Rounds; the first warms up and is not counted.")] = 4
    payload_bytes: Annotated[
        int,
        Option("--payload", min=1024, help="Bytes of an update, and of the weights sent."),
    ] = 400_000
    broker: Annotated[
        str, Option(help="mosquitto, embedded, or mqtt://host:port of a running one.")
    ] = "mosquitto"
    port: Annotated[int, Option(help="Port of a broker that is started.")] = 18830
    processes: Annotated[int, Option(min=1, help="Processes that hold the devices.")] = 2
    deadline_seconds: Annotated[
        float,
        Option(
            "--deadline",
            min=1,
            help="Seconds until a round closes without the missing.",
        ),
    ] = 120.0
    receivers: Annotated[
        int,
        Option(min=0, help="Processes that take updates for the server; 0: it does so."),
    ] = 0
    folder: Annotated[Path, Option(help="Folder for the store.")] = Path("runs/bench")
