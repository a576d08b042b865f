"""What the service does for one run: files for the devices, uploads from them, and the telling about it."""

from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import Steering
from broker_server.service.blob_service import BlobService
from broker_server.service.clock import Clock
from broker_server.service.uploads import Uploads
from broker_server.store import Store


@dataclass(frozen=True)
class RunParts:
    """What a run's dispatcher works with; the presence of the devices, `fleet`, is shared between runs."""

    store: Store
    fleet: Fleet
    blobs: BlobService
    uploads: Uploads
    reporter: Reporter
    steering: Steering
    clock: Clock
