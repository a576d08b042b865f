"""Builds lines of Python that load a file of weights into the user's own class or onnxruntime."""

import os
from pathlib import Path
from typing import Any

from broker_server.rounds.tier_version import TierVersion
from fleet_protocol.errors import BlobError
from fleet_protocol.manifest import BASE, Manifest
from models.own_class import Builder
from models.tier import Tier


def load_lines(
    content: TierVersion, file_format: str, path: Path, *, here: bool = True
) -> tuple[str, ...]:
    """Return lines that load a file and can run unchanged.

    Args:
        content: what the file holds.
        file_format: ``torch``, ``safetensors`` or ``onnx``.
        path: path of the file in the lines.
        here: whether the lines are for this machine, which has the user's files.

    Returns:
        Lines of Python; empty if the class has no importable name, or the file is not complete.
    """
    if file_format == "onnx":
        return _onnx_lines(content, path)
    if content.lacking and file_format == "safetensors":
        return ()
    try:
        own_class = content.own_class
    except BlobError:
        return ()
    if own_class is None:
        return ()
    description, _ = own_class
    builder = description.builder
    if builder is None or description.problem:
        return ()
    lines = [*_imports(builder, content, here=here), _building(builder, content)]
    if file_format == "torch":
        libraries = ["import shoal, torch"]
        load = f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"
    else:
        libraries = [
            "import shoal",
            "from safetensors.torch import load_file",
            "from models.zoo.loading import load_weights",
        ]
        load = f"load_weights(model, {_tensors(content, path)})"
    return (*libraries, *lines, load, "model.eval()")


def _imports(builder: Builder, content: TierVersion, *, here: bool) -> list[str]:
    """Return the lines that import the class.

    None of them runs a file of the artifact set, which may have another author.
    """
    line = f"from {builder.module} import {builder.name}"
    if _is_of_set(builder, content):
        return [f"# {line}  # its file lies in the artifact set: read it before you import it"]
    if builder.file is None:
        return [line]
    file = Path(builder.file)
    if not (here and file.is_file()):
        return [f"{line}  # of {file.name!r}, which --models named: start Python in its folder"]
    if file.parent == Path.cwd():
        return [line]
    return [f"import sys; sys.path.append({str(file.parent)!r})", line]


def _is_of_set(builder: Builder, content: TierVersion) -> bool:
    """Return whether the import would run a file of the exported sets, also through links."""
    root = content.artifacts.folder.resolve().parents[1]
    places: list[Path] = []
    starts = [Path.cwd()]
    if builder.file is not None:
        file = Path(builder.file)
        places += [file, file.parent]
        starts += [file.parent]
    for start in starts:
        places += _importable(start, builder.module)
    return any(Path(os.path.realpath(place)).is_relative_to(root) for place in places)


def _importable(folder: Path, module: str) -> list[Path]:
    """Return the files and packages of a folder that importing a module may run."""
    paths: list[Path] = []
    for name in module.split("."):
        paths += [*folder.glob(name), *folder.glob(f"{name}.*")]
        folder /= name
    return paths


def _building(builder: Builder, content: TierVersion) -> str:
    """Return the line that builds the model."""
    tier = content.artifacts.tier
    arguments = [builder.name]
    if tier != Tier(1.0, 1):
        arguments.append(f"shoal.Tier({tier.width!r}, {tier.depth})")
    if builder.settings:
        arguments.append(f"settings={dict(builder.settings)!r}")
    if builder.converts:
        arguments.append("convert=False")
    return f"model = shoal.build({', '.join(arguments)})"


def _tensors(content: TierVersion, path: Path) -> str:
    """Return the expression that reads the tensors, with frozen ones from their own file."""
    trained = f"load_file({str(path)!r})"
    manifest = content.artifacts.manifest
    if not manifest.base:
        return trained
    base = content.artifacts.path(manifest.files[BASE])
    return f"{{**load_file({str(base)!r}), **{trained}}}"


def _onnx_lines(content: TierVersion, path: Path) -> tuple[str, ...]:
    """Return lines that run the model of an ONNX file."""
    manifest = content.artifacts.manifest
    inner = [str(size) for size in manifest.input_shape]
    shape = ", ".join(["batch", *inner])
    sizes = ", ".join(["1", *inner])
    session = f"onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    sample = f"numpy.zeros(({sizes}), numpy.{manifest.input_dtype})"
    meaning = f"yours: [{shape}]{_preparation(content, manifest)}"
    return (
        "import numpy, onnxruntime",
        f"session = {session}",
        f"x = {sample}  # {meaning}",
        "logits = session.run(None, {'x': x})[0]",
    )


def _preparation(content: TierVersion, manifest: Manifest) -> str:
    """Return how a sample becomes an input, in words; empty where it is one."""
    data: Any = content.config.evaluation.data
    if data is None or manifest.input_dtype == "int64":
        return ""
    if (data.scale, data.mean, data.std) == (1.0, 0.0, 1.0):
        return ""
    return f", each (x * {data.scale!r} - {data.mean!r}) / {data.std!r}"
