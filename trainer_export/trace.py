"""Traces the train, eval, statistics and infer functions of a model into programs of torch operators.

A program is made by running the function once on fake tensors, with the batch as the only dynamic size. Forward pass,
gradient and optimizer end up in one flat list of operators; the gradient is PyTorch's own, except where a layer is
replaced by an operator with a gradient in closed form (see `operators`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import next_name, parameter_input, state_input, statistic_mean, statistic_variance
from models.zoo.layers import StaticBatchNorm
from trainer_export import recipe as rules
from trainer_export.graph import Port
from trainer_export.operators import DECOMPOSITIONS
from trainer_export.passes import simplify
from trainer_export.prepare import norms_of, prepared, recorded_modules
from trainer_export.recipe import Recipe
from trainer_export.values import Spec, dim_of

__all__ = [
    "Signature",
    "Trace",
    "trace_eval",
    "trace_infer",
    "trace_loss",
    "trace_optimizer",
    "trace_statistics",
    "trace_train",
]

BATCH = "batch"
_EXAMPLE_BATCH = 5  # any size above 1; no size of a model may happen to depend on it


@dataclass(frozen=True)
class Signature:
    """What a model takes and returns.

    Attributes:
        input_shape: shape of one sample.
        input_dtype: ``float32`` or ``int64``.
        classes: number of logits.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    classes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the samples."""
        return torch.int64 if self.input_dtype == "int64" else torch.float32


@dataclass(frozen=True)
class Trace:
    """A traced program with the names of what goes in and out.

    Attributes:
        name: name of the graph.
        program: flat list of torch operators.
        inputs: in the program's order.
        input_specs: traced shapes of the inputs.
        outputs: in the program's order.
        batch_input: name of an input whose first dimension is the batch.
    """

    name: str
    program: fx.GraphModule
    inputs: tuple[Port, ...]
    input_specs: tuple[Spec, ...]
    outputs: tuple[Port, ...]
    batch_input: str

    def where(self, node: fx.Node) -> str:
        """The module a node comes from, for a message."""
        for candidate in (node, *node.all_input_nodes):
            stack = candidate.meta.get("nn_module_stack")
            if stack:
                path, kind = list(stack.values())[-1]
                return f"module {path or '(the model itself)'} ({getattr(kind, '__name__', kind)})"
        return f"the {self.name} graph outside any module"


def trace_train(model: nn.Module, signature: Signature, recipe: Recipe) -> Trace:
    """The whole training step: loss, gradient, clipping and optimizer.

    Args:
        model: the module, unchanged by this.
        signature: what it takes and returns.
        recipe: loss and optimizer.

    Returns:
        Inputs ``param.*``, ``state.*``, ``x``, ``y``, ``mask``, ``lr``; outputs ``loss`` and the ``next.*``.

    Raises:
        ExportError: the model cannot be traced with a dynamic batch.
    """
    model = prepared(model, "train", operators=True)
    names = _parameter_names(model)
    count, states = len(names), len(names) if recipe.has_state else 0

    def step(*tensors: Tensor) -> list[Tensor]:
        parameters = list(tensors[:count])
        x, y, mask, lr = tensors[count + states :]
        trained = [p.detach().requires_grad_() for p in parameters]
        logits = _call(model, names, trained, x)
        _check_logits(logits, signature)
        loss, slope = rules.loss_and_logit_gradient(logits.detach(), y, mask)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(logits, trained, slope, allow_unused=True)
        # As in PyTorch, a parameter the loss does not depend on is left alone, weight decay and momentum too.
        used = {i: g for i, g in enumerate(gradients) if g is not None}
        moved, kept = list(parameters), list(tensors[count : count + states])
        stepped = rules.sgd_step(
            [parameters[i] for i in used], [kept[i] for i in used if states], list(used.values()), lr, recipe
        )
        for old, new in zip((moved, kept), stepped, strict=True):
            for i, tensor in zip(used, new, strict=False):
                old[i] = tensor
        return [loss, *moved, *kept]

    ports = _parameter_ports(model)
    state_ports = tuple(Port(state_input(n), p.dtype, p.shape) for n, p in zip(names, ports, strict=True))[:states]
    inputs = (
        *ports,
        *state_ports,
        *_batch_ports(signature, "x", "y"),
        _mask_port(signature),
        Port("lr", "float32", ()),
    )
    outputs = (
        Port("loss", "float32", ()),
        *(Port(next_name(p.name), p.dtype, p.shape) for p in (*ports, *state_ports)),
    )
    return _trace("train", step, inputs, outputs)


def trace_loss(model: nn.Module, signature: Signature) -> Trace:
    """The loss of a training batch and its logits, for runtimes that differentiate the graph themselves.

    Inputs ``param.*``, ``x``, ``y``, ``mask``; outputs ``loss`` and ``logits``.
    """
    model = prepared(model, "train")
    names = _parameter_names(model)

    def loss(*tensors: Tensor) -> list[Tensor]:
        x, y, mask = tensors[len(names) :]
        logits = _call(model, names, tensors[: len(names)], x)
        _check_logits(logits, signature)
        return [rules.loss_and_logit_gradient(logits, y, mask)[0], logits]

    inputs = (*_parameter_ports(model), *_batch_ports(signature, "x", "y"), _mask_port(signature))
    outputs = (Port("loss", "float32", ()), Port("logits", "float32", (BATCH, signature.classes)))
    return _trace("loss", loss, inputs, outputs)


def trace_optimizer(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> Trace:
    """Clipping and optimizer alone: inputs ``param.*``, ``state.*``, ``grad.*``, ``lr``; outputs ``next.*``."""
    count, states = len(shapes), len(shapes) if recipe.has_state else 0

    def update(*tensors: Tensor) -> list[Tensor]:
        gradients = tensors[count + states : -1]
        moved, kept = rules.sgd_step(tensors[:count], tensors[count : count + states], gradients, tensors[-1], recipe)
        return [*moved, *kept]

    parameters = tuple(Port(parameter_input(name), "float32", shape) for name, shape in shapes.items())
    kept = tuple(Port(state_input(name), "float32", shape) for name, shape in shapes.items())[:states]
    gradients = tuple(Port(f"grad.{name}", "float32", shape) for name, shape in shapes.items())
    outputs = tuple(Port(next_name(p.name), p.dtype, p.shape) for p in (*parameters, *kept))
    return _trace("optimizer", update, (*parameters, *kept, *gradients, Port("lr", "float32", ())), outputs)


def trace_eval(model: nn.Module, signature: Signature) -> Trace:
    """Sum of losses and number of right answers of a batch, with given statistics."""
    model = prepared(model, "eval")

    def evaluate(logits: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
        return [rules.loss_sum(logits, y, mask), rules.correct_count(logits, y, mask)]

    extra = (*_batch_ports(signature, "y"), _mask_port(signature))
    return _trace_forward(
        "eval", model, signature, extra, evaluate, (Port("loss_sum", "float32", ()), Port("correct", "int64", ()))
    )


def trace_infer(model: nn.Module, signature: Signature) -> Trace:
    """The logits of a batch, with given statistics."""
    model = prepared(model, "eval")
    output = Port("logits", "float32", (BATCH, signature.classes))
    return _trace_forward("infer", model, signature, (), lambda logits: [logits], (output,))


def trace_statistics(model: nn.Module, signature: Signature) -> Trace | None:
    """Mean and unbiased variance of every static batch norm for one batch; None if the model has none."""
    model = prepared(model, "statistics")
    names, norms = _parameter_names(model), norms_of(model)
    if not norms:
        return None

    def measure(*tensors: Tensor) -> list[Tensor]:
        _call(model, names, tensors[:-1], tensors[-1])
        return [t for _, norm in norms for t in (norm.last_mean, norm.last_var) if t is not None]

    inputs = (*_parameter_ports(model), *_batch_ports(signature, "x"))
    return _trace("stats", measure, inputs, _statistic_ports(norms))


def _trace_forward(
    name: str,
    model: nn.Module,
    signature: Signature,
    extra: tuple[Port, ...],
    finish: Callable[..., list[Tensor]],
    outputs: tuple[Port, ...],
) -> Trace:
    names, norms = _parameter_names(model), norms_of(model)
    buffers = [f"{path}.{kind}" for path, _ in norms for kind in ("running_mean", "running_var")]
    given = [*names, *buffers]

    def run(*tensors: Tensor) -> list[Tensor]:
        logits = _call(model, given, tensors[: len(given)], tensors[len(given)])
        _check_logits(logits, signature)
        return finish(logits, *tensors[len(given) + 1 :])

    inputs = (*_parameter_ports(model), *_statistic_ports(norms), *_batch_ports(signature, "x"), *extra)
    return _trace(name, run, inputs, outputs)


# -- models ------------------------------------------------------------------------------------------------------------


def _parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _call(model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor], x: Tensor) -> Any:
    with recorded_modules(model):
        return functional_call(model, dict(zip(names, tensors, strict=True)), (x,))


def _check_logits(logits: Any, signature: Signature) -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or len(logits.shape) != 2 or logits.shape[1] != signature.classes:
        raise ExportError(f"the model must return logits [batch, {signature.classes}], it returned {shape}")


# -- ports -------------------------------------------------------------------------------------------------------------


def _parameter_ports(model: nn.Module) -> tuple[Port, ...]:
    return tuple(Port(parameter_input(n), "float32", tuple(p.shape)) for n, p in model.named_parameters())


def _statistic_ports(norms: Sequence[tuple[str, StaticBatchNorm]]) -> tuple[Port, ...]:
    return tuple(
        Port(name(path), "float32", tuple(norm.weight.shape))
        for path, norm in norms
        for name in (statistic_mean, statistic_variance)
    )


def _batch_ports(signature: Signature, *names: str) -> tuple[Port, ...]:
    ports = {
        "x": Port("x", signature.input_dtype, (BATCH, *signature.input_shape)),
        "y": Port("y", "int64", (BATCH,)),
    }
    return tuple(ports[name] for name in names)


def _mask_port(signature: Signature) -> Port:
    return Port("mask", "float32", (signature.classes,))


# -- tracing -----------------------------------------------------------------------------------------------------------


def _trace(
    name: str, function: Callable[..., list[Tensor]], inputs: tuple[Port, ...], outputs: tuple[Port, ...]
) -> Trace:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fakes = _fake_inputs(mode, inputs)
    # Only operators without a lowering of our own are taken apart; PyTorch knows how.
    from trainer_export.lowering import LOWERINGS  # noqa: PLC0415 - lowering imports this module

    known: Any = core_aten_decompositions()
    table = {op: rule for op, rule in {**known, **DECOMPOSITIONS}.items() if op not in LOWERINGS}
    # PyTorch's C++ decompositions (chunk, pad, ...) would fix the batch size; those in Python keep it a symbol.
    with mode, enable_python_dispatcher(), traceback.preserve_node_meta(), sdpa_kernel(SDPBackend.MATH):
        try:
            program = _without_mutation(make_fx(function, decomposition_table=table)(*fakes), fakes, table)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(
                f"the {name} graph cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]};"
                " sizes and branches of the model must not depend on the values of its input"
            ) from error
    symbols = {s for fake in fakes for size in fake.shape for s in _symbols(size)}
    if any(BATCH in port.shape for port in inputs) and not symbols - set(environment.replacements):
        raise ExportError(f"the {name} graph works for one batch size only; do not use the batch size as a number")
    simplify(program)
    specs = tuple(Spec(tuple(dim_of(s) for s in fake.shape), fake.dtype) for fake in fakes)
    batch = next((port.name for port in inputs if BATCH in port.shape), "")
    return Trace(name, program, inputs, specs, outputs, batch)


def _without_mutation(program: fx.GraphModule, fakes: Sequence[Tensor], table: Any) -> fx.GraphModule:
    """The program with in-place operators replaced by others.

    A second pass, because PyTorch cannot do it while it also differentiates.
    """
    targets = [node.target for node in program.graph.nodes]
    if not any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):  # noqa: SLF001 - no public name
        return program
    return make_fx(functionalize(fx.Interpreter(program).run, remove="mutations"), decomposition_table=table)(*fakes)


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def _fake_inputs(mode: FakeTensorMode, ports: Sequence[Port]) -> list[Tensor]:
    fakes: list[Tensor] = []
    batch: Any = None
    for port in ports:
        dtype = torch.int64 if port.dtype == "int64" else torch.float32
        if BATCH in port.shape and batch is None:
            example = torch.zeros(_sizes(port, _EXAMPLE_BATCH), dtype=dtype)
            dynamic = [DimDynamic.DYNAMIC if s == BATCH else DimDynamic.STATIC for s in port.shape]
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            fakes.append(mode.from_tensor(example, symbolic_context=context))
            batch = fakes[-1].shape[port.shape.index(BATCH)]
        else:
            with mode:
                fakes.append(torch.empty(_sizes(port, batch), dtype=dtype))
    return fakes


def _sizes(port: Port, batch: Any) -> list[Any]:
    return [batch if size == BATCH else size for size in port.shape]
