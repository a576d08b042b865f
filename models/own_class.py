"""Describes the state of a user's class, so that weights of a run load into it.

A run stores the tensors of the exported model. The user's class may have others: `convert` renames
parameters of attention and recurrent layers, batch norm keeps its statistics in buffers, and
weights do not include buffers that never change. The exporter, which has the class, writes this
description beside each tier; a server, which has no torch, builds the state from it.
"""

import keyword
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError, model_validator
from safetensors.numpy import save

from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_files import Label, is_seen, quoted, read_within
from fleet_protocol.frozen import FiniteJson, FrozenModel, problems
from fleet_protocol.mapped_tensors import DTYPES, blob_in
from models.package_form import PackageBuild, PackageForm
from models.slicing import Tensors

OWN_CLASS = "own_class.safetensors"
"""Name of the file beside a tier's other files: constants, and the description in its header."""

SPECTRAL_STEPS = 8
"""Steps of the power iteration of a spectral norm, which starts from the norms of the rows."""

FILE_LIMIT = 512 * 1024 * 1024
"""Size limit of the file; its content is also in a graph, and boards accept no larger graphs."""

ENTRIES_LIMIT = 100_000
"""Largest number of tensors in the state of a class."""

USES_LIMIT = 64
"""Limit of a state's size as a multiple of the run's tensors, because layers may share weights."""

_PATH_LIMIT = 4096  # largest length of the path of a user's file
_DIMENSIONS = 64  # numpy's limit on dimensions
# Types of buffers that weights of a run never have.
_OF_CONSTANTS = {"BOOL": "?", "I16": "<i2", "I32": "<i4", "U64": "<u8", "C64": "<c8"}
_DTYPES = {**DTYPES, **{name: np.dtype(kind) for name, kind in _OF_CONSTANTS.items()}}

Kind = Literal["parameter", "mean", "variance", "count", "left", "right", "constant"]

_HEADER = "own_class"
_NAMED = 3  # number of missing entries in a message
_ONE_SOURCE = frozenset(["mean", "variance", "left", "right"])
_FROM_FILE = frozenset(["count", "constant"])
_VECTORS = frozenset(["left", "right"])


def is_identifier(text: str) -> bool:
    """Return whether a text is a name in Python, and not a keyword."""
    # Names end up in lines of Python that a user runs, so nothing else may pass.
    return text.isidentifier() and not keyword.iskeyword(text) and len(text) <= _PATH_LIMIT


def is_dotted(text: str) -> bool:
    """Return whether a text can be the name of a module in Python, with dots."""
    return len(text) <= _PATH_LIMIT and all(map(is_identifier, text.split(".")))


def _module(text: str) -> str:
    if not is_dotted(text):
        raise ValueError(f"{quoted(text)} is not the name of a module")
    return text


def _identifier(text: str) -> str:
    if not is_identifier(text):
        raise ValueError(f"{quoted(text)} is not a name in Python")
    return text


def _path(text: str) -> str:
    if not is_seen(text):
        raise ValueError(f"{quoted(text)} has control characters")
    return text


class Entry(FrozenModel):
    """One tensor of the state of a class.

    Attributes:
        name: name in the state.
        kind: ``parameter``, a parameter of the run, or several joined along the first dimension;
            ``mean`` and ``variance``, statistics of a norm; ``count``, batches that a norm has
            seen; ``left`` and ``right``, the vectors of a spectral norm of a parameter;
            ``constant``, a buffer that never changes.
        sources: names of parameters, or of the norm, in the exported model; empty for constants and
            counts.
        dim: dimension of the outputs, for the vectors of a spectral norm.
    """

    name: Label
    kind: Kind
    sources: Annotated[tuple[Label, ...], Field(max_length=USES_LIMIT)] = ()
    dim: Annotated[int, Field(ge=0, lt=_DIMENSIONS)] = 0

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "Entry":
        count = len(self.sources)
        if self.kind == "parameter" and not count:
            raise ValueError(f"{quoted(self.name)} is a parameter without a source")
        if self.kind in _ONE_SOURCE and count != 1:
            raise ValueError(
                f"{quoted(self.name)}, a {self.kind}, has {count} sources instead of one"
            )
        if self.kind in _FROM_FILE and count:
            raise ValueError(f"{quoted(self.name)}, a {self.kind}, has sources")
        if self.kind not in _VECTORS and self.dim:
            raise ValueError(f"{quoted(self.name)}, a {self.kind}, has a dimension of outputs")
        return self

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the names of the run's tensors that it needs."""
        if self.kind == "mean":
            # The names under which a store keeps the statistics of a norm.
            return (f"stat.{self.sources[0]}.mean",)
        if self.kind == "variance":
            return (f"stat.{self.sources[0]}.var",)
        return self.sources


class Builder(FrozenModel):
    """The function that builds the class, and its arguments.

    Attributes:
        module: module from which Python imports it; for the user's file, its name without the
            suffix.
        file: path of the user's file, if any.
        name: name of the architecture in the module.
        settings: settings that differ from the architecture's defaults.
        converts: whether it converts the built model, so that the class is the original one.
    """

    module: Annotated[str, AfterValidator(_module)]
    file: Annotated[str, Field(max_length=_PATH_LIMIT), AfterValidator(_path)] | None = None
    name: Annotated[str, AfterValidator(_identifier)]
    settings: Mapping[str, FiniteJson] = Field(default_factory=dict)
    converts: bool = False


class OwnClass(FrozenModel):
    """The original class of a tier.

    Attributes:
        format_version: version of this schema.
        entries: entries in the order of the state.
        builder: the builder; None if no module has it under a name.
        problem: why weights of a run do not load into the class; empty if they do.
        form: how the package that defines the class stores it; None if it has no such form.
        package: how a package's class is built by its SPEC; None for other classes.
    """

    format_version: Literal[1] = 1
    entries: Annotated[tuple[Entry, ...], Field(max_length=ENTRIES_LIMIT)] = ()
    builder: Builder | None = None
    problem: str = ""
    form: PackageForm | None = None
    package: PackageBuild | None = None

    @model_validator(mode="after")
    def _entries_are_apart(self) -> "OwnClass":
        counts = Counter(entry.name for entry in self.entries)
        for name, count in counts.items():
            if count > 1:
                raise ValueError(f"two entries are {quoted(name)}")
        return self

    def missing(self, tensors: Tensors) -> list[str]:
        """Return names in the state that the tensors of a run do not provide."""
        available = tensors.keys()
        names: list[str] = []
        for entry in self.entries:
            if not available >= set(entry.needed):
                names.append(entry.name)
        return names

    @property
    def needed(self) -> frozenset[str]:
        """Return the names of all tensors of a run that the state uses."""
        names: set[str] = set()
        for entry in self.entries:
            names.update(entry.needed)
        return frozenset(names)

    def require(self, tensors: Tensors) -> None:
        """Check that a run provides the whole state.

        Raises:
            ConfigError: entries are missing; the message names some.
        """
        missing = self.missing(tensors)
        if missing:
            more = ""
            if missing[_NAMED:]:
                more = f" and {len(missing) - _NAMED} more"
            raise ConfigError(
                f"the run has no values for {', '.join(missing[:_NAMED])}{more} of the class"
            )

    def values(
        self,
        tensors: Tensors,
        constants: Tensors,
        steps: int,
    ) -> dict[str, NDArray[Any]]:
        """Build the state of the class.

        Args:
            tensors: tensors of the run, by names of the exported model: float32 parameters,
                including frozen ones, and statistics, ``stat.<norm>.mean`` and ``.var``.
            constants: buffers, by the names of the state.
            steps: number to add to the counts of batches in the constants.

        Raises:
            ConfigError: tensors are missing.
            BlobError: an entry cannot be built from them, or the state is much larger than they
                are.
        """
        # Checked before anything is built, so that an error names all that is missing.
        self.require(tensors)
        self._require_bounds(tensors)
        return {entry.name: _value(entry, tensors, constants, steps) for entry in self.entries}

    def _require_bounds(self, tensors: Tensors) -> None:
        """Refuse a state that is much larger than its source tensors."""
        # An untrusted file could use the largest tensor in each of its entries.
        most = USES_LIMIT * sum(tensor.size for tensor in tensors.values())
        size = 0
        for entry in self.entries:
            size += sum(tensors[name].size for name in entry.needed)
            if size > most:
                raise BlobError(
                    f"entry {quoted(entry.name)}: up to this entry, the state needs more than"
                    f" {USES_LIMIT} times the size of the run's tensors"
                )

    def to_bytes(self, constants: Tensors | None = None) -> bytes:
        """Write the description as a file, including the constants."""
        # Defaults are left out, so that a file stays the same when a field is added.
        header = {_HEADER: self.model_dump_json(exclude_defaults=True)}
        return save(dict(constants or {}), header)


def read_own_class(folder: Path) -> tuple[OwnClass, dict[str, NDArray[Any]]]:
    """Read the file of `OwnClass.to_bytes` from the folder of a tier.

    Returns:
        The description, and the constants by the names of the state.

    Raises:
        BlobError: the file is damaged, missing or of another version; the message names it and the
            entry.
    """
    path = folder / OWN_CLASS
    data = read_within(folder, OWN_CLASS, FILE_LIMIT)
    try:
        metadata, views = blob_in(data, path, _DTYPES)
    except BlobError as error:
        raise BlobError(f"{error}; run `shoal export` again") from error
    try:
        own = OwnClass.model_validate_json(metadata.get(_HEADER, ""))
    except ValidationError as error:
        described = problems(error, "document")
        raise BlobError(
            f"{path}: {described}; run `shoal export` again with this version of Shoal"
        ) from error
    constants: dict[str, NDArray[Any]] = {}
    for entry in own.entries:
        if entry.kind not in _FROM_FILE:
            continue
        if entry.name not in views:
            raise BlobError(
                f"{path}: entry {quoted(entry.name)} is not among its tensors; run `shoal export` "
                "again"
            )
        # Copies are aligned, and do not keep the whole file in memory.
        constants[entry.name] = views[entry.name].copy()
    return own, constants


def _value(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    """Build the value of an entry; raises a BlobError if that fails, as for wrong shapes."""
    try:
        return _VALUES[entry.kind](entry, tensors, constants, steps)
    except (ValueError, LookupError, TypeError) as error:  # numpy's errors are some of these
        raise BlobError(
            f"entry {quoted(entry.name)}, a {entry.kind}, cannot be built from the run's"
            f" tensors: {error}"
        ) from error


def _joined(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    del constants, steps
    # A fused parameter of the class has its parts as separate parameters of the exported model.
    values = [tensors[name] for name in entry.needed]
    if len(values) == 1:
        return values[0]
    return np.concatenate(values)


def _counted(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    del tensors
    first = constants[entry.name]
    with np.errstate(all="ignore"):  # a count beyond its type wraps around, as in PyTorch
        return np.asarray(first + np.asarray(steps).astype(first.dtype), first.dtype)


def _constant(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    del tensors, steps
    return constants[entry.name]


def _left(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    del constants, steps
    return _singular_vectors(tensors[entry.sources[0]], entry.dim)[0]


def _right(
    entry: Entry,
    tensors: Tensors,
    constants: Tensors,
    steps: int,
) -> NDArray[Any]:
    del constants, steps
    return _singular_vectors(tensors[entry.sources[0]], entry.dim)[1]


def _singular_vectors(weight: NDArray[Any], dim: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Compute the vectors of `models.zoo.layers.SpectralNorm` for a weight.

    Returns:
        The left one, float32 [rows], and the right one, float32 [columns].
    """
    # The outputs become the rows, as the layer flattens its weight.
    moved = np.moveaxis(weight, dim, 0)
    rows = moved.reshape(len(moved), -1)
    # As in the layer: the iteration starts from the norms of the rows and is short, so both must
    # match.
    left = np.sqrt(np.square(rows).sum(1))
    right = np.zeros(rows.shape[1], rows.dtype)
    for _ in range(SPECTRAL_STEPS):
        right = _normal(rows.T @ left)
        left = _normal(rows @ right)
    return left, right


def _normal(vector: NDArray[Any]) -> NDArray[Any]:
    # The bound is that of torch.nn.functional.normalize, which the layer uses.
    length = max(float(np.linalg.norm(vector)), 1e-12)
    return np.asarray(vector / length, vector.dtype)


_VALUES: Mapping[Kind, Callable[[Entry, Tensors, Tensors, int], NDArray[Any]]] = MappingProxyType(
    {
        "parameter": _joined,
        # The names of the sources differ, the way to a value is the same.
        "mean": _joined,
        "variance": _joined,
        "count": _counted,
        "left": _left,
        "right": _right,
        "constant": _constant,
    }
)
