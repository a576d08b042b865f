"""The manifest of an artifact set, with which a device trains one tier of one architecture.

An artifact set depends on shapes, never on weights: one export serves every round, window and
device of its tier. The names of a graph's inputs and outputs follow from the names of parameters,
states and statistics by the functions at the end of this module, so that both sides bind tensors by
name and never by position.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from fleet_protocol.digests import DIGEST_PATTERN
from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import Label, MemberName, twins
from fleet_protocol.frozen import FiniteJson, FrozenModel, problems
from fleet_protocol.recipe_spec import ExtendedSpec, RecipeSpec

FORMAT_VERSION = 2
DocumentT = TypeVar("DocumentT", bound=FrozenModel)


class SampleSizes(NamedTuple):
    """How many numbers each input of a sample has, and each of its targets, in order.

    Attributes:
        inputs: the inputs by name; empty for a single array, which has no name.
        targets: alike.
    """

    inputs: Mapping[str, int]
    targets: Mapping[str, int]


UNNAMED = SampleSizes(MappingProxyType({}), MappingProxyType({}))
"""For samples that are one array, with targets that are one array."""

BASE = "base"
"""Key of the file of frozen tensors among the files of a set."""

Dtype = Literal["float32", "int64"]


class TensorSpec(FrozenModel):
    """One input or output of a graph.

    Attributes:
        name: name of the tensor in the graph.
        dtype: numpy name of the element type.
        shape: sizes of the tensor; a string names a dynamic dimension (``batch``).
    """

    name: Label
    dtype: Dtype
    shape: tuple[int | Label, ...]


class ParameterSpec(FrozenModel):
    """One parameter of the sub-model, in the order of the weights blob.

    Attributes:
        name: name of the parameter, as in ``torch.nn.Module.named_parameters``.
        shape: sizes of the parameter in this tier, after the cut.
        dtype: numpy name of the element type.
        axes: axis of each dimension. ``conv2.out*16`` means 16 consecutive positions per index of
            ``conv2.out``, ``3*h`` means three consecutive maps of ``h``, and ``a + b`` means a
            concatenation.
        block: block of the parameter: ``stem``, ``head`` or ``block<i>``.
        offset: offset of the parameter's first byte in the data section of the weights blob.
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
    """One tensor of the optimizer's state. A device knows nothing else about an optimizer.

    Attributes:
        name: unique name of the state; in the graph, ``state.`` precedes this name. An optimizer
            may have any number of states per parameter, and states that belong to no parameter,
            such as a step counter.
        shape: sizes of the state in this tier; empty for a single number.
        dtype: numpy name of the element type.
        initial: value of every element of the state when a task begins.
    """

    name: Label
    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    initial: float = 0.0


class StatisticSpec(FrozenModel):
    """Mean and variance of a static batch norm: two float32 vectors (specification 1.6).

    Attributes:
        name: path of the norm module.
        channels: number of channels in this tier.
        axis: axis of the mean and the variance.
    """

    name: Label
    channels: int = Field(ge=1)
    axis: Label


class NoiseSpec(FrozenModel):
    """Random numbers that one layer of the model, such as a dropout, needs in every training step.

    Attributes:
        name: path of the layer.
        shape: shape of the noise of one sample; the graph takes float32 ``[batch, *shape]``,
            uniform in [0, 1).
    """

    name: Label
    shape: tuple[int, ...]


class FileSpec(FrozenModel):
    """A file of the set, identified by its content.

    Attributes:
        path: path of the file within the folder of the set; see `fleet_protocol.foreign_files`.
        digest: digest of the file's content; see `fleet_protocol.digests`.
        size: size of the file in bytes.
    """

    path: MemberName
    digest: str = Field(pattern=DIGEST_PATTERN)
    size: int = Field(ge=1)


class GraphSpec(FileSpec):
    """An ONNX graph with its signature.

    Attributes:
        inputs: the inputs in graph order.
        outputs: the outputs in graph order.
        mixed: outputs that, according to the exporter, depend on the batch only through losses,
            gradients and statistics; a board checks this itself (`fleet_protocol.graphs`).
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    mixed: tuple[Label, ...] = ()


class CheckSpec(FrozenModel):
    """The result of the comparison with PyTorch at export.

    Attributes:
        graph: key of the graph in the manifest.
        runtime: package and version that ran the graph, and float64 if it computed in float64.
        steps: number of training steps (or batches) that were compared.
        batch_sizes: number of samples in each batch, in order.
        worst_absolute: largest absolute difference over all tensors and steps.
        worst_relative: largest difference relative to the largest value of its tensor, at most
            1e-4. If PyTorch's own rounding error is larger than that, it is the difference from a
            computation in float64, which may be larger, too.
        worst_tensor: name of the tensor with the difference ``worst_relative``.
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
        settings: the builder's settings; they identify the module from which the set was exported.
        tier: id of the tier.
        width: width ratio in (0, 1].
        depth: number of blocks that the tier keeps.
        classes: number of labels; the label mask has this length.
        input_shape: shape of one sample.
        input_dtype: element type of the samples.
        label_shape: shape of the labels of one sample: empty for one label, ``(T,)`` for one label
            per token. If a sample has several labels, negative labels are ignored.
        recipe: the computation of the train graph.
        parameters: the parameters in the order of the weights blob.
        states: states of the optimizer; empty if the optimizer has none.
        states_in_place: whether the step graphs may use the same buffer for a state and its next
            value.
        parameters_in_place: whether the step graphs may use the same buffer for a parameter and its
            next value.
        statistics: static batch norms whose mean and variance are inputs of the eval and infer
            graphs.
        noise: layers that need random numbers in training, in the order in which the numbers are
            drawn. Graphs for evaluation and prediction need none.
        frozen: names of parameters that this tier contains but only other tiers train. These
            parameters come with the weights of each task; the graphs take them as inputs but never
            return them, and no update contains them.
        base: tensors that no tier trains; the graphs take them as inputs, like parameters, but
            never return them. They are in the file ``base``, which all tiers share.
        graphs: ``onnx/train``, ``onnx/eval``, ``onnx/stats``, ``onnx/infer``, the step in two
            parts (`fleet_protocol.graph_parts`), ``ort-training/step``,
            ``ort-training/training_model``, ``ort-training/eval_model``,
            ``ort-training/optimizer_model``, ``executorch/train``, ``executorch/eval``,
            ``executorch/infer``.
        files: further files, by the same kind of key (``ort-training/checkpoint``), and ``base``.
        flops_per_sample: floating point operations of one forward pass of one sample.
        flops_per_step_sample: floating point operations of a training step for one sample, without
            the optimizer's update.
        peak_memory_bytes: estimated peak memory of training at batch size 32, without the runtime.
        recomputed_share: share of the step's work that a plan repeats (see `memory_plans`).
        checks: results of comparing the graphs with PyTorch.
        skipped: requested formats that the model does not support, each with the reason.
        versions: packages that exported the set, with their versions.
    """

    # Not written if they are empty, so that manifests from before them keep their digests.
    later: ClassVar[frozenset[str]] = frozenset({"base", "frozen", "recomputed_share"})

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
    frozen: tuple[Label, ...] = ()
    base: tuple[TensorSpec, ...] = ()
    graphs: Mapping[Label, GraphSpec]
    files: Mapping[Label, FileSpec] = Field(default_factory=dict)
    flops_per_sample: int = Field(ge=0)
    flops_per_step_sample: int = Field(ge=0)
    peak_memory_bytes: int = Field(ge=0)
    recomputed_share: float | None = Field(default=None, ge=0)
    checks: tuple[CheckSpec, ...] = ()
    skipped: Mapping[Label, str] = Field(default_factory=dict)
    versions: Mapping[Label, Label] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _base_has_a_file(self) -> "Manifest":
        # A device could not build its graphs' inputs.
        if self.base and BASE not in self.files:
            raise ValueError("there are frozen tensors but no file with them")
        return self

    @model_validator(mode="after")
    def _frozen_parameters_exist(self) -> "Manifest":
        unknown = set(self.frozen).difference(spec.name for spec in self.parameters)
        if unknown:
            raise ValueError(f"{min(unknown)} is frozen but is not one of the parameters")
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
    def sample_sizes(self) -> SampleSizes:
        """Numbers of each input and of each target, if a sample has several."""
        shapes: Any = self.settings.get("input_shape")
        # A model of a single input has a list as its shape.
        inputs = {}
        if isinstance(shapes, Mapping):
            inputs = {name: math.prod(shape) for name, shape in shapes.items()}
        return SampleSizes(inputs, self.recipe.loss.parts)

    @cached_property
    def trained(self) -> tuple[ParameterSpec, ...]:
        """The parameters that a step changes, and that updates contain, in manifest order."""
        frozen = frozenset(self.frozen)
        return tuple(spec for spec in self.parameters if spec.name not in frozen)

    @property
    def parameter_count(self) -> int:
        """Number of scalars in the sub-model."""
        return sum(math.prod(spec.shape) for spec in self.parameters)

    @property
    def trained_count(self) -> int:
        """Number of scalars that a step changes."""
        return sum(math.prod(spec.shape) for spec in self.trained)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON of this manifest, whose sha256 names the artifact set."""
        # Digests of artifact sets depend on every byte of this form.
        return self.model_dump_json(indent=1).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        BlobError: this software does not support its version; the message names the fields.
    """
    return parse_document(Manifest, data, "an artifact manifest")


def parse_document(
    kind: type[DocumentT],
    data: bytes,
    what: str,
) -> DocumentT:
    """Read a manifest of some kind.

    Args:
        kind: kind of the manifest.
        data: the file.
        what: its name in an error, which is that of `parse_manifest`.
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
    # Sha256, not BLAKE3: files of artifact sets keep their names from export to export.
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


def knob_input(name: str) -> str:
    """Return the input of a train graph for a number of the loss that a task may set."""
    return f"knob.{name}"


def noise_input(layer: str) -> str:
    """Return the input of a train graph with the random numbers of a layer."""
    return f"noise.{layer}"


def statistic_mean(norm: str) -> str:
    """Return the input (eval, infer) or output (stats) with the mean of a norm."""
    return f"stat.{norm}.mean"


def statistic_variance(norm: str) -> str:
    """Return the input (eval, infer) or output (stats) with the variance of a norm."""
    return f"stat.{norm}.var"
