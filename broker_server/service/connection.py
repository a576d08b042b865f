"""The server's connection: what it says, what it hears, and the wish to stop, which arrives the
same way.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.rounds.stopping import OperatorWish
from broker_server.service.asking import Asking
from broker_server.service.blob_service import BlobService
from broker_server.service.clock import Clock
from broker_server.service.inbox import Inbox
from broker_server.service.limits import Limits
from broker_server.service.outbox import Outbox
from broker_server.service.uploads import Uploads
from broker_server.store import Store
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Transport


@dataclass(frozen=True)
class RunParts:
    """What a run's dispatcher works with.

    The presence of the devices, `fleet`, is shared between runs.
    """

    store: Store
    fleet: Fleet
    blobs: BlobService
    uploads: Uploads
    reporter: Reporter
    operator: OperatorWish
    clock: Clock
    open_labels: bool = (
        False  # whether only the boards say what labels mean, so that these must agree
    )


@dataclass(frozen=True)
class Stop:
    """Put into the inbox to end the loop."""


@dataclass(frozen=True)
class Connection:
    """What lives as long as the server, from run to run."""

    link: Transport  # the connection to the broker
    topics: Topics  # of the fleet
    outbox: Outbox  # everything the server says
    inbox: Inbox  # everything it hears
    limits: Limits  # how many messages of each device are read
    asking: Asking  # what operators ask of boards
    stopping: threading.Event  # set when it shall end
    # called now and then, with who serves blobs now and the run in progress; tells boards of
    # releases
    carry: Callable[[BlobService, str | None], None]
    revive: Callable[[], None]  # called when the broker is gone; starts an embedded one again
