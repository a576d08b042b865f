"""The settings of a benchmark of rounds."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FleetBench:
    """What a benchmark of rounds runs and measures.

    The embedded broker drops chunks of readers that fall behind, which a fleet asks for again and
    the baseline cannot.

    Attributes:
        devices: light devices, which speak the protocol but do not train.
        rounds: rounds, of which the first warms up and is not counted.
        payload_bytes: bytes of an update, and of the weights that are sent.
        broker: ``mosquitto``, ``embedded``, or ``mqtt://host:port`` of a running one.
        port: port of a broker that is started.
        processes: processes that hold the devices.
        deadline_seconds: seconds until a round closes without the devices that are missing.
        receivers: processes that receive updates for the server; with 0 the server does.
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
