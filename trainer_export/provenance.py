"""Records the inputs of a tier's files, so that an export can reuse unchanged files.

The record beside the files has facts about the model, the recipe and the code, and the digest of
every file. The facts about the model are its built modules with their numbers and the content of
their buffers. The facts about the code are the exporter's files, and the files of the modules and
of their imports, except for installed packages.
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
    export: Export,
    tier: Tier,
    module: nn.Module,
    formats: Sequence[str],
) -> dict[str, Any]:
    """Return all inputs of a tier's files."""
    own = {}
    for key, classes in export.layout.heads.items():
        # Heads of other tiers do not change this tier's files.
        if key == tier.id:
            own[key] = classes
    recipe = export.recipe
    records = (recipe.loss, recipe.optimizer, *recipe.metrics)
    functions: list[Any] = [export.arch.build]
    for record in records:
        functions.append(getattr(record, "function", None))
    modules = []
    for member in (*module.modules(), *records):
        # Also layers of the user that live in other files than the builder.
        modules.append(type(member).__module__)
    facts = {
        "tier": tier.id,
        "formats": list(formats),
        "seed": export.seed,
        "layout": _digest(replace(export.layout, heads=own).to_json().encode()),
        "model": _digest(*_described(module)),
        "recipe": repr(recipe),
        "code": code_of(functions, modules),
        "versions": versions(),
    }
    # Round-tripped, to be comparable with a record that was read.
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def code_of(functions: Iterable[Any], modules: Iterable[str] = ()) -> str:
    """Return the digest of all files that an export depends on.

    They are the exporter's files, and the files of functions, modules and their imports.
    """
    names = list(modules)
    for function in functions:
        names += _modules_behind(function)
    return _digest(*(path.read_bytes() for path in _files(names)))


def record_of(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """Return the record beside a tier's other files."""
    record = {"facts": facts, "files": _digests(folder)}
    return json.dumps(record, indent=1, sort_keys=True).encode()


def unchanged(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether a tier's files are complete and match these facts, by :func:`record_of`."""
    try:
        record = json.loads((folder / MADE_FROM).read_bytes())
    except (OSError, ValueError):
        return False
    files = _digests(folder)
    # A half-written set has no record, or one whose digests differ.
    files.pop(MADE_FROM)  # the record does not contain its own digest
    return bool(record == {"facts": facts, "files": files})


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {}
    for path in files:
        digests[str(path.relative_to(folder))] = digest_of(path.read_bytes())
    return digests


def _digest(*contents: bytes) -> str:
    """Return one digest of several contents, separated by their lengths."""
    digest = hashlib.sha256()
    for content in contents:
        # Without lengths, contents that are cut elsewhere would have the same digest.
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _described(module: nn.Module) -> Iterator[bytes]:
    """Yield the parts of a built model: modules with their numbers, parameters, buffers."""
    for path, member in module.named_modules():
        plain = {}
        for key, value in vars(member).items():
            # Numbers such as a dropout's rate change a graph without changing a tensor.
            if isinstance(value, _PLAIN):
                plain[key] = value
        title = type(member).__qualname__
        yield repr((path, title, member.extra_repr(), sorted(plain.items()))).encode()
    for name, parameter in module.named_parameters():
        yield repr((name, tuple(parameter.shape), parameter.requires_grad)).encode()
    for name, buffer in module.named_buffers():
        head = repr((name, str(buffer.dtype), tuple(buffer.shape))).encode()
        yield head + buffer.detach().cpu().numpy().tobytes()


def _modules_behind(value: Any) -> Iterator[str]:
    """Yield the modules of a builder and of the functions that wrap it."""
    if isinstance(value, FunctionType):
        yield value.__module__
        for cell in value.__closure__ or ():
            content = cell.cell_contents
            yield from _modules_behind(getattr(content, "build", content))


def _files(names: Iterable[str]) -> list[Path]:
    """Return the exporter's files, and those of some modules.

    The imports of modules that are not installed are followed.
    """
    files: set[Path] = set()
    for folder in _FOLDERS:
        files.update(Path(folder).rglob("*.py"))
    waiting = list(names)
    while waiting:
        module = sys.modules.get(waiting.pop())
        path = getattr(module, "__file__", None) or ""
        if module is None or not path.endswith(".py") or path.startswith(_TORCH):
            continue
        if Path(path) in files:
            continue
        files.add(Path(path))
        if not path.startswith(_INSTALLED):
            waiting += _imported_by(module, Path(path))
    return sorted(files)


def _imported_by(module: ModuleType, path: Path) -> list[str]:
    """Return the names of the modules from which a module imports."""
    names = []
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            names.append(value.__name__)
        else:
            names.append(str(getattr(value, "__module__", "")))
    # A constant does not record its module, so import statements are read, too.
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            above = str(module.__package__).rsplit(".", node.level - 1)[0] if node.level else ""
            names.append(f"{above}.{node.module}".strip("."))
    return names
