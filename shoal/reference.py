"""The reference of the configuration files, made from the models that read them: every key, its values, its default.

``python -m shoal.reference FOLDER`` (``make docs``) writes a page for each file into a folder.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from broker_server.settings.fleet import FleetConfig
from device_runtime.settings import DeviceConfig
from shoal.flash.settings import FlashConfig
from simulation.settings import SimulationConfig

FILES: Mapping[str, tuple[type[BaseModel], str]] = MappingProxyType(
    {
        "fleet.toml": (FleetConfig, "What `shoal up` and `shoal run` read."),
        "device.toml": (DeviceConfig, "What `shoal device run` reads on a board; see [A board](../device.md)."),
        "flash.toml": (FlashConfig, "What `shoal flash` reads; see [Making boards](../flash.md)."),
        "sim.toml": (SimulationConfig, "What `shoal simulate` reads; see [Simulations](../simulation.md)."),
    }
)
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_CHOICE = {"kind": "chooses this form of the table."}
_NAMES = {"number": "number", "integer": "whole number", "string": "text", "boolean": "true or false", "null": "none"}


@dataclass(frozen=True)
class Key:
    """A key of a file.

    Attributes:
        table: where it stands, such as ``[round]``; empty at the top of the file.
        name: the key.
        values: what it may be.
        default: as TOML has it; ``required`` where there is none.
        about: for people.
    """

    table: str
    name: str
    values: str
    default: str
    about: str


def keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """Every key that a model reads, tables within tables included."""
    yield from _keys(model, "")


def page(name: str) -> str:
    """The page of a file, a key of `FILES`, as Markdown."""
    model, about = FILES[name]
    lines = [f"# {name}", "", f"{about} Made from the code by `make docs`.", ""]
    table = None
    for key in keys_of(model):
        if key.table != table:
            table = key.table
            title = f"`{table}`" if table else "Top of the file"
            lines += ["", f"## {title}", "", "| key | values | default | what it is |", "|---|---|---|---|"]
        cells = (f"`{key.name}`", key.values, key.default, key.about)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join([*lines, ""]).replace("\n\n\n", "\n\n")


def _keys(model: type[BaseModel], table: str) -> Iterator[Key]:
    documented, schema = _attributes(model), model.model_json_schema()
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        models = list(_models(field.annotation))
        within = f"{table}.{name}" if table else name
        if models:
            inner += [(_kind(within, each, models), each) for each in models]
            if not _listed(field.annotation):
                continue
        values = _values(schema["properties"][name], schema.get("$defs", {}))
        if field.default is PydanticUndefined and field.default_factory is None:
            default = "required"
        else:
            default = _toml(field.get_default(call_default_factory=True))
        yield Key(f"[{table}]" if table else "", name, values, default, documented.get(name, _CHOICE.get(name, "")))
    for within, each in inner:
        yield from _keys(each, within)


def _kind(table: str, model: type[BaseModel], among: list[type[BaseModel]]) -> str:
    """The table with what chooses between several models of it."""
    if len(among) == 1:
        return table
    kind = model.model_fields.get("kind")
    return f"{table}, kind = {kind.default!r}" if kind is not None else f"{table}, {model.__name__}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, however deep."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _models(part)


def _listed(annotation: Any) -> bool:
    """Whether a key holds several tables, by number or by name, and not one."""
    return any(getattr(part, "__origin__", None) in {tuple, list} for part in (annotation, *get_args(annotation)))


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """What docstrings say of a model's fields; those of a base are overridden."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        _, _, section = text.partition("Attributes:\n")
        for name, about in re.findall(r"^    (\w+): ((?:.|\n(?!    \w+:|\S))*)", section, re.MULTILINE):
            found[name] = " ".join(about.split()).replace("``", "`")
    return found


def _values(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _values(known[schema["$ref"].rpartition("/")[2]], known)
    if "const" in schema:
        return _toml(schema["const"])
    if "enum" in schema:
        return ", ".join(map(_toml, schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_values(each, known) for each in schema[union]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", {})
        return f"list of {_values(items, known)}" if items else "list"
    if kind == "object":
        return "table"
    if schema.get("format") == "path":
        return "path"
    bounds = " and ".join(f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema)
    return f"{_NAMES.get(kind or '', 'any')} {bounds}".strip()


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    if isinstance(value, tuple | list | Mapping):
        return f"`{list(value)}`" if value else "empty"
    return f'`"{value}"`' if str(value) else "empty"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for each in FILES:
        (folder / f"{each}.md").write_text(page(each), encoding="utf-8")
