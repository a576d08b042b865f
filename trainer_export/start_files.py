"""Reads the tensors that a model starts from: safetensors, and files of torch.

Files of torch are read only with PyTorch's tensor reader (``weights_only``), which runs no code.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fleet_protocol.errors import ConfigError
from fleet_protocol.foreign_files import name_problem, quoted

# Checkpoints contain numpy numbers besides the tensors, such as the best accuracy. Creating a
# number or an array of numbers runs no code of the file.
_NUMBERS = (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_)

_USUAL_KEYS = ("state_dict", "model_state_dict", "model")
"""Common keys of a model's tensors in checkpoints that also contain an optimizer."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNSUPPORTED = re.compile(r"GLOBAL (\S+)")
"""The message of PyTorch's tensor reader about a class that it refuses."""

_INDEX = ".index.json"
_CHECKPOINTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files that name or hold the tensors in a folder of a model, those first that are preferred."""
_SHOWN = 3  # names in a message

Array = NDArray[np.float32]


def read_start(path: Path) -> dict[str, Array]:
    """Read the tensors of a file, or of a folder with a checkpoint.

    Args:
        path: a ``.safetensors`` file; one of ``torch.save`` (``.pt``, ``.bin``, ``.pth``) with
            tensors by name, as they are or under a key such as ``state_dict``; the index of a
            checkpoint in several files; or a folder that has one of these.

    Returns:
        Float32 arrays by name; numbers of other float types are converted.

    Raises:
        ConfigError: the file is missing, or does not contain tensors by name.
    """
    if path.is_dir():
        return read_start(_checkpoint_in(path))
    if path.name.endswith(_INDEX):
        return _read_shards(path)
    return _read_file(path)


def _checkpoint_in(folder: Path) -> Path:
    """Return the file of a folder that names or holds the tensors of a checkpoint."""
    for name in _CHECKPOINTS:
        if (folder / name).is_file():
            return folder / name
    alone = sorted(folder.glob("*.safetensors"))
    # One file needs no name; with several, any choice could be the wrong one.
    if len(alone) == 1:
        return alone[0]
    content = ", ".join(path.name for path in alone[:_SHOWN]) or "none"
    raise ConfigError(
        f"{folder} is neither a store nor the folder of a checkpoint, which has"
        f" {_CHECKPOINTS[0]}, {_CHECKPOINTS[1]} or one other .safetensors file; it has {content}."
        " Name the file with the tensors"
    )


def _read_shards(index: Path) -> dict[str, Array]:
    """Read the tensors of all files that the index of a checkpoint names."""
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        names = dict.fromkeys(files.values())
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{index} is not the index of a checkpoint ({error!r}): it must be JSON with"
            ' "weight_map", which has the file of each tensor; download it again'
        ) from error
    tensors: dict[str, Array] = {}
    for name in names:
        problem = name_problem(str(name))
        if problem is not None:
            raise ConfigError(
                f"{index} names {quoted(str(name))} as a file of the checkpoint: {problem}; only"
                " files beside the index are read"
            )
        shard = index.parent / str(name)
        if not shard.is_file():
            raise ConfigError(
                f"{index} names {name}, which is not beside it; download all {len(names)} files of"
                " the checkpoint"
            )
        # Shards have different tensors, so their order does not matter.
        tensors |= _read_file(shard)
    absent = [name for name in files if name not in tensors]
    # Indexes also name buffers of integers, such as counters of batches, which no model is started
    # from.
    integers = _names_without_floats(index.parent, files, absent)
    missing = [name for name in absent if name not in integers]
    if missing:
        raise ConfigError(
            f"{index}: {len(missing)} of its tensors are not in their files, {missing[0]} is not in"
            f" {files[missing[0]]}; download the checkpoint again"
        )
    return tensors


def _names_without_floats(
    folder: Path,
    files: Mapping[str, str],
    names: Sequence[str],
) -> set[str]:
    """Return which of some tensors their files have, but not as floats, which are not read."""
    present: set[str] = set()
    for name in names:
        content = _load(folder / files[name])
        if name in _entries(content):
            present.add(name)
    return present


def _read_file(path: Path) -> dict[str, Array]:
    """Read the tensors of one file."""
    content = _load(path)
    by_key = {}
    for key, inner in _entries(content).items():
        floats = _floats_in(inner)
        if floats:
            by_key[key] = floats
    # Checkpoints of training programs also contain the state of an optimizer, under another key.
    for key in _USUAL_KEYS:
        if key in by_key:
            return by_key[key]
    floats = _floats_in(content)
    if floats:
        return floats
    if len(by_key) == 1:
        return next(iter(by_key.values()))
    if by_key:
        keys = ", ".join(map(repr, by_key))
        raise ConfigError(
            f"{path} contains tensors under several keys, {keys}; save only those of the model:"
            " torch.save(checkpoint[KEY], FILE)"
        )
    raise ConfigError(
        f"{path} does not contain float tensors by name; use the state_dict of a model"
    )


def _load(path: Path) -> Any:
    """Read a file by the reader of its format."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # A file of torch is a pickle: only tensors and these types are created, and no code runs.
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    # The errors of torch for other files have no common base class.
    except Exception as error:
        raise ConfigError(f"cannot read the tensors in {path}: {_reason(error)}") from error


def _numpy_globals() -> list[Any]:
    """Return the numpy types that PyTorch's reader may create: numbers and their arrays."""
    make_number = np.float64(0).__reduce__()[0]
    make_array = np.zeros(0).__reduce__()[0]
    kinds = [type(np.dtype(number)) for number in _NUMBERS]
    return [make_number, make_array, np.dtype, np.ndarray, *kinds]


def _reason(error: Exception) -> str:
    """Return why a file cannot be read and what to do, in one line without colours."""
    # Messages of torch are written for a terminal.
    text = _COLOURS.sub("", str(error))
    unsupported = _UNSUPPORTED.search(text)
    if unsupported is not None:
        return (
            f"it contains a {unsupported[1]}, which only code of that class can read; save only"
            " the tensors: torch.save(model.state_dict(), FILE)"
        )
    lines = text.splitlines()
    is_sentence = bool(lines) and re.search(r"[a-z]", lines[0])
    problem = lines[0].strip() if is_sentence else "it is damaged, or was not written by torch.save"
    return f"{problem}; use a .safetensors file, or a state_dict written by torch.save"


def _entries(content: Any) -> Mapping[Any, Any]:
    """Return the entries of a checkpoint; empty if it is not a dictionary."""
    return content if isinstance(content, dict) else {}


def _floats_in(content: Any) -> dict[str, Array]:
    """Return the float tensors of a dictionary by name."""
    floats = {}
    for name, value in _entries(content).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            # Weights are float32 in every set, whatever the file's precision.
            floats[str(name)] = value.detach().float().numpy()
    return floats
