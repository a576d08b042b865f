"""Records to rows and back: enums by their value, messages as JSON, everything else as it is."""

from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import Row

from broker_server.store.machine import RoundEvent, RoundState
from broker_server.store.records import LeftOut, RoundRecord
from broker_server.store.task_records import Alternatives, Screening, TaskPhase, TaskRecord, Timing
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.messages import BlobRef, Profile, TaskMetrics

RecordT = TypeVar("RecordT")

_PARSED: dict[str, type[BaseModel]] = {
    "profile": Profile,
    "evaluation": VersionEvaluation,
    "metrics": TaskMetrics,
    "artifact_set": BlobRef,
    "weights": BlobRef,
    "others": Alternatives,
    "left_out": LeftOut,
    "timing": Timing,
    "screening": Screening,
}
_ENUMS: dict[type, dict[str, type[RoundState | RoundEvent | TaskPhase]]] = {
    RoundRecord: {"state": RoundState, "ending": RoundEvent},
    TaskRecord: {"phase": TaskPhase},
}


def from_row(kind: type[RecordT], row: Row[Any]) -> RecordT:
    """A row as a record.

    Args:
        kind: of record; its fields are columns of the row.
        row: what a query found.
    """
    values: dict[str, Any] = {}
    enums = _ENUMS.get(kind, {})
    for name in (item.name for item in fields(kind)):  # type: ignore[arg-type]  # every record is a dataclass
        value = row._mapping[name]  # noqa: SLF001  (SQLAlchemy's public access by name)
        if value is not None and name in _PARSED:
            value = _PARSED[name].model_validate_json(value)
        elif value is not None and name in enums:
            value = enums[name](value)
        values[name] = value
    return kind(**values)


def to_row(record: object) -> dict[str, Any]:
    """A record as the values of its row.

    Args:
        record: a dataclass whose fields are columns.
    """
    values: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        value = getattr(record, item.name)
        if isinstance(value, BaseModel):
            value = value.model_dump_json()
        elif isinstance(value, (RoundState, RoundEvent, TaskPhase)):
            value = value.value
        values[item.name] = value
    return values
