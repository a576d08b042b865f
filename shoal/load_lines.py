"""Builds the lines of Python that load a file of weights: into the user's own class, or into
onnxruntime.
"""

import os
from pathlib import Path
from typing import Any

from broker_server.rounds.tier_version import TierVersion
from fleet_protocol.errors import BlobError
from fleet_protocol.manifest import BASE, Manifest
from models.own_class import Builder
from models.tier import Tier


def load_lines(
    found: TierVersion, file_format: str, path: Path, *, here: bool = True
) -> tuple[str, ...]:
    """Return lines that load a file and can run unchanged.

    Args:
        found: contents of the file.
        file_format: ``torch``, ``safetensors`` or ``onnx``.
        path: path of the file in the lines.
        here: whether the lines are for this machine, which has the user's files.

    Returns:
        Lines of Python; empty if the class has no importable name, or the file is not complete.
    """
    if file_format == "onnx":
        return _onnx_lines(found, path)
    if found.lacking and file_format == "safetensors":
        return ()
    try:
        noted = found.own_class
    except BlobError:
        return ()
    builder = noted[0].builder if noted is not None else None
    if builder is None or (noted is not None and noted[0].problem):
        return ()
    lines = [*_imports(builder, found, here=here), _building(builder, found)]
    if file_format == "torch":
        lines[:0] = ["import shoal, torch"]
        lines += [f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"]
    else:
        lines[:0] = [
            "import shoal",
            "from safetensors.torch import load_file",
            "from models.zoo.loading import load_weights",
        ]
        lines += [f"load_weights(model, {_files(found, path)})"]
    return (*lines, "model.eval()")


def _imports(builder: Builder, found: TierVersion, *, here: bool) -> list[str]:
    """The lines that import the class.

    None of them runs a file of the set, which may be somebody else's.
    """
    line = f"from {builder.module} import {builder.name}"
    if _is_of_set(builder, found):
        return [f"# {line}  # its file lies in the artifact set: read it before you import it"]
    if builder.file is None:
        return [line]
    file = Path(builder.file)
    if not (here and file.is_file()):
        return [f"{line}  # of {file.name!r}, which --models named: start Python in its folder"]
    if file.parent == Path.cwd():
        return [line]
    return [f"import sys; sys.path.append({str(file.parent)!r})", line]


def _is_of_set(builder: Builder, found: TierVersion) -> bool:
    """Whether the import would run a file in the folder of the exported architectures, itself or
    through links.
    """
    root = found.artifacts.folder.resolve().parents[1]
    places: list[Path] = []
    starts = [Path.cwd()]
    if builder.file is not None:
        file = Path(builder.file)
        places += [file, file.parent]
        starts += [file.parent]
    for start in starts:
        places += _imported(start, builder.module)
    return any(Path(os.path.realpath(place)).is_relative_to(root) for place in places)


def _imported(folder: Path, module: str) -> list[Path]:
    """What Python may run of a folder when it imports a module: files and packages on the way to
    it.
    """
    found: list[Path] = []
    for name in module.split("."):
        found += [*folder.glob(name), *folder.glob(f"{name}.*")]
        folder /= name
    return found


def _building(builder: Builder, found: TierVersion) -> str:
    tier = found.artifacts.tier
    given = [builder.name]
    if tier != Tier(1.0, 1):
        given.append(f"shoal.Tier({tier.width!r}, {tier.depth})")
    if builder.settings:
        given.append(f"settings={dict(builder.settings)!r}")
    if builder.converts:
        given.append("convert=False")
    return f"model = shoal.build({', '.join(given)})"


def _files(found: TierVersion, path: Path) -> str:
    """Return the expression that reads the tensors, including frozen ones in a separate file."""
    read = f"load_file({str(path)!r})"
    manifest = found.artifacts.manifest
    if not manifest.base:
        return read
    base = found.artifacts.path(manifest.files[BASE])
    return f"{{**load_file({str(base)!r}), **{read}}}"


def _onnx_lines(found: TierVersion, path: Path) -> tuple[str, ...]:
    manifest = found.artifacts.manifest
    shape = ", ".join(map(str, ("batch", *manifest.input_shape)))
    sizes = ", ".join(map(str, (1, *manifest.input_shape)))
    return (
        "import numpy, onnxruntime",
        f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])",
        f"x = numpy.zeros(({sizes}), numpy.{manifest.input_dtype})  # yours: [{shape}]{_preparing(found, manifest)}",
        "logits = session.run(None, {'x': x})[0]",
    )


def _preparing(found: TierVersion, manifest: Manifest) -> str:
    data: Any = found.config.evaluation.data
    if data is None or manifest.input_dtype == "int64":
        return ""
    plain = (data.scale, data.mean, data.std) == (1.0, 0.0, 1.0)
    return "" if plain else f", each (x * {data.scale!r} - {data.mean!r}) / {data.std!r}"
