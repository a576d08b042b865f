"""The store: everything a server must still know after it was killed."""

from broker_server.store.records import (
    DeviceRecord,
    EventRecord,
    LeftOut,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    VersionRecord,
)
from broker_server.store.repository import Store
from broker_server.store.task_records import (
    Alternative,
    Alternatives,
    Outcome,
    Screening,
    TaskPhase,
    TaskRecord,
    Timing,
)

__all__ = [
    "Alternative",
    "Alternatives",
    "DeviceRecord",
    "EventRecord",
    "LeftOut",
    "Outcome",
    "RefusalRecord",
    "RoundRecord",
    "RunRecord",
    "Screening",
    "Store",
    "TaskPhase",
    "TaskRecord",
    "Timing",
    "VersionRecord",
]
