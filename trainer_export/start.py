"""Initial weights from a file or an earlier run, by the model's own names or renamed ones.

Files of torch are read by PyTorch's own reader of tensors alone (``weights_only``), which runs
nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import did_you_mean

_SHOWN = 3  # names in a message

# Checkpoints keep numbers of numpy beside the tensors, such as the best accuracy. Making a number
# or an array of numbers runs no code of the file.
_NUMBERS = (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_)

_USUAL_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys under which people store the tensors of the model, beside those of an optimizer."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNSUPPORTED = re.compile(r"GLOBAL (\S+)")
"""How PyTorch's reader of tensors names a class that it does not make."""

# How far a buffer of a file may be from the model's own, which half precision rounds.
_BUFFER_RELATIVE = 4e-3
_BUFFER_ABSOLUTE = 1e-6

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Start:
    """What a model starts from.

    Attributes:
        tensors: by the names they have there.
        source: where they are from, for messages.
        names: pairs of a name there and one of the model; a ``*`` in both stands for the same text.
            The first that matches counts, and a name that none matches stays.
        partial: whether tensors of the model may be missing there, or have another shape, and keep
            what was drawn; and whether there may be more than the model has.
    """

    tensors: Mapping[str, Array]
    source: str
    names: Sequence[tuple[str, str]] = ()
    partial: bool = False

    def put_into(
        self,
        weights: Mapping[str, Array],
        further: Mapping[str, str | NDArray[np.generic]] = MappingProxyType({}),
    ) -> dict[str, Array]:
        """Return the weights of a model, as they were drawn, with what this has of them.

        Args:
            weights: by the first name of each.
            further: other names that a state of the model has, to the first one; to the values of
                buffers, which the model makes itself; empty for those that it does not use.

        Raises:
            ConfigError: two tensors get one name, what is one in the model differs, a buffer has
                other values, none fits, or without `partial` not all fit; the message names some.
        """
        offered = self._by_our_names()
        for name in offered.keys() & further.keys() - weights.keys():
            first = further[name]
            value = offered.pop(name)
            if not isinstance(first, str):
                self._refuse_buffer(name, first, value)
            elif first and not np.array_equal(offered.setdefault(first, value), value):
                raise ConfigError(
                    f"{self.source}: {name} is not {first} there, and both are one tensor of the"
                    " model"
                )
        common = weights.keys() & offered.keys()
        fitting = set()
        for name in common:
            if weights[name].shape == offered[name].shape:
                fitting.add(name)
        all_fit = fitting == weights.keys() | offered.keys()
        if not fitting or not (self.partial or all_fit):
            raise ConfigError(f"{self.source}: {self._misfit(weights, offered, fitting)}")
        merged = dict(weights)
        for name in weights:
            if name in fitting:
                merged[name] = offered[name]
        return merged

    def _by_our_names(self) -> dict[str, Array]:
        """Return the tensors by the names that the model has for them."""
        tensors: dict[str, Array] = {}
        for name, value in self.tensors.items():
            ours = self._renamed(name)
            if ours in tensors:
                raise ConfigError(
                    f"{self.source}: two tensors would be {ours}, {name} is one; make the names"
                    " differ"
                )
            tensors[ours] = value
        return tensors

    def _refuse_buffer(self, name: str, buffer: NDArray[np.generic], value: Array) -> None:
        """Refuse a file whose buffer is not the model's, which makes it anew."""
        same = self.partial
        if buffer.shape == value.shape:
            same = np.allclose(buffer, value, _BUFFER_RELATIVE, _BUFFER_ABSOLUTE, equal_nan=True)
        if not same:
            raise ConfigError(
                f"{self.source}: the buffer {name} is another than the model's, which would be"
                " exported: let the model have that of the file, or make it a parameter with"
                " requires_grad=False"
            )

    def _renamed(self, name: str) -> str:
        """Return the model's name of a tensor: by the first pair that matches, else its own."""
        for theirs, ours in self.names:
            head, star, tail = theirs.partition("*")
            matches = name == theirs
            if star:
                # A start and an end that overlap in the name leave nothing for the star.
                long_enough = len(name) >= len(head + tail)
                matches = long_enough and name.startswith(head) and name.endswith(tail)
            if matches:
                return ours.replace("*", name[len(head) : len(name) - len(tail)])
        return name

    def _misfit(
        self,
        weights: Mapping[str, Any],
        offered: Mapping[str, Any],
        fitting: set[str],
    ) -> str:
        """Return what does not fit, and the options that say so."""
        common = weights.keys() & offered.keys()
        unlike = []
        for name in sorted(common - fitting):
            unlike.append(
                f"{name} is {list(offered[name].shape)} and should be {list(weights[name].shape)}"
            )
        missing = sorted(weights.keys() - offered.keys())
        additional = sorted(offered.keys() - weights.keys())
        reasons = unlike[:_SHOWN]
        if missing:
            reasons.append(f"{len(missing)} tensors of the model are not there ({_some(missing)})")
        if additional:
            hint = did_you_mean(additional[0], weights)
            reasons.append(f"{len(additional)} are not the model's ({_some(additional)}){hint}")
        prefix = _prefix_of(additional, weights) or "model."
        return (
            f"{'; '.join(reasons)}. Say what is called otherwise with --start-name THEIRS=OURS,"
            f" such as '{prefix}*=*', or take what fits with --start-partial"
        )


def read_start(path: Path) -> dict[str, Array]:
    """Read the tensors of a file.

    Args:
        path: a ``.safetensors`` file, or one of ``torch.save`` (``.pt``, ``.bin``, ``.pth``) with
            tensors by name, as they are or under a key such as ``state_dict``.

    Returns:
        Float32 arrays by name; numbers of other float types are converted.

    Raises:
        ConfigError: it is not there, or holds anything but tensors by name.
    """
    content = _load(path)
    by_key = {}
    for key, inner in _entries(content).items():
        floats = _floats_in(inner)
        if floats:
            by_key[key] = floats
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
            f"{path} holds tensors under several keys, {keys}; save those of the model alone:"
            " torch.save(checkpoint[KEY], FILE)"
        )
    raise ConfigError(f"{path} holds no float tensors by name; give the state_dict of a model")


def _load(path: Path) -> Any:
    """Read a file by the reader of its format."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    # What torch raises for a file of anything else has no base class of its own.
    except Exception as error:
        raise ConfigError(f"cannot read the tensors in {path}: {_reason(error)}") from error


def _numpy_globals() -> list[Any]:
    """Return what PyTorch's reader of tensors may make of numpy: numbers, and arrays of them."""
    make_number = np.float64(0).__reduce__()[0]
    make_array = np.zeros(0).__reduce__()[0]
    kinds = [type(np.dtype(number)) for number in _NUMBERS]
    return [make_number, make_array, np.dtype, np.ndarray, *kinds]


def _reason(error: Exception) -> str:
    """Return why a file cannot be read, in one line without colours, and what to do."""
    text = _COLOURS.sub("", str(error))
    unsupported = _UNSUPPORTED.search(text)
    if unsupported is not None:
        return (
            f"it holds a {unsupported[1]}, which only code of that class could read; save the"
            " tensors alone: torch.save(model.state_dict(), FILE)"
        )
    lines = text.splitlines()
    is_sentence = bool(lines) and re.search(r"[a-z]", lines[0])
    what = lines[0].strip() if is_sentence else "it is damaged, or no file of torch.save"
    return f"{what}; give a .safetensors file, or one that torch.save wrote of a state_dict"


def _entries(content: Any) -> Mapping[Any, Any]:
    """Return the entries of a checkpoint, none if it is no dictionary."""
    return content if isinstance(content, dict) else {}


def _floats_in(content: Any) -> dict[str, Array]:
    """Return the float tensors of a dictionary by name."""
    floats = {}
    for name, value in _entries(content).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            floats[str(name)] = value.detach().float().numpy()
    return floats


def _prefix_of(names: Sequence[str], weights: Mapping[str, Any]) -> str:
    """Return what stands before the model's own name in each of some names; empty if nothing."""
    if not names:
        return ""
    for name in weights:
        prefix = names[0].removesuffix(name)
        if prefix == names[0]:
            continue
        if all(other.startswith(prefix) for other in names):
            return prefix
    return ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
