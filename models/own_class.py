"""What the state of a user's own class is made of, so that weights of a run load into it: names, kinds and sources.

A run knows the tensors of the model that was exported. The class that the user wrote may have others: `convert` gives
attention and recurrent layers parameters of other names, batch norm keeps its statistics in buffers, and buffers that
never change are in no weights at all. The exporter, which has the class, writes this description beside each tier; a
server, which has no torch, makes the state from it.
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
"""Steps of the power iteration by which a spectral norm finds its vectors, from the norms of the rows."""

Kind = Literal["parameter", "mean", "variance", "count", "left", "right", "constant"]

_HEADER = "own_class"
_SHOWN = 3


class Entry(FrozenModel):
    """One tensor of the state of a class.

    Attributes:
        name: in the state.
        kind: ``parameter``, one of the run's, or several behind each other along the first dimension; ``mean`` and
            ``variance``, statistics of a norm; ``count``, of batches that a norm has seen; ``left`` and ``right``, the
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
        """Names of the run's tensors that it is made of."""
        if self.kind == "mean":
            return (f"stat.{self.sources[0]}.mean",)
        if self.kind == "variance":
            return (f"stat.{self.sources[0]}.var",)
        return self.sources


class Builder(FrozenModel):
    """Where what builds the class is, and how it is called.

    Attributes:
        module: that Python imports it from; of a file of the user's its name without the suffix.
        file: path of the file of the user's, where it is one.
        name: of the architecture in the module.
        settings: that differ from the architecture's own.
        converts: whether it converts what it builds, which the class is the origin of.
    """

    module: str
    file: str | None = None
    name: str
    settings: Mapping[str, Free] = Field(default_factory=dict)
    converts: bool = False


class OwnClass(FrozenModel):
    """The class of a tier as its author wrote it.

    Attributes:
        format_version: of this schema.
        entries: in the order of the state.
        builder: None where no module has it by a name.
        problem: why weights of a run cannot be loaded into the class; empty where they can.
    """

    format_version: Literal[1] = 1
    entries: tuple[Entry, ...] = ()
    builder: Builder | None = None
    problem: str = ""

    def missing(self, tensors: Tensors) -> list[str]:
        """Names in the state for which the tensors of a run have nothing."""
        return [entry.name for entry in self.entries if not all(name in tensors for name in entry.needed)]

    @property
    def needed(self) -> frozenset[str]:
        """Names of all tensors of a run that it takes something from."""
        return frozenset(name for entry in self.entries for name in entry.needed)

    def require(self, tensors: Tensors) -> None:
        """See that a run has all that the class takes; a ConfigError names what is missing in the state."""
        missing = self.missing(tensors)
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if missing[_SHOWN:] else ""
            raise ConfigError(f"there is nothing for {', '.join(missing[:_SHOWN])}{more} of the class")

    def values(self, tensors: Tensors, constants: Tensors, steps: int) -> dict[str, NDArray[Any]]:
        """The state of the class.

        Args:
            tensors: of the run, by the names of the exported model: float32 parameters, frozen ones among them, and
                statistics, ``stat.<norm>.mean`` and ``.var``.
            constants: buffers by the names of the state.
            steps: by how much counts of batches are further than in the constants.

        Raises:
            ConfigError: tensors are missing.
        """
        self.require(tensors)
        return {entry.name: _VALUES[entry.kind](entry, tensors, constants, steps) for entry in self.entries}

    def to_bytes(self, constants: Tensors | None = None) -> bytes:
        """The description as a file, with the constants in it."""
        return save(dict(constants or {}), {_HEADER: self.model_dump_json(exclude_defaults=True)})


def read_own_class(path: Path) -> tuple[OwnClass, dict[str, NDArray[Any]]]:
    """Read what `OwnClass.to_bytes` wrote; a BlobError where the file is damaged, or of another version."""
    try:
        with safe_open(path, "numpy") as file:
            header = (file.metadata() or {}).get(_HEADER, "")
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
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
    """The vectors that `models.zoo.layers.SpectralNorm` finds for a weight: float32 [rows] and [columns]."""
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
