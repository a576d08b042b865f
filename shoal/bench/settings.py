"""The settings of a benchmark of rounds."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FleetBench:
    """The options of a benchmark of rounds.

    The embedded broker drops chunks for slow readers. A fleet requests them again; the baseline
    cannot.

    Attributes:
        devices: number of light devices, which use the protocol but do not train.
        rounds: number of rounds; the first one warms up and is not counted.
        payload_bytes: size of an update and of the weights that are sent.
        broker: ``mosquitto``, ``embedded``, or ``mqtt://host:port`` of a running broker.
        port: port of the broker that the benchmark starts.
        processes: number of processes that hold the devices.
        deadline_seconds: seconds until a round closes without the missing devices.
        receivers: number of processes that receive updates for the server; with 0 the server
            receives them.
        folder: folder for the store.
    """

    devices: int = 200
    rounds: int = 4
    payload_bytes: int = 400_000
    broker: str = "mosquitto"
    port: int = 18830
    processes: int = 2
    deadline_seconds: float = 120.0
    receivers: int = 0
    folder: Path = Path("runs/bench")
