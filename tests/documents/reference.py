"""The reference, made from the code: every key of a file, a message or a manifest, every command
and its options.

``python -m tests.documents.reference FOLDER`` (``make docs``) writes its pages into a folder.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from broker_server.rounds.advice import Advice
from broker_server.rounds.best import VersionView
from broker_server.settings.fleet import FleetConfig
from broker_server.store import EventRecord, queries
from broker_server.store.explaining import DeviceInRound
from device_runtime.settings import DeviceConfig
from fleet_protocol import errors
from fleet_protocol.manifest import Manifest
from shoal.cli.main import app
from shoal.flash.settings import FlashConfig
from simulation.settings import SimulationConfig
from tests.documents import asyncapi

FILES: Mapping[str, tuple[type[BaseModel], str]] = MappingProxyType(
    {
        "fleet.toml": (FleetConfig, "The configuration of `shoal up` and `shoal run`."),
        "device.toml": (
            DeviceConfig,
            "The configuration of `shoal device run` on a board; see [A board](../device.md).",
        ),
        "flash.toml": (
            FlashConfig,
            "The configuration of `shoal flash`; see [Making boards](../flash.md).",
        ),
        "sim.toml": (
            SimulationConfig,
            "The configuration of `shoal simulate`; see [Simulations](../simulation.md).",
        ),
    }
)
_CODES = {  # beside those of the tree of errors
    0: "Done.",
    1: "A bug in Shoal; include the output in a report.",
    9: "A worker of a simulation died twice on the same task; run the same command to resume the simulation.",
    75: "`shoal device run` exits so that another runtime can start; see [over the"
    " air](../rollout.md).",
    130: "The command was interrupted by Ctrl-C, or the server was stopped before the run ended.",
    143: "The command was ended by SIGTERM.",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_CHOICE = {
    "kind": "selects this variant of the table.",
    "type": "kind of the message.",
    "v": "version of the protocol.",
    "schema_version": "version of the format of this request.",
}
_NAMES = {
    "number": "number",
    "integer": "whole number",
    "string": "text",
    "boolean": "true or false",
    "null": "none",
}


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
    """Every key that a model reads, tables within tables included, and none twice."""
    yield from dict.fromkeys(_keys(model, ""))


def _tables(model: type[BaseModel], top: str, level: str = "##") -> Iterator[str]:
    """A table of keys for each table of a model, with its heading, which for the first may be
    empty.
    """
    table = None
    for key in keys_of(model):
        if key.table != table:
            table = key.table
            title = f"`{table}`" if table else top
            yield from ["", f"{level} {title}", ""] if title else [""]
            yield from ["| key | values | default | description |", "|---|---|---|---|"]
        yield _row(f"`{key.name}`", key.values, key.default, key.about)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _file(name: str) -> Iterator[str]:
    model, about = FILES[name]
    yield from [f"# {name}", "", f"{about} Generated from the code by `make docs`.", ""]
    yield from _tables(model, "Top of the file")


def _manifest() -> Iterator[str]:
    yield from [
        "# manifest.json",
        "",
        "The manifest of an artifact set. Generated from the code by `make docs`.",
        "",
    ]
    yield from _tables(Manifest, "Top of the file")


def _messages() -> Iterator[str]:
    document = asyncapi.document()
    about = "The messages between a server and its devices over MQTT 5."
    models = {model.__name__: model for model in asyncapi.MESSAGES}
    yield from ["# Messages", "", f"{about} Generated from the code by `make docs`."]
    yield "Machine-readable form: [asyncapi.json](../asyncapi.json)."
    for name, message in document["components"]["messages"].items():
        topics = [
            f"`{channel['address']}`"
            for channel in document["channels"].values()
            if name in channel["messages"]
        ]
        about = message.get("description", message["summary"])
        yield from ["", f"## {name}", "", f"{about} Topic: {', '.join(topics)}."]
        if name in models:
            yield from _tables(models[name], "", "###")


def commands(
    command: Any = None, path: str = "shoal"
) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Every command and group of the command line.

    Args:
        command: where to begin; the whole command line without one.
        path: how that is called.

    Yields:
        What is typed, its help, and its arguments and options, each as it is typed and what it is.
    """
    command = command or typer.main.get_command(app)
    context = command.context_class(command, info_name=path)
    yield (
        path,
        inspect.cleandoc(command.help or ""),
        [parameter.get_help_record(context) for parameter in command.params],
    )
    for name in sorted(getattr(command, "commands", ())):
        yield from commands(command.resolve_command(context, [name])[1], f"{path} {name}")


PRINTED: Mapping[str, Any] = MappingProxyType(
    {
        "status": queries.StatusView,
        "runs": queries.RunView,
        "rounds": queries.RoundView,
        "rounds show": DeviceInRound,
        "devices": queries.DeviceView,
        "versions": VersionView,
        "advice": Advice,
        "log": EventRecord,
        "compare": {
            "run": "id of the first run",
            "other_run": "id of the second run",
            "what": "what is compared: `setting`, `accuracy` (`loss` if there is no accuracy), or a metric",
            "name": "dotted key of a setting that differs, or number of a version with a score",
            "value": "value in the first run; the parts of a list or table have dotted names",
            "other_value": "value in the second run",
        },
        "rollout show": {
            "device": "id of the device",
            "outcome": "outcome of the rollout on the device",
            "version": "version of Shoal, as last reported",
            "release": "number of the release, the same in all records",
            "state": "state of the rollout, the same in all records",
            "stopped": "why the rollout stopped; empty while it continues",
        },
    }
)
_ELSEWHERE = {"status": "runs", "rounds": "tasks"}  # a field that another command lists


def printed(command: str) -> dict[str, str]:
    """What a listing command prints with ``--json``: names, with what varies in angles, and what
    each is.
    """
    kind = PRINTED[command]
    if isinstance(kind, Mapping):
        return dict(kind)
    return {
        name: about
        for name, about in _printed(kind, "", "")
        if name.split(".")[0] != _ELSEWHERE.get(command)
    }


def _printed(kind: Any, name: str, about: str) -> Iterator[tuple[str, str]]:
    of = get_origin(kind)
    arguments = [argument for argument in get_args(kind) if argument not in {type(None), Ellipsis}]
    if name.endswith(".config"):
        yield f"{name}.<key>", "a setting, as in [fleet.toml](fleet.toml.md)."
    elif is_dataclass(kind) or (inspect.isclass(kind) and issubclass(kind, BaseModel)):
        descriptions = _attributes(kind)
        for field, inner in get_type_hints(kind).items():
            if not field.startswith("_") and get_origin(inner) is not ClassVar:
                yield from _printed(
                    inner, f"{name}.{field}" if name else field, descriptions.get(field, "")
                )
    elif of in {UnionType, Union} and len(arguments) == 1:
        yield from _printed(arguments[0], name, about)
    elif inspect.isclass(of) and issubclass(of, Mapping):
        yield from _printed(arguments[1], f"{name}.<name>", about)
    elif of in {tuple, list} and (get_args(arguments[0]) or issubclass(arguments[0], BaseModel)):
        yield name, f"{about} This list can be empty; the rows below describe its entries."
        yield from _printed(
            arguments[0], f"{name}.<{'number' if get_args(arguments[0]) else 'name'}>", about
        )
    else:
        yield name, about


def _json() -> Iterator[str]:
    yield from [
        "",
        "## JSON",
        "",
        "With `--json`, a command prints one record or a list of records. Records are flat: nested",
        "values have dotted names, and a value is text, a number, true, false, null, or a list of",
        "these. Other lists are flattened: the name or number of an entry is part of the dotted",
        "name. All records in a list have the same names. A missing value is null. In `jq`, quote",
        "a dotted name: `shoal rounds --json | jq '.[].\"round.state\"'`. In pandas,",
        "`pandas.read_json` turns a list into a table. With `--watch`, each output is one line;",
        "`log` prints one record per line. The predictions of a board are one record with two",
        "entries, `model` and the list `predictions`.",
    ]
    for command in PRINTED:
        yield from ["", f"`shoal {command} --json`:", "", "| name | description |", "|---|---|"]
        yield from (_row(f"`{name}`", about) for name, about in printed(command).items())


def _cli() -> Iterator[str]:
    yield from [
        "# Commands",
        "",
        "The commands of `shoal`. Generated from the code by `make docs`.",
        "",
    ]
    for path, about, options in commands():
        yield from ["", f"## {path}", "", about.replace("\b", "")]
        if options:
            yield from ["", "| argument or option | description |", "|---|---|"]
            yield from (_row(f"`{typed}`", meaning) for typed, meaning in options)
    yield from _json()
    yield from ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    kinds = [
        error
        for error in vars(errors).values()
        if inspect.isclass(error) and issubclass(error, errors.ShoalError)
    ]
    codes = [
        *_CODES.items(),
        *((error.exit_code, inspect.getdoc(error) or "") for error in kinds[1:]),
    ]
    yield from (
        _row(str(code), about.partition("\n")[0])
        for code, about in sorted(codes, key=lambda code: code[0])
    )


PAGES: Mapping[str, Callable[[], Iterator[str]]] = MappingProxyType(
    {
        **{name: partial(_file, name) for name in FILES},
        "manifest": _manifest,
        "messages": _messages,
        "cli": _cli,
    }
)


def page(name: str) -> str:
    """A page of the reference, a key of `PAGES`, as Markdown."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*PAGES[name](), ""]))


def _keys(model: type[BaseModel], table: str) -> Iterator[Key]:
    documented = _attributes(model)
    schema = model.model_json_schema()
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        models = list(_models(field.annotation))
        # A table within a table of several kinds goes by the name alone.
        outer = table.partition(",")[0]
        within = f"{outer}.{name}" if outer else name
        if models:
            inner += [(_kind(within, inner_model, models), inner_model) for inner_model in models]
            if not _listed(field.annotation):
                continue
        values = _values(schema["properties"][name], schema.get("$defs", {}))
        if field.default is PydanticUndefined and field.default_factory is None:
            default = "required"
        else:
            default = _toml(field.get_default(call_default_factory=True))
        yield Key(
            f"[{table}]" if table else "",
            name,
            values,
            default,
            documented.get(name, _CHOICE.get(name, "")),
        )
    for within, inner_model in inner:
        yield from _keys(inner_model, within)


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
    for argument in get_args(annotation):
        yield from _models(argument)


def _listed(annotation: Any) -> bool:
    """Whether a key holds several tables, by number or by name, and not one."""
    return any(
        getattr(argument, "__origin__", None) in {tuple, list}
        for argument in (annotation, *get_args(annotation))
    )


def _attributes(model: type[BaseModel]) -> dict[str, str]:
    """What docstrings say of a model's fields; those of a base are overridden."""
    descriptions: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        _, _, section = text.partition("Attributes:\n")
        for name, about in re.findall(
            r"^    (\w+): ((?:.|\n(?!    \w+:|\S))*)", section, re.MULTILINE
        ):
            descriptions[name] = " ".join(about.split()).replace("``", "`")
    return descriptions


def _values(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _values(known[schema["$ref"].rpartition("/")[2]], known)
    if "const" in schema:
        return _toml(schema["const"])
    if "enum" in schema:
        return ", ".join(map(_toml, schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(
                dict.fromkeys(_values(alternative, known) for alternative in schema[union])
            )
    kind = schema.get("type")
    if kind == "array":
        return _list_of(schema.get("items", {}), known)
    if kind == "object":
        return "table"
    if schema.get("format") == "path":
        return "path"
    bounds = " and ".join(
        f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema
    )
    return f"{_NAMES.get(kind or '', 'any')} {bounds}".strip()


def _list_of(entries: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """A list by its entries, such as "list (whole number >= 1)"."""
    if not entries:
        return "list"
    return f"list ({_values(entries, known)})"


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
    for page_name in PAGES:
        (folder / f"{page_name}.md").write_text(page(page_name), encoding="utf-8")
