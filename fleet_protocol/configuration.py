"""TOML configuration into frozen pydantic models; an unknown key is an error with a suggestion."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ModelT = TypeVar("ModelT", bound=BaseModel)

# What pydantic calls things, and TOML.
_MOST = 2**53
_WORDS = {
    "a valid tuple": "a list, in [ ]",
    "a valid array": "a list, in [ ]",
    "an object": "a table",
}


def _nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _nested_models(argument)


def _below(annotation: object, key: str) -> object:
    """What a key leads to: a model's field, or any entry of a table with free keys."""
    if get_origin(annotation) is Mapping:
        return get_args(annotation)[1]
    for tagged in _nested_models(annotation):  # pydantic names the form that `kind` chooses
        if (kind := tagged.model_fields.get("kind")) is not None and kind.default == key:
            return tagged
    model = next(_nested_models(annotation), None)
    field = model.model_fields.get(key) if model else None
    return field.annotation if field else None


def _at(model: type[BaseModel], path: tuple[int | str, ...]) -> object:
    """The annotation that ``path`` leads to."""
    current: object = model
    for part in path:
        if isinstance(part, str):
            current = _below(current, part)
    return current


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names allowed at the table that ``path`` leads to."""
    found = next(_nested_models(_at(model, path)), None)
    return list(found.model_fields) if found else []


def _describe(error: dict[str, Any], model: type[BaseModel]) -> str:
    location = tuple(error["loc"])
    key = ".".join(map(str, location)) or "the document"
    if error["type"] != "extra_forbidden":
        hidden = error["type"] == "missing" or SecretStr in (
            kind := _at(model, location),
            *get_args(kind),
        )
        shown = "" if hidden else f" (got {error['input']!r})"
        said = error["msg"].removeprefix("Value error, ")
        for word, here in _WORDS.items():
            said = said.replace(word, here)
        return f"{key}: {said}{shown}"
    known = _fields_at(model, location[:-1])
    close = closest(str(location[-1]), known, cutoff=0.5)
    hint = f"did you mean {close!r}?" if close else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r}; {hint}"


def validate_config(
    document: Mapping[str, Any],
    model: type[ModelT],
    *,
    source: str,
    written: bool = False,
) -> ModelT:
    """Hold a TOML document against a schema that forbids extra keys.

    The file `source` is for the messages.

    Args:
        document: the tables and keys.
        model: the schema.
        source: where it comes from.
        written: whether all of it was written in TOML, so that true is no number, and "5" none
            either.

    Raises:
        ConfigError: it has a key that the schema does not know (with a suggestion), misses one, or
            a value of the wrong type; every problem is named.
    """
    if beyond := [key for key in _beyond(document) if written]:
        raise ConfigError(
            f"{source}: {', '.join(beyond)}: no whole number beyond 2**53, which messages do not hold"
        )
    try:
        if written:
            return model.model_validate_json(json.dumps(document, default=str), strict=True)
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_describe(dict(e), model) for e in error.errors()]
        raise ConfigError(f"{source}: " + "\n  ".join(["", *problems]).strip()) from error


def _beyond(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _beyond(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _beyond(item, key)
    elif isinstance(value, int) and abs(value) > _MOST and not key.endswith("seed"):
        yield key


def parse_config(text: str, model: type[ModelT], *, source: str) -> ModelT:
    """Read a configuration in TOML.

    No TOML is a ConfigError, and errors are those of `validate_config`.
    """
    return validate_config(_parsed(text, source), model, source=source, written=True)


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # of numbers with thousands of digits, and as many brackets
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; a ConfigError where it cannot be read or is no TOML."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    return _parsed(text, str(path))


def load_config(path: Path, model: type[ModelT]) -> ModelT:
    """Read a configuration file in TOML; errors as of `read_toml` and `validate_config`."""
    return validate_config(read_toml(path), model, source=str(path), written=True)
