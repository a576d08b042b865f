"""Initial weights from a file or an earlier run: by the model's own names, by renamed ones, all of
them or some.

Files of torch are read by PyTorch's own reader of tensors alone (``weights_only``), which runs
nothing.
"""

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

_INSIDE = (
    "state_dict",
    "model_state_dict",
    "model",
)  # keys under which people store the tensors of a checkpoint
_SHOWN = 3


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

    tensors: Mapping[str, NDArray[np.float32]]
    source: str
    names: Sequence[tuple[str, str]] = ()
    partial: bool = False

    def put_into(
        self,
        weights: Mapping[str, NDArray[np.float32]],
        further: Mapping[str, str | NDArray[np.generic]] = MappingProxyType({}),
    ) -> dict[str, NDArray[np.float32]]:
        """The weights of a model, as they were drawn, with what this has of them.

        Args:
            weights: by the first name of each.
            further: other names that a state of the model has, to the first one; to the values of
                buffers, which the model makes itself; empty for those that it does not use.

        Raises:
            ConfigError: two tensors get one name, what is one in the model differs, a buffer has
                other values, none fits, or without `partial` not all fit; the message names some.
        """
        given: dict[str, NDArray[np.float32]] = {}
        for name, value in self.tensors.items():
            ours = self._renamed(name)
            if ours in given:
                raise ConfigError(
                    f"{self.source}: two tensors would be {ours}, {name} is one; make the names differ"
                )
            given[ours] = value
        for name in given.keys() & further.keys() - weights.keys():
            first = further[name]
            value = given.pop(name)
            if not isinstance(first, str):
                fits = first.shape == value.shape
                if not (
                    np.allclose(first, value, 4e-3, 1e-6, equal_nan=True) if fits else self.partial
                ):
                    raise ConfigError(
                        f"{self.source}: the buffer {name} is another than the model's, which would be exported: let"
                        " the model have that of the file, or make it a parameter with requires_grad=False"
                    )
            elif first and not np.array_equal(given.setdefault(first, value), value):
                raise ConfigError(
                    f"{self.source}: {name} is not {first} there, and both are one tensor of the model"
                )
        fitting = {
            name
            for name in weights.keys() & given.keys()
            if weights[name].shape == given[name].shape
        }
        if not fitting or (not self.partial and fitting != weights.keys() | given.keys()):
            raise ConfigError(f"{self.source}: {self._misfit(weights, given, fitting)}")
        return {name: given[name] if name in fitting else value for name, value in weights.items()}

    def _renamed(self, name: str) -> str:
        for theirs, ours in self.names:
            head, star, tail = theirs.partition("*")
            inside = (
                star
                and len(name) >= len(head + tail)
                and name.startswith(head)
                and name.endswith(tail)
            )
            if inside or name == theirs:
                return ours.replace("*", name[len(head) : len(name) - len(tail)])
        return name

    def _misfit(
        self, weights: Mapping[str, Any], given: Mapping[str, Any], fitting: set[str]
    ) -> str:
        unlike = [
            f"{name} is {list(given[name].shape)} and should be {list(weights[name].shape)}"
            for name in sorted(weights.keys() & given.keys() - fitting)
        ]
        missing, more = (
            sorted(names)
            for names in (weights.keys() - given.keys(), given.keys() - weights.keys())
        )
        parts = [
            *unlike[:_SHOWN],
            *(
                [f"{len(missing)} tensors of the model are not there ({_some(missing)})"]
                if missing
                else []
            ),
            *(
                [f"{len(more)} are not the model's ({_some(more)}){did_you_mean(more[0], weights)}"]
                if more
                else []
            ),
        ]
        return (
            f"{'; '.join(parts)}. Say what is called otherwise with --start-name THEIRS=OURS, such as 'model.*=*', or"
            " take what fits with --start-partial"
        )


def read_start(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read the tensors of a file.

    Args:
        path: a ``.safetensors`` file, or one of ``torch.save`` (``.pt``, ``.bin``, ``.pth``) with
            tensors by name, as they are or under ``state_dict``.

    Returns:
        Float32 arrays by name; numbers of other float types are converted.

    Raises:
        ConfigError: it is not there, or holds anything but tensors by name.
    """
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # what torch raises for a file that is none of tensors has no base of its own
        raise ConfigError(
            f"cannot read the tensors in {path}: {str(error).splitlines()[0]}; give a .safetensors file, or one that"
            " torch.save wrote of a state_dict"
        ) from error
    inner = next(
        (
            found[key]
            for key in _INSIDE
            if isinstance(found, dict) and isinstance(found.get(key), dict)
        ),
        found,
    )
    tensors = inner if isinstance(inner, dict) else {}
    floats = {
        str(name): value.detach().float().numpy()
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if not floats:
        raise ConfigError(f"{path} holds no float tensors by name; give the state_dict of a model")
    return floats


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
