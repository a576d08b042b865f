"""Reads TOML into frozen pydantic models; an unknown key is an error with a suggestion."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from fleet_protocol.errors import ConfigError
from fleet_protocol.nesting import is_deep
from fleet_protocol.python_files import FUNCTION_PATTERN, FUNCTION_RULE
from fleet_protocol.spelling import closest
from fleet_protocol.topics import NAME_PATTERN, NAME_RULE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ModelT = TypeVar("ModelT", bound=BaseModel)

_MOST = 2**53
_SHOWN = 200  # characters of a value in a message
# Pydantic's wording, and the wording for TOML.
_WORDS = {
    "a valid tuple": "a list, in [ ]",
    "a valid array": "a list, in [ ]",
    "an object": "a table",
    f"String should match pattern '{NAME_PATTERN}'": NAME_RULE,
    f"String should match pattern '{FUNCTION_PATTERN}'": FUNCTION_RULE,
}


def validate_config(
    document: Mapping[str, Any],
    model: type[ModelT],
    *,
    source: str,
    written: bool = False,
) -> ModelT:
    """Validate a TOML document with a schema that forbids extra keys.

    Args:
        document: the tables and keys.
        model: the schema.
        source: origin of the document, for messages.
        written: whether all of it was written in TOML, so that true and "5" are not numbers.

    Raises:
        ConfigError: it has an unknown key (with a suggestion), lacks a key, or has a value of the
            wrong type, is nested too deeply, or has a whole number beyond 2**53; the message names
            every problem.
    """
    if is_deep(document):
        raise ConfigError(f"{source}: its tables are nested too deeply")
    unseen = list(_keys_with_nul(document))
    if unseen:
        raise ConfigError(f"{source}: {', '.join(unseen)}: the text contains the character U+0000")
    too_large = list(_too_large_keys(document))
    if too_large:
        raise ConfigError(
            f"{source}: {', '.join(too_large)}: whole numbers beyond 2**53 are not "
            "supported, because messages cannot carry them"
        )
    try:
        # Values from a command line or a store may be texts.
        if written:
            # Strict JSON keeps true and "5" from counting as numbers; dates of TOML become texts.
            return model.model_validate_json(json.dumps(document, default=str), strict=True)
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_describe(dict(problem), model) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "\n  ".join(["", *problems]).strip()) from error


def parse_config(
    text: str,
    model: type[ModelT],
    *,
    source: str,
) -> ModelT:
    """Read a configuration in TOML.

    Raises:
        ConfigError: the text is not TOML, or see `validate_config`.
    """
    return validate_config(_parse_toml(text, source), model, source=source, written=True)


def _describe(error: dict[str, Any], model: type[BaseModel]) -> str:
    """Return a problem that pydantic has found, in TOML's terms."""
    location = tuple(error["loc"])
    key = ".".join(map(str, location)) or "the document"
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_key_hint(model, location)}"
    if error["type"] == "union_tag_invalid":
        return f"{key}: {_kind_hint(error['ctx'])}"
    message = error["msg"].removeprefix("Value error, ")
    for pydantic_words, toml_words in _WORDS.items():
        message = message.replace(pydantic_words, toml_words)
    if error["type"] == "missing" or _is_secret(model, location):
        return f"{key}: {message}"
    return f"{key}: {message} (got {_shown(error['input'])})"


def _shown(value: Any) -> str:
    """Return a value as in Python, its beginning if that is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _key_hint(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    *table, key = location
    allowed = _fields_at(model, tuple(table))
    similar = closest(str(key), allowed, cutoff=0.5)
    return f"did you mean {similar!r}?" if similar else f"known keys: {', '.join(sorted(allowed))}"


def _kind_hint(context: Mapping[str, str]) -> str:
    """Return the kind that the user may have meant."""
    kinds = [kind.strip("' ") for kind in context["expected_tags"].split(",")]
    similar = closest(context["tag"], kinds, cutoff=0.5)
    hint = f"did you mean {similar!r}?" if similar else f"known kinds: {', '.join(kinds)}"
    return f"unknown kind {context['tag']!r}; {hint}"


def _is_secret(model: type[BaseModel], location: tuple[int | str, ...]) -> bool:
    annotation = _annotation_at(model, location)
    return SecretStr in (annotation, *get_args(annotation))


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the names that are allowed in a table."""
    table = next(_nested_models(_annotation_at(model, location)), None)
    return list(table.model_fields) if table else []


def _annotation_at(model: type[BaseModel], location: tuple[int | str, ...]) -> object:
    """Return the type of the value at a location."""
    annotation: object = model
    for key in location:
        if isinstance(key, str):  # entries of a list have the type of the list
            annotation = _annotation_below(annotation, key)
    return annotation


def _annotation_below(annotation: object, key: str) -> object:
    """Return the type of a key: of a model's field, or of any entry of a table with free keys."""
    if get_origin(annotation) is Mapping:
        return get_args(annotation)[1]
    # For a union of models pydantic puts the `kind` that chooses one into the location.
    for tagged in _nested_models(annotation):
        kind = tagged.model_fields.get("kind")
        if kind is not None and kind.default == key:
            return tagged
    model = next(_nested_models(annotation), None)
    field = model.model_fields.get(key) if model else None
    return field.annotation if field else None


def _nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _nested_models(argument)


def _too_large_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of whole numbers that JSON cannot represent exactly; seeds do not count."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _too_large_keys(entry, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for entry in value:
            yield from _too_large_keys(entry, key)
    elif isinstance(value, int) and abs(value) > _MOST and not key.endswith("seed"):
        yield key


def _keys_with_nul(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of texts with U+0000, which no path, address or name can contain."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _keys_with_nul(entry, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for entry in value:
            yield from _keys_with_nul(entry, key)
    elif isinstance(value, str) and "\0" in value:
        yield key


_MADE_BY = {
    "fleet.toml": ", or create a project: `shoal init NAME --template vision`",
    "sim.toml": ", or create a project: `shoal init NAME --template vision`",
    "device.toml": "; on the server's computer, `shoal enroll NAME` writes one for a board",
}
"""How to create the files that commands read by default."""


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = tomllib.loads(text)
    # Thousands of brackets cause a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    return document


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: it is not UTF-8 text; save it as UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: there is no such file in"
            f" {path.absolute().parent}; name another with --config"
            f"{_MADE_BY.get(path.name, '')}"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    return _parse_toml(text, str(path))


def load_config(path: Path, model: type[ModelT]) -> ModelT:
    """Read a configuration file in TOML; errors as in `read_toml` and `validate_config`."""
    return validate_config(read_toml(path), model, source=str(path), written=True)
