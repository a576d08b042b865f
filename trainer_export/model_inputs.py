"""Prepares a model for a trace: a copy in a mode, a pure call, and its inputs and outputs."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import (
    knob_input,
    noise_input,
    parameter_input,
    statistic_mean,
    statistic_variance,
)
from models.inputs import Row
from models.user_lines import at_line_of, first_line
from models.zoo.layers import Mode, StaticBatchNorm, set_mode
from models.zoo.noise_inputs import feed_noise, noise_shapes
from trainer_export.batch_uses import Known
from trainer_export.graph import Port
from trainer_export.loss import Answer, Loss
from trainer_export.operators import static_batch_norm
from trainer_export.traced_program import BATCH, recorded_modules

_PROBE_BATCH = 2  # a static batch norm needs more than one sample
# Number of dimensions of an output with the classes last: batch, tokens, classes; with more, the
# classes are second.
_MOST_DIMENSIONS = 3
_MOST_PLACES = 2  # height and width


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        input_shape: shape of one sample.
        input_dtype: ``float32`` or ``int64``.
        classes: number of logits.
        places: places of a sample that have logits: empty for a single one, ``(tokens,)`` for one
            per token, ``(height, width)`` for one per pixel.
        base: frozen parameters that graphs take but never return, because no tier trains them, or
            only others do; further frozen parameters are returned unchanged.
        row: the layout of a sample, if known.
        heads: shapes of several outputs for one sample, see `heads_of`.
        noise: see `model_noise`; set later.
        known: uses of the batch size by programs of other widths, for
            `traced_program.trace_program`.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int
    places: tuple[int, ...] = ()
    base: tuple[str, ...] = ()
    row: Row | None = None
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    noise: Mapping[str, tuple[int, ...]] | None = None
    known: Known | None = field(default=None, repr=False, compare=False)

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the model's output for one sample; with pixels the classes come first."""
        if len(self.places) > 1:
            return (self.classes, *self.places)
        return (*self.places, self.classes)

    def samples(self, count: int) -> Tensor:
        """Return samples of zeros, for a run that only determines shapes."""
        dtype = torch.int64 if self.input_dtype == "int64" else torch.float32
        return torch.zeros((count, *self.input_shape), dtype=dtype)

    def outputs(self, count: int) -> Any:
        """Return outputs of zeros for some samples."""
        if not self.heads:
            return torch.zeros((count, *self.output))
        heads = {}
        for name, shape in self.heads.items():
            heads[name.partition(".")[2]] = torch.zeros((count, *shape))
        return tuple(heads.values()) if "0" in heads else heads

    def with_places_of(self, model: nn.Module) -> "Signature":
        """Return the signature with the places of a model's logits.

        A copy of the model is run once.

        Raises:
            ExportError: the model takes other inputs, fails on a batch of zeros, or does not return
                logits for these classes.
        """
        logits = _first_run(prepared(model, "eval"), self)
        # Looked at before the classes: transposed logits would be refused for their number
        # otherwise.
        if isinstance(logits, Tensor) and logits.dim() > 1 and len(logits) != _PROBE_BATCH:
            raise ExportError(
                f"the model must return the batch dimension first, not {[*logits.shape]};"
                " transpose its output"
            )
        if _are_heads(logits):
            return replace(self, heads=_head_shapes(logits))
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
        # PyTorch's own convention of losses: classes second once there are more dimensions than
        # tokens.
        places = shape[2:] if len(shape) > _MOST_DIMENSIONS else shape[1:-1]
        signature = replace(self, places=places)
        check_output(logits, signature)
        return signature


def _are_heads(output: Any) -> bool:
    """Return whether a model returned several tensors."""
    if not isinstance(output, (tuple, list, Mapping)):
        return False
    return all(isinstance(head, Tensor) for head in tree_leaves(output))


def heads_of(output: Any) -> dict[str, Tensor]:
    """Return the outputs of a model by their names in graphs.

    A single output is ``logits``; several are ``logits.<name>``, or by number for a tuple or list.
    """
    if isinstance(output, Tensor):
        return {"logits": output}
    heads = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {f"logits.{name}": head for name, head in heads}


def _head_shapes(output: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the outputs for one sample."""
    shapes = {}
    for name, head in heads_of(output).items():
        shapes[name] = tuple(head.shape[1:])
    return shapes


def _first_run(model: nn.Module, signature: Signature) -> Any:
    """Run a model for the first time.

    Raises:
        ExportError: the model takes several inputs, or fails.
    """
    title = f"module (the model itself) ({type(model).__name__})"
    needed = _needed_arguments(model)
    if len(needed) > 1 and not (signature.row and signature.row.named):
        shapes = ", ".join(f"{name!r}: (...)" for name in needed)
        raise ExportError(
            f"{title} takes {len(needed)} inputs ({', '.join(needed)}), but a sample is one"
            f" tensor; name the inputs: input_shape = {{{shapes}}}"
        )
    x = signature.samples(_PROBE_BATCH)
    try:
        with torch.no_grad():
            return model(x)
    # Errors of Shoal's own layers already explain the problem.
    except ExportError:
        raise
    except Exception as error:
        samples = f"{str(x.dtype).removeprefix('torch.')} samples {list(x.shape[1:])}"
        raise ExportError(
            f"{title} fails{at_line_of(error)} on {samples}: {first_line(error)}; check"
            " input_shape and input_dtype of the architecture"
        ) from error


def _needed_arguments(model: nn.Module) -> list[str]:
    """Return names of the positional arguments without a default."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if positional and parameter.default is parameter.empty:
            names.append(parameter.name)
    return names


def _normalise_by_operator(norm: StaticBatchNorm, x: Tensor) -> Tensor:
    """Normalise as a static batch norm does in training, by one operator."""
    normal: Tensor = static_batch_norm(x, norm.weight, norm.bias, norm.eps)
    return normal


def prepared(
    model: nn.Module,
    mode: Mode,
    *,
    operators: bool = False,
) -> nn.Module:
    """Return a copy of the model in a mode, optionally with its norms as operators.

    It shares the model's parameters, which callers do not change, and has its own buffers.
    """
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        shared[id(parameter)] = parameter
    # Deep copies share what is in `shared`: parameters of a large model exist once.
    model = set_mode(copy.deepcopy(model, shared), mode)
    if operators:
        for _, norm in norms(model):
            cast("Any", norm).normalise = partial(_normalise_by_operator, norm)
    return model


def norms(model: nn.Module) -> list[tuple[str, StaticBatchNorm]]:
    """Return the static batch norms of a model by path."""
    modules = model.named_modules()
    norms = []
    for path, module in modules:
        if isinstance(module, StaticBatchNorm):
            norms.append((path, module))
    return norms


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters, in registration order."""
    return [name for name, _ in model.named_parameters()]


def call_model(
    model: nn.Module,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    x: Tensor,
    noise: Mapping[str, Tensor] | None = None,
) -> Any:
    """Run a model on samples with replaced parameters and buffers, given by name.

    A layer whose path is missing in the noise draws its own random numbers.
    """
    # Noise is handed to the layers aside, because a model's forward has no argument for it.
    feed_noise(model, noise or {})
    try:
        with recorded_modules(model):
            return functional_call(model, dict(zip(names, tensors, strict=True)), (x,))
    # The tensors of a trace must not stay in the module, which outlives it.
    finally:
        feed_noise(model, {})


def check_output(output: Any, signature: Signature) -> None:
    """Check that a model's output has the form of its signature.

    Raises:
        ExportError: it has another form.
    """
    if signature.heads and _head_shapes(output) == signature.heads:
        return
    if isinstance(output, Tensor):
        shape: Any = tuple(output.shape)
        if shape[1:] == signature.output:
            _refuse_volumes(shape, signature)
            return
    elif signature.heads:
        shape = type(output).__name__
    else:
        raise ExportError(
            f"the model returns a {type(output).__name__} in training, but one tensor in"
            " evaluation; return the same heads in both modes, and weigh them in your own loss,"
            " @shoal.loss() of (outputs, targets)"
        )
    expected = ", ".join(map(str, ("batch", *signature.output)))
    classes = signature.classes
    raise ExportError(
        f"the model must return logits [{expected}], but returned {shape} (use [batch, tokens,"
        f" {classes}] for a label per token, [batch, {classes}, height, width] for a label per"
        " pixel)"
    )


def _refuse_volumes(shape: tuple[int, ...], signature: Signature) -> None:
    """Check that an output has labels for at most the pixels of a picture.

    Raises:
        ExportError: it has a label for each place of a volume.
    """
    if len(signature.places) > _MOST_PLACES:
        raise ExportError(
            f"the model returns {shape}, a label for each place of a volume, but labels are for"
            " samples, tokens or pixels: train on slices, with a model and an input_shape of two"
            " sides, or return one row of logits for a volume"
        )


def model_noise(model: nn.Module, signature: Signature) -> Mapping[str, tuple[int, ...]]:
    """Return shapes of the random numbers that a sample needs in training, by path of the layer.

    Raises:
        ExportError: a layer is used in a way that does not allow its noise as an input.
    """
    # It takes a run of the model, and is the same for all graphs of a tier.
    if signature.noise is not None:
        return signature.noise
    return noise_shapes(prepared(model, "train"), signature.samples(_PROBE_BATCH))


def parameter_ports(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Port, ...]:
    """Return ports of the parameters."""
    ports = []
    for name, shape in shapes.items():
        ports.append(Port(parameter_input(name), "float32", shape))
    return tuple(ports)


def statistic_ports(layers: Sequence[tuple[str, StaticBatchNorm]]) -> tuple[Port, ...]:
    """Return ports of means and variances of the static batch norms, layer by layer."""
    ports = []
    for path, norm in layers:
        shape = tuple(norm.weight.shape)
        # Mean before variance, layer by layer: the order of the graph's inputs.
        ports.append(Port(statistic_mean(path), "float32", shape))
        ports.append(Port(statistic_variance(path), "float32", shape))
    return tuple(ports)


def noise_ports(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Port, ...]:
    """Return ports of the random numbers of :func:`model_noise`."""
    ports = []
    for path, shape in shapes.items():
        ports.append(Port(noise_input(path), "float32", (BATCH, *shape)))
    return tuple(ports)


def sample_port(signature: Signature) -> Port:
    """Return the port of the samples ``x``."""
    return Port("x", signature.input_dtype, (BATCH, *signature.input_shape))


def batch_ports(signature: Signature, loss: Loss) -> tuple[Port, ...]:
    """Return ports of samples ``x``, targets ``y``, and label ``mask`` if the loss takes one."""
    target = loss.target(signature.output)
    ports = (
        sample_port(signature),
        Port(
            "y",
            target.dtype,
            (BATCH, *target.shape),
        ),
    )
    if not loss.masked:
        return ports
    return (*ports, Port("mask", "float32", (signature.classes,)))


def knob_ports(loss: Loss) -> tuple[Port, ...]:
    """Return ports of the numbers of a loss that a task may set."""
    ports = []
    for knob in loss.knobs:
        ports.append(Port(knob_input(knob.name), "float32", ()))
    return tuple(ports)


def answer_of(
    loss: Loss,
    targets: Sequence[Tensor],
    knobs: Sequence[Tensor] = (),
) -> Answer:
    """Return the answer of a graph's inputs.

    Args:
        loss: the loss.
        targets: the inputs of `batch_ports` behind the samples.
        knobs: the inputs of `knob_ports`; none in evaluation.
    """
    names = [knob.name for knob in loss.knobs]
    return Answer(
        *targets,
        knobs=dict(
            zip(
                names,
                knobs,
                strict=bool(knobs),
            )
        ),
    )


def output_ports(signature: Signature) -> tuple[Port, ...]:
    """Return ports of the outputs: ``logits``, or ``logits.<name>`` of each."""
    heads = signature.heads or {"logits": signature.output}
    ports = []
    for name, shape in heads.items():
        ports.append(Port(name, "float32", (BATCH, *shape)))
    return tuple(ports)
