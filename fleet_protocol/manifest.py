"""The manifest of an artifact set, with which a device trains one tier of one architecture.

An artifact set depends on shapes, never on weights: one export serves every round, window and
device of its tier. The names of a graph's inputs and outputs follow from the names of parameters,
states and statistics by the functions at the end of this module, so that both sides bind tensors by
name and never by position.
"""

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from fleet_protocol.digests import DIGEST_PATTERN
from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import Label, MemberName, twins
from fleet_protocol.frozen import FiniteJson, FrozenModel, problems
from fleet_protocol.recipe_spec import ExtendedSpec, RecipeSpec

FORMAT_VERSION = 2
DocumentT = TypeVar("DocumentT", bound=FrozenModel)

Parts = tuple[Mapping[str, int], Mapping[str, int]]
"""Numbers of each input of a sample, and of each of its targets, in order.

Empty for a single one.
"""
NO_PARTS: Parts = (MappingProxyType({}), MappingProxyType({}))

BASE = "base"
"""Key of the file of frozen tensors among the files of a set."""

Dtype = Literal["float32", "int64"]


class TensorSpec(FrozenModel):
    """One input or output of a graph.

    Attributes:
        name: the name in the graph.
        dtype: numpy name of the element type.
        shape: sizes; a string names a dynamic dimension (``batch``).
    """

    name: Label
    dtype: Dtype
    shape: tuple[int | Label, ...]


class ParameterSpec(FrozenModel):
    """One parameter of the sub-model, in the order of the weights blob.

    Attributes:
        name: as in ``torch.nn.Module.named_parameters``.
        shape: local sizes, after the cut.
        dtype: numpy name of the element type.
        axes: one axis per dimension; ``conv2.out*16`` means 16 consecutive positions per index of
            ``conv2.out``, ``3*h`` three maps of ``h`` one behind the other, ``a + b`` a
            concatenation.
        block: ``stem``, ``head`` or ``block<i>``.
        offset: where its bytes start in the data section of the weights blob, in bytes.
    """

    name: Label
    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    axes: tuple[Label, ...]
    block: Label
    offset: int = Field(ge=0)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class StateSpec(FrozenModel):
    """One tensor of the optimizer's state. A device knows nothing else of an optimizer.

    Attributes:
        name: as the graph has it behind ``state.``; unlike any other. An optimizer may have any
            number of states for a parameter, and some for none, such as a counter of steps.
        shape: local sizes; empty for a single number.
        dtype: numpy name of the element type.
        initial: what every element is when a task begins.
    """

    name: Label
    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    initial: float = 0.0


class StatisticSpec(FrozenModel):
    """Mean and variance of a static batch norm: two float32 vectors (specification 1.6).

    Attributes:
        name: path of the norm module.
        channels: local number of channels.
        axis: the axis the vectors lie along.
    """

    name: Label
    channels: int = Field(ge=1)
    axis: Label


class NoiseSpec(FrozenModel):
    """Random numbers that one layer of the model needs in every training step, such as a dropout.

    Attributes:
        name: path of the layer.
        shape: of the noise of one sample; the graph takes float32 ``[batch, *shape]``, uniform in
            [0, 1).
    """

    name: Label
    shape: tuple[int, ...]


class FileSpec(FrozenModel):
    """A file of the set by content.

    Attributes:
        path: path within the folder of the set, see `fleet_protocol.foreign_files`.
        digest: of the content; see `fleet_protocol.digests`.
        size: bytes.
    """

    path: MemberName
    digest: str = Field(pattern=DIGEST_PATTERN)
    size: int = Field(ge=1)


class GraphSpec(FileSpec):
    """An ONNX graph with its signature.

    Attributes:
        inputs: in graph order.
        outputs: in graph order.
        mixed: outputs that the exporter found to depend on the batch only through losses, gradients
            and statistics; a board finds out for itself (`fleet_protocol.graphs`).
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    mixed: tuple[Label, ...] = ()


class CheckSpec(FrozenModel):
    """What the comparison with PyTorch found at export.

    Attributes:
        graph: key of the graph in the manifest.
        runtime: package and version that ran it.
        steps: training steps (or batches) compared.
        batch_sizes: samples per batch, in the order used.
        worst_absolute: largest absolute difference over all tensors and steps.
        worst_relative: largest difference relative to the largest value of its tensor, at most 1e-4
            unless PyTorch itself rounds by more; then the difference is that from float64.
        worst_tensor: where ``worst_relative`` was found.
    """

    graph: Label
    runtime: Label
    steps: int = Field(ge=1)
    batch_sizes: tuple[int, ...]
    worst_absolute: float = Field(ge=0)
    worst_relative: float = Field(ge=0)
    worst_tensor: Label


class Manifest(ExtendedSpec):
    """Everything about one artifact set; its digest is the digest of its JSON bytes.

    Attributes:
        format_version: version of this schema.
        arch: name of the architecture.
        settings: the builder's settings, so that the set can be traced back to its module.
        tier: id of the tier.
        width: width ratio in (0, 1].
        depth: number of blocks kept.
        classes: number of labels; the label mask has this length.
        input_shape: shape of one sample.
        input_dtype: element type of the samples.
        label_shape: shape of the labels of one sample: empty for one label, ``(T,)`` for one per
            token. Of several, a negative label counts for nothing.
        recipe: what the train graph does.
        parameters: in the order of the weights blob.
        states: of the optimizer; empty if it has none.
        states_in_place: the step graphs may be given one buffer for a state and its next value.
        parameters_in_place: the same for a parameter.
        statistics: static batch norms whose mean and variance the eval and infer graphs take.
        noise: layers that need random numbers in training, in the order they are drawn in; the
            other graphs draw none.
        base: frozen tensors, which the graphs take as they take parameters and never return. They
            lie in the file ``base``, which all tiers share.
        graphs: ``onnx/train``, ``onnx/eval``, ``onnx/stats``, ``onnx/infer``,
            ``ort-training/step``, ``ort-training/training_model``, ``ort-training/eval_model``,
            ``ort-training/optimizer_model``, ``executorch/train``, ``executorch/eval``,
            ``executorch/infer``.
        files: further files, by the same kind of key (``ort-training/checkpoint``), and ``base``.
        flops_per_sample: floating point operations of one forward pass of one sample.
        flops_per_step_sample: the same for forward, backward and update (update spread over
            nothing: per sample).
        peak_memory_bytes: estimated peak of one training process beyond the runtime itself, batch
            32.
        checks: figures of the comparison with PyTorch.
        skipped: formats that were asked for and that the model cannot have, each with the reason.
        versions: exporter packages and their versions.
    """

    later: ClassVar[frozenset[str]] = frozenset({"base"})

    format_version: Literal[2] = 2
    arch: Label
    settings: Mapping[str, FiniteJson]
    tier: Label
    width: float = Field(gt=0, le=1)
    depth: int = Field(ge=1)
    classes: int = Field(ge=1)
    input_shape: tuple[int, ...]
    input_dtype: Dtype
    label_shape: tuple[int, ...] = ()
    recipe: RecipeSpec
    parameters: tuple[ParameterSpec, ...]
    states: tuple[StateSpec, ...]
    states_in_place: bool = False
    parameters_in_place: bool = False
    statistics: tuple[StatisticSpec, ...] = ()
    noise: tuple[NoiseSpec, ...] = ()
    base: tuple[TensorSpec, ...] = ()
    graphs: Mapping[Label, GraphSpec]
    files: Mapping[Label, FileSpec] = Field(default_factory=dict)
    flops_per_sample: int = Field(ge=0)
    flops_per_step_sample: int = Field(ge=0)
    peak_memory_bytes: int = Field(ge=0)
    checks: tuple[CheckSpec, ...] = ()
    skipped: Mapping[Label, str] = Field(default_factory=dict)
    versions: Mapping[Label, Label] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _base_has_a_file(self) -> "Manifest":
        if self.base and BASE not in self.files:
            raise ValueError("there are frozen tensors and no file of them")
        return self

    @model_validator(mode="after")
    def _files_are_apart(self) -> "Manifest":
        # On such a system one file would replace the other.
        alike = twins(spec.path for spec in self.all_files)
        if alike is not None:
            raise ValueError(f"{alike[0]!r} and {alike[1]!r} are the same file on some systems")
        return self

    @property
    def all_files(self) -> tuple[FileSpec, ...]:
        """Every file of the set except the manifest: graphs first, then the others."""
        return (*self.graphs.values(), *self.files.values())

    @property
    def parts(self) -> Parts:
        """Numbers of each input and of each target, if a sample has several."""
        shapes: Any = self.settings.get("input_shape")
        # A model of a single input has a list as its shape.
        inputs = {}
        if isinstance(shapes, Mapping):
            inputs = {name: math.prod(shape) for name, shape in shapes.items()}
        return inputs, self.recipe.loss.parts

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the sub-model."""
        return sum(math.prod(spec.shape) for spec in self.parameters)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of this manifest, whose sha256 names the artifact set."""
        # Digests of artifact sets depend on every byte of this form.
        return self.model_dump_json(indent=1).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        BlobError: this software does not read its version; the message names the fields.
    """
    return parse_document(Manifest, data, "an artifact manifest")


def parse_document(
    kind: type[DocumentT],
    data: bytes,
    what: str,
) -> DocumentT:
    """Read a manifest of some kind.

    Args:
        kind: of the manifest.
        data: the file.
        what: name of it in an error, which is that of `parse_manifest`.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise BlobError(
            f"not {what} of format {FORMAT_VERSION} ({problems(error, 'document')}); "
            "export it again with this version of Shoal"
        ) from error


def digest_of(data: bytes | memoryview) -> str:
    """Return the sha256 of bytes in hexadecimal, which names a file of an artifact set."""
    return hashlib.sha256(data).hexdigest()


def parameter_input(name: str) -> str:
    """Return the graph input that takes a parameter."""
    return f"param.{name}"


def state_input(name: str) -> str:
    """Return the graph input that takes a state of the optimizer."""
    return f"state.{name}"


def next_name(graph_input: str) -> str:
    """Return the graph output that has the new value of a parameter or state."""
    return f"next.{graph_input}"


def anchor_input(name: str) -> str:
    """Return the input of a train graph with a proximal term for the weights that were sent."""
    return f"anchor.{name}"


def noise_input(layer: str) -> str:
    """Return the input of a train graph with the random numbers of a layer."""
    return f"noise.{layer}"


def statistic_mean(norm: str) -> str:
    """Return the input (eval, infer) or output (stats) with the mean of a norm."""
    return f"stat.{norm}.mean"


def statistic_variance(norm: str) -> str:
    """Return the input (eval, infer) or output (stats) with the variance of a norm."""
    return f"stat.{norm}.var"
