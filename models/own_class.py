"""Describes the state of a user's own class, so that weights of a run load into it: names, kinds and sources.

A run stores the tensors of the exported model. The user's class may have others: `convert` renames parameters of
attention and recurrent layers, batch norm keeps its statistics in buffers, and weights do not include buffers that
never change. The exporter, which has the class, writes this description beside each tier; a server, which has no torch,
builds the state from it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.frozen import Free, FrozenModel, problems
from models.slicing import Tensors

OWN_CLASS = "own_class.safetensors"
"""Name of the file beside a tier's other files: constants, and the description in its header."""

SPECTRAL_STEPS = 8
"""Steps of the power iteration with which a spectral norm computes its vectors, starting from the rows' norms."""

Kind = Literal["parameter", "mean", "variance", "count", "left", "right", "constant"]

_HEADER = "own_class"
_SHOWN = 3


class Entry(FrozenModel):
    """One tensor of the state of a class.

    Attributes:
        name: name in the state.
        kind: ``parameter``, a parameter of the run, or several joined along the first dimension; ``mean`` and
            ``variance``, statistics of a norm; ``count``, batches that a norm has seen; ``left`` and ``right``, the
            vectors of a spectral norm of a parameter; ``constant``, a buffer that never changes.
        sources: names of parameters, or of the norm, in the exported model; empty for constants and counts.
        dim: dimension of the outputs, for the vectors of a spectral norm.
    """

    name: str
    kind: Kind
    sources: tuple[str, ...] = ()
    dim: int = 0

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the run's tensors from which it is made."""
        if self.kind == "mean":
            return (f"stat.{self.sources[0]}.mean",)
        if self.kind == "variance":
            return (f"stat.{self.sources[0]}.var",)
        return self.sources


class Builder(FrozenModel):
    """The function that builds the class, and its arguments.

    Attributes:
        module: module from which Python imports it; for the user's file, its name without the suffix.
        file: path of the user's file, if any.
        name: name of the architecture in the module.
        settings: settings that differ from the architecture's defaults.
        converts: whether it converts the model that it builds, so that the class is the original.
    """

    module: str
    file: str | None = None
    name: str
    settings: Mapping[str, Free] = Field(default_factory=dict)
    converts: bool = False


class OwnClass(FrozenModel):
    """The class of a tier as its author wrote it.

    Attributes:
        format_version: version of this schema.
        entries: entries in the order of the state.
        builder: the builder; None if no module has it under a name.
        problem: why weights of a run cannot be loaded into the class; empty if they can.
    """

    format_version: Literal[1] = 1
    entries: tuple[Entry, ...] = ()
    builder: Builder | None = None
    problem: str = ""

    def missing(self, tensors: Tensors) -> list[str]:
        """Return names in the state that the tensors of a run do not provide."""
        return [entry.name for entry in self.entries if not all(name in tensors for name in entry.needed)]

    @property
    def needed(self) -> frozenset[str]:
        """Return the names of all tensors of a run that the state uses."""
        return frozenset(name for entry in self.entries for name in entry.needed)

    def require(self, tensors: Tensors) -> None:
        """Raise a ConfigError that names missing entries if a run does not provide the whole state."""
        missing = self.missing(tensors)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if missing[_SHOWN:] else ""
            raise ConfigError(f"the run has no values for {', '.join(missing[:_SHOWN])}{more} of the class")

    def values(self, tensors: Tensors, constants: Tensors, steps: int) -> dict[str, NDArray[Any]]:
        """Build the state of the class.

        Args:
            tensors: tensors of the run, by names of the exported model: float32 parameters, including frozen ones, and
                statistics, ``stat.<norm>.mean`` and ``.var``.
            constants: buffers, by the names of the state.
            steps: number to add to the counts of batches in the constants.

        Raises:
            ConfigError: tensors are missing.
        """
        self.require(tensors)
        return {entry.name: _VALUES[entry.kind](entry, tensors, constants, steps) for entry in self.entries}

    def to_bytes(self, constants: Tensors | None = None) -> bytes:
        """Write the description as a file, including the constants."""
        return save(dict(constants or {}), {_HEADER: self.model_dump_json(exclude_defaults=True)})


def read_own_class(path: Path) -> tuple[OwnClass, dict[str, NDArray[Any]]]:
    """Read a file of `OwnClass.to_bytes`; raise a BlobError if it is damaged, or of another version."""
    try:
        with safe_open(path, "numpy") as file:
            header = (file.metadata() or {}).get(_HEADER, "")
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        return OwnClass.model_validate_json(header), constants
    except ValidationError as error:
        wrong = problems(error, "document")
        raise BlobError(f"{path}: {wrong}; run `shoal export` again with this version of Shoal") from error
    except (OSError, SafetensorError) as error:
        raise BlobError(f"cannot read {path}: {error}; run `shoal export` again") from error


def _joined(entry: Entry, tensors: Tensors, constants: Tensors, steps: int) -> NDArray[Any]:
    del constants, steps
    values = [tensors[name] for name in entry.needed]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _counted(entry: Entry, tensors: Tensors, constants: Tensors, steps: int) -> NDArray[Any]:
    del tensors
    first = constants[entry.name]
    return np.asarray(first + steps, first.dtype)


def _constant(entry: Entry, tensors: Tensors, constants: Tensors, steps: int) -> NDArray[Any]:
    del tensors, steps
    return constants[entry.name]


def _left(entry: Entry, tensors: Tensors, constants: Tensors, steps: int) -> NDArray[Any]:
    del constants, steps
    return _singular_vectors(tensors[entry.sources[0]], entry.dim)[0]


def _right(entry: Entry, tensors: Tensors, constants: Tensors, steps: int) -> NDArray[Any]:
    del constants, steps
    return _singular_vectors(tensors[entry.sources[0]], entry.dim)[1]


def _singular_vectors(weight: NDArray[Any], dim: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Compute the vectors of `models.zoo.layers.SpectralNorm` for a weight: float32 [rows] and [columns]."""
    moved = np.moveaxis(weight, dim, 0)
    rows = moved.reshape(len(moved), -1)
    left = np.sqrt(np.square(rows).sum(1))
    right = np.zeros(rows.shape[1], rows.dtype)
    for _ in range(SPECTRAL_STEPS):
        right = _normal(rows.T @ left)
        left = _normal(rows @ right)
    return left, right


def _normal(vector: NDArray[Any]) -> NDArray[Any]:
    length = max(float(np.linalg.norm(vector)), 1e-12)
    return np.asarray(vector / length, vector.dtype)


_VALUES: Mapping[Kind, Callable[[Entry, Tensors, Tensors, int], NDArray[Any]]] = MappingProxyType(
    {
        "parameter": _joined,
        "mean": _joined,
        "variance": _joined,
        "count": _counted,
        "left": _left,
        "right": _right,
        "constant": _constant,
    }
)
