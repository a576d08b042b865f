"""Records to rows and back: enums by their value, messages as JSON, everything else as it is."""

from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache, lru_cache
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
    """A row of the table of a kind of record, whose columns are its fields in their order."""
    columns = zip(row, _columns(kind), strict=True)  # type: ignore[arg-type]  # a type is hashable
    return kind(*[value if value is None or read is None else read(value) for value, (_, read) in columns])


@cache
def _columns(kind: type) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    """The fields of a record, and what makes each of its column."""
    made: dict[str, Callable[[Any], Any]] = dict(_ENUMS.get(kind, {}))
    made |= {name: model.model_validate_json for name, model in _PARSED.items()}
    made |= dict.fromkeys(("artifact_set", "weights"), _blob_ref)
    return tuple((item.name, made.get(item.name)) for item in fields(kind))


@lru_cache(maxsize=256)
def _blob_ref(text: str) -> BlobRef:
    """The same few for all tasks of a round."""
    return BlobRef.model_validate_json(text)


def to_row(record: object) -> dict[str, Any]:
    """A record, a dataclass whose fields are columns, as the values of its row."""
    columns = _columns(type(record))  # type: ignore[arg-type]  # a type is hashable
    found = ((name, getattr(record, name), read) for name, read in columns)
    return {name: value if value is None or read is None else _plain(value) for name, value, read in found}


def _plain(value: BaseModel | Enum) -> str:
    return value.model_dump_json() if isinstance(value, BaseModel) else str(value.value)
