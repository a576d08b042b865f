"""Builds lines of Python that load weights into the user's class or into onnxruntime."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from broker_server.rounds.tier_version import TierVersion
from fleet_protocol.errors import BlobError
from fleet_protocol.manifest import BASE, Manifest
from models.own_class import Builder
from models.package_form import PackageBuild
from models.tier import Tier
from shoal.package_folders import ADAPTER_BASE, form_of

_MOST_LETTERS = 2000  # of the names of labels or columns


def load_lines(
    content: TierVersion, file_format: str, path: Path, *, here: bool = True
) -> tuple[str, ...]:
    """Return lines that load a file; they run unchanged.

    Comments at their end say how a sample becomes an input, and what the outputs mean.

    Args:
        content: the contents of the file.
        file_format: ``torch``, ``safetensors``, ``onnx``, or a folder, ``transformers`` or
            ``peft``.
        path: path of the file or folder in the lines.
        here: whether the lines are for this machine, which has the user's files.

    Returns:
        Lines of Python; empty if the class has no importable name, or the file is incomplete.
    """
    # ONNX Runtime needs no class.
    if file_format == "onnx":
        return (*_onnx_lines(content, path), *_meanings(content))
    if file_format in _FOLDER_LINES:
        lines = _FOLDER_LINES[file_format](form_of(content).class_name, path)
        return (*lines, *_meanings(content))
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
    if description.problem:
        return ()
    if description.package is not None:
        building = [_package_building(description.package)]
    elif builder is not None:
        building = [*_imports(builder, content, here=here), _building(builder, content)]
    else:
        return ()
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
    return (*libraries, *building, load, "model.eval()", *_meanings(content))


def _transformers_lines(class_name: str, folder: Path) -> tuple[str, ...]:
    return (
        f"from transformers import {class_name}",
        f"model = {class_name}.from_pretrained({str(folder)!r})",
    )


def _peft_lines(class_name: str, folder: Path) -> tuple[str, ...]:
    base = str(folder / ADAPTER_BASE)
    return (
        "from peft import PeftModel",
        f"from transformers import {class_name}",
        f"base = {class_name}.from_pretrained({base!r})",
        f"model = PeftModel.from_pretrained(base, {str(folder)!r})",
    )


_FOLDER_LINES: Mapping[str, Callable[[str, Path], tuple[str, ...]]] = MappingProxyType(
    {"transformers": _transformers_lines, "peft": _peft_lines}
)
"""Lines that load a folder, by its format."""


def _package_building(package: PackageBuild) -> str:
    """Return the line that builds the model of a package by its SPEC."""
    arguments = f", {dict(package.arguments)!r}" if package.arguments else ""
    return (
        f"model = shoal.package_model({package.spec!r}{arguments}).build({dict(package.sizes)!r})"
    )


def _imports(builder: Builder, content: TierVersion, *, here: bool) -> list[str]:
    """Return the lines that import the class.

    No line runs a file of the artifact set, because somebody else may have written it.
    """
    line = f"from {builder.module} import {builder.name}"
    if _is_of_set(builder, content):
        return [f"# {line}  # its file is part of the artifact set: read it before you import it"]
    if builder.file is None:
        return [line]
    file = Path(builder.file)
    if not (here and file.is_file()):
        return [f"{line}  # from {file.name!r}, which --models named: start Python in its folder"]
    if file.parent == Path.cwd():
        return [line]
    return [f"import sys; sys.path.append({str(file.parent)!r})", line]


def _is_of_set(builder: Builder, content: TierVersion) -> bool:
    """Return whether the import would run a file of the exported sets, also through links."""
    # Three folders: all sets, an architecture, a tier.
    root = content.artifacts.folder.resolve().parents[1]
    places: list[Path] = []
    starts = [Path.cwd()]
    if builder.file is not None:
        file = Path(builder.file)
        places += [file, file.parent]
        starts += [file.parent]
    # Python searches the working folder and the file's folder for the module.
    for start in starts:
        places += _importable(start, builder.module)
    # A link could lead from a trusted folder into the set.
    return any(Path(os.path.realpath(place)).is_relative_to(root) for place in places)


def _importable(folder: Path, module: str) -> list[Path]:
    """Return the files and packages of a folder that importing a module may run."""
    paths: list[Path] = []
    for name in module.split("."):
        # Each level of the dotted name may be a package, a module or a compiled module.
        paths += [*folder.glob(name), *folder.glob(f"{name}.*")]
        folder /= name
    return paths


def _building(builder: Builder, content: TierVersion) -> str:
    """Return the line that builds the model."""
    tier = content.artifacts.tier
    arguments = [builder.name]
    # `shoal.build` builds the whole model by default.
    if tier != Tier(1.0, content.depth):
        arguments.append(f"shoal.Tier({tier.width!r}, {tier.depth})")
    if builder.settings:
        arguments.append(f"settings={dict(builder.settings)!r}")
    # The file has the names that the class has before its conversion.
    if builder.converts:
        arguments.append("convert=False")
    return f"model = shoal.build({', '.join(arguments)})"


def _tensors(content: TierVersion, path: Path) -> str:
    """Return the expression that reads the tensors; frozen ones come from their own file."""
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
    return (
        "import numpy, onnxruntime",
        f"session = {session}",
        f"x = {sample}  # yours: [{shape}]",
        "logits = session.run(None, {'x': x})[0]",
    )


def _meanings(content: TierVersion) -> tuple[str, ...]:
    """Return comments that say what the model's inputs and outputs mean."""
    manifest = content.artifacts.manifest
    sizes = ", ".join(["batch", *map(str, manifest.input_shape)])
    lines = [f"# input: {manifest.input_dtype} [{sizes}]{_preparation(content, manifest)}"]
    contract = content.config.contract
    if contract is not None and contract.columns:
        lines.append(f"# columns of the input, in order: {_listed(contract.columns)}")
    if contract is not None and contract.missing is not None:
        value = "a missing value of a column"
        if manifest.input_dtype == "int64":
            value = "the token that pads short texts"
        lines.append(f"# {value}: {contract.missing!r}")
    if contract is not None and contract.labels:
        lines.append(f"# labels of the outputs, in order: {_listed(contract.labels)}")
    return tuple(lines)


def _listed(names: Sequence[str]) -> str:
    """Return names on one line, of a long list its beginning.

    The lines travel with the file from a page, in a header of bounded size.
    """
    text = ", ".join(names)
    if len(text) <= _MOST_LETTERS:
        return text
    return f"{text[:_MOST_LETTERS]}... ({len(names)} in all, see contract in `shoal runs --json`)"


def _preparation(content: TierVersion, manifest: Manifest) -> str:
    """Return how to convert a sample into an input, as text; empty if no conversion is needed."""
    data: Any = content.config.evaluation.data
    # Tokens are whole numbers, which are not scaled.
    if data is None or manifest.input_dtype == "int64":
        return ""
    steps = ""
    if data.transforms:
        steps = f", all through {', '.join(map(str, data.transforms))}"
    if (data.scale, data.mean, data.std) != (1.0, 0.0, 1.0):
        steps += f", each (x * {data.scale!r} - {data.mean!r}) / {data.std!r}"
    return steps
