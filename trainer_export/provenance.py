"""What a tier's files are made from, so that an export takes as they are those that would come out
the same again.

Beside them lies a record: facts about the model, the recipe and the code, and the digest of every
file. The model is described by what was built, its modules with their numbers and the content of
their buffers; the code by the exporter's files and by those that the modules are in and have from
elsewhere; installed packages are not followed.
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

import fleet_protocol
import models
from fleet_protocol.manifest import digest_of
from models.tier import Tier
from trainer_export.exported import Export
from trainer_export.manifests import versions

MADE_FROM = "made-from.json"
"""Name of the record beside a tier's other files."""

_FOLDERS = (*models.__path__, *fleet_protocol.__path__, str(Path(__file__).parent))
_PLAIN = (bool, int, float, str, tuple, type(None))
_INSTALLED = tuple(
    sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")
)
_TORCH = str(Path(torch.__file__).parent)


def facts_of(
    export: Export, tier: Tier, module: nn.Module, formats: Sequence[str]
) -> dict[str, Any]:
    """Everything that a tier's files are a function of."""
    own = {key: classes for key, classes in export.layout.heads.items() if key == tier.id}
    recipe = export.recipe
    parts = (recipe.loss, recipe.optimizer, *recipe.metrics)
    functions = (
        export.arch.build,
        *(getattr(item, "function", None) for item in parts),
    )
    facts = {
        "tier": tier.id,
        "formats": list(formats),
        "seed": export.seed,
        "layout": _digest(replace(export.layout, heads=own).to_json().encode()),
        "model": _digest(*_described(module)),
        "recipe": repr(recipe),
        "code": code_of(functions, (type(item).__module__ for item in (*module.modules(), *parts))),
        "versions": versions(),
    }
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def code_of(functions: Iterable[Any], modules: Iterable[str] = ()) -> str:
    """Digest of the exporter's files, and of those that functions and modules are in and have
    something from.
    """
    names = (name for item in functions for name in _defined(item))
    return _digest(*(path.read_bytes() for path in _files([*names, *modules])))


def record_of(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """What is kept beside a tier's other files."""
    return json.dumps(
        {"facts": facts, "files": _digests(folder)}, indent=1, sort_keys=True
    ).encode()


def unchanged(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a tier's files are whole and made from these facts, as :func:`record_of` noted them."""
    try:
        known = json.loads((folder / MADE_FROM).read_bytes())
    except (OSError, ValueError):
        return False
    found = _digests(folder)
    found.pop(MADE_FROM)
    return bool(known == {"facts": facts, "files": found})


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest_of(path.read_bytes()) for path in files}


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _described(module: nn.Module) -> Iterator[bytes]:
    for path, item in module.named_modules():
        plain = {key: value for key, value in vars(item).items() if isinstance(value, _PLAIN)}
        yield repr(
            (path, type(item).__qualname__, item.extra_repr(), sorted(plain.items()))
        ).encode()
    for name, value in module.named_parameters():
        yield repr((name, tuple(value.shape), value.requires_grad)).encode()
    for name, buffer in module.named_buffers():
        yield (
            repr((name, str(buffer.dtype), tuple(buffer.shape))).encode()
            + buffer.detach().cpu().numpy().tobytes()
        )


def _defined(value: Any) -> Iterator[str]:
    """The modules that a builder comes from, through functions that wrap it and what these hold."""
    if isinstance(value, FunctionType):
        yield value.__module__
        for cell in value.__closure__ or ():
            held = cell.cell_contents
            yield from _defined(getattr(held, "build", held))


def _files(names: Iterable[str]) -> list[Path]:
    """The exporter's files, and those of some modules.

    Of modules that are not installed what they have from others.
    """
    found = {path for folder in _FOLDERS for path in Path(folder).rglob("*.py")}
    waiting = list(names)
    while waiting:
        module = sys.modules.get(waiting.pop())
        path = getattr(module, "__file__", None) or ""
        if (
            module is None
            or not path.endswith(".py")
            or path.startswith(_TORCH)
            or Path(path) in found
        ):
            continue
        found.add(Path(path))
        if path.startswith(_INSTALLED):
            continue
        waiting += [
            value.__name__
            if isinstance(value, ModuleType)
            else str(getattr(value, "__module__", ""))
            for value in list(vars(module).values())
        ]
        for node in ast.walk(
            ast.parse(Path(path).read_bytes())
        ):  # a constant does not say where it is from
            if isinstance(node, ast.ImportFrom):
                above = str(module.__package__).rsplit(".", node.level - 1)[0] if node.level else ""
                waiting.append(f"{above}.{node.module}".strip("."))
    return sorted(found)
