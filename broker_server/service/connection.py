"""The shared parts of a server: the connection to the broker, and the services of one run."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish
from broker_server.service.blob_service import BlobService
from broker_server.service.clock import Clock
from broker_server.service.inbox import Inbox
from broker_server.service.limits import Limits
from broker_server.service.outbox import Outbox
from broker_server.service.prediction_requests import PredictionRequests
from broker_server.service.uploads import Uploads
from broker_server.store import Store
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport


@dataclass(frozen=True)
class RunServices:
    """The services of a run's dispatcher.

    Attributes:
        store: the server's database.
        fleet: the devices, which are the same in all runs.
        blobs: serves blobs to devices.
        uploads: receives updates.
        reporter: reports the run.
        operator: the operator's wishes for the run.
        clock: clock of the run.
        open_labels: whether only the boards define what labels mean, so that they must agree.
    """

    # Only the store and the devices outlive the run.
    store: Store
    fleet: Fleet
    blobs: BlobService
    uploads: Uploads
    reporter: Reporter
    operator: OperatorWish
    clock: Clock
    open_labels: bool = False


@dataclass(frozen=True)
class Stop:
    """An event in the inbox that ends the server's loop."""


@dataclass(frozen=True)
class Connection:
    """The objects that live as long as the server, across runs.

    Attributes:
        link: the connection to the broker.
        topics: topics of the fleet.
        devices: devices of the fleet.
        outbox: sends the server's messages.
        inbox: receives messages and other events.
        limits: rates at which messages of each device are read.
        predictions: forwards requests for predictions to boards.
        stopping: set when the server must end.
        do_periodic_work: called about once a second, with the current blob service and the id of
            the run in progress.
        revive_broker: called when the broker is unreachable; restarts a hosted one.
    """

    # Used only in the server's thread; other threads use the inbox and `stopping`.
    link: Transport
    topics: Topics
    devices: Fleet
    outbox: Outbox
    inbox: Inbox
    limits: Limits
    predictions: PredictionRequests
    stopping: threading.Event
    do_periodic_work: Callable[[BlobService, str | None], None]
    revive_broker: Callable[[], None]
