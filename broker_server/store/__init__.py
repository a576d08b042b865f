"""The store: everything a server must still know after it was killed."""

from __future__ import annotations

from broker_server.store.records import (
    Alternative,
    Alternatives,
    DeviceRecord,
    EventRecord,
    RefusalRecord,
    RoundRecord,
    RunRecord,
    TaskPhase,
    TaskRecord,
    VersionRecord,
)
from broker_server.store.repository import Store

__all__ = [
    "Alternative",
    "Alternatives",
    "DeviceRecord",
    "EventRecord",
    "RefusalRecord",
    "RoundRecord",
    "RunRecord",
    "Store",
    "TaskPhase",
    "TaskRecord",
    "VersionRecord",
]
