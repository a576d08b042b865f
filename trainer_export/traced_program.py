"""Runs a function once on fake tensors and records it as a flat list of torch operators."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.func import functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    StatelessSymbolicContext,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import transformer

from fleet_protocol.errors import ExportError
from models.user_lines import at_line_of, first_line
from models.zoo.randomized_model import CHECKPOINT_REFUSAL
from trainer_export.batch_conditions import MANY, BatchSymbol
from trainer_export.batch_sizes import agrees_at, symbols_as_lengths
from trainer_export.batch_uses import Known, describe, has_only_uses, mark_of, uses_of
from trainer_export.fake_shapes import ShapeMode
from trainer_export.graph import Port
from trainer_export.lowering.table import LOWERINGS
from trainer_export.lowering.values import Spec, is_fixed
from trainer_export.operators import DECOMPOSITIONS
from trainer_export.passes import simplify
from trainer_export.recorder import record
from trainer_export.rewriting import Rewriting, place_of

BATCH = "batch"
_EXAMPLE_BATCH = 5  # above 1, because PyTorch traces a batch of 1 differently
_OTHER_BATCH = 7  # for models that have a dimension of 5

_Recording = Callable[[Callable[..., Any], Sequence[Tensor], Any], fx.GraphModule]
"""Records a function on fake tensors; the last argument has decompositions of operators."""


@dataclass(frozen=True)
class Trace:
    """A traced program with the names of its inputs and outputs.

    Attributes:
        program: flat list of torch operators.
        inputs: the inputs in the program's order.
        input_specs: traced shapes of the inputs.
        outputs: the outputs in the program's order.
        batch_input: name of an input whose first dimension is the batch.
        hidden: inputs and outputs to omit from the graph; no other output depends on such an input.
    """

    name: str
    program: fx.GraphModule
    inputs: tuple[Port, ...]
    input_specs: tuple[Spec, ...]
    outputs: tuple[Port, ...]
    batch_input: str
    hidden: frozenset[str] = frozenset()

    def part(
        self,
        name: str,
        outputs: Sequence[str],
        hidden_inputs: Sequence[str] = (),
    ) -> "Trace":
        """Return the same program as another graph, with some of the outputs.

        Args:
            name: name of the graph.
            outputs: outputs of the new graph.
            hidden_inputs: inputs on which only the other outputs depend.
        """
        hidden = {port.name for port in self.outputs}.difference(outputs)
        return replace(self, name=name, hidden=frozenset({*hidden, *hidden_inputs}))

    def where(self, node: fx.Node) -> str:
        """Return the module of a node and the line in its file, for a message."""
        for candidate in (node, *node.all_input_nodes):
            place = place_of(candidate.meta, candidate.stack_trace)
            if place:
                return place
        return f"the {self.name} graph, outside any module"


@contextmanager
def _failures_unlogged() -> Iterator[None]:
    """Keep PyTorch from logging a traceback for each operator that fails; the error is enough."""
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@_failures_unlogged()
def trace_program(
    name: str,
    function: Callable[..., list[Tensor]],
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    known: Known | None = None,
) -> Trace:
    """Trace a pure function of one tensor per input and output, with a dynamic batch.

    Args:
        name: name of the graph.
        function: the function.
        inputs: inputs of the function.
        outputs: outputs of the function.
        known: uses of the batch size in programs traced before; this program's uses are added.

    Raises:
        ExportError: the function cannot be traced with a dynamic batch.
    """
    tracing = _Tracing(name, function, inputs, outputs)
    known = {} if known is None else known
    key = (name, *(port.name for port in inputs))
    mark = mark_of(inputs)
    if known.get(key) is not None and mark is not None:
        with suppress(Exception):  # the trace with a symbol raises it again
            trace = tracing.with_number(mark)
            if trace and has_only_uses(trace.program, known[key]):
                return trace
    place = ""
    try:
        trace, place = tracing.with_any_symbol()
        if trace:
            known[key] = uses_of(trace.program)
            return trace
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"the {name} graph cannot be traced{at_line_of(error)}: {first_line(error)};"
            f" {advice_on(error)}"
        ) from error
    at_place = f", {place}" if place else ""
    raise ExportError(
        f"the {name} graph works only for some batch sizes{at_place}; do not use the batch size as"
        " a number, nor in a condition whose sides compute different results, and do not call"
        " functions of torch.jit.script"
    )


def warm_up() -> None:
    """Trace a small program: the first trace of a process loads modules and tables for seconds."""
    port = Port("x", "float32", (BATCH, 2))
    trace_program("warm-up", lambda x: [(2 * x).sum(1)], (port,), (port,))


@dataclass(frozen=True)
class _Tracing:
    """A function to trace, with its inputs and outputs."""

    name: str
    function: Callable[..., list[Tensor]]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def with_any_symbol(self) -> tuple[Trace | None, str]:
        """Trace it with a symbol for the batch, for the first example that allows it.

        Returns:
            The trace, None if there is none; and the first place that depends on the batch size.
        """
        place = ""
        # The second time for a model with `len(x)`, which makes a number of the batch.
        for lengths in (nullcontext, symbols_as_lengths):
            for example in (_EXAMPLE_BATCH, _OTHER_BATCH):
                batch = BatchSymbol()
                with lengths():
                    trace = self.with_symbol(example, batch)
                if trace:
                    return trace, place
                place = place or batch.where
        return None, place

    def with_symbol(self, example: int, batch: BatchSymbol) -> Trace | None:
        """Trace it with a symbolic batch size; None if the result holds only for the example."""
        trace = self._trace(example, batch)
        if self._is_for_one_size(trace):
            return None
        # The sides of a condition may compute the same, as for a batch of 1 in a broadcast.
        if trace.batch_input and not agrees_at(
            batch.other_sizes - {MANY}, trace.program, self.function, self.inputs
        ):
            return None
        return trace

    def with_number(self, mark: int) -> Trace | None:
        """Trace it with a number as batch size; None if its multiples do not identify the batch."""
        trace = self._trace(mark, None)
        return None if self._is_for_one_size(trace) else trace

    def _is_for_one_size(self, trace: Trace) -> bool:
        if not trace.batch_input:
            return False
        return all(is_fixed(spec.shape) for spec in trace.input_specs)

    def _trace(self, example: int, batch: BatchSymbol | None) -> Trace:
        try:
            return self._recorded(example, batch, record)
        except ExportError:
            raise
        except Exception:  # noqa: BLE001 - a model raises anything
            # PyTorch's tracer records more, and raises the errors that have advice.
            if batch is not None:
                batch.restart()
            return self._recorded(example, batch, _record_by_make_fx)

    def _recorded(self, example: int, batch: BatchSymbol | None, recording: _Recording) -> Trace:
        mode = ShapeMode(shape_env=batch, allow_non_fake_inputs=True)
        fakes = _fake_inputs(mode, self.inputs, example)
        table = _decompositions()
        # PyTorch's C++ decompositions (chunk, pad, ...) would fix the batch size; those in Python
        # keep it a symbol.
        hooks = torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINT_REFUSAL)
        with (
            mode,
            enable_python_dispatcher(),
            traceback.preserve_node_meta(),
            sdpa_kernel(SDPBackend.MATH),
            hooks,
        ):
            recorded = recording(self.function, fakes, table)
            program = _without_mutation(recorded, fakes, table, recording)
        simplify(program)
        describe(program, None if batch else example)
        placeholder_specs = []
        for node in program.graph.nodes:
            if node.op == "placeholder":
                placeholder_specs.append(node.meta["val"])
        specs = tuple(placeholder_specs)
        batched = [port.name for port in self.inputs if BATCH in port.shape]
        batch_input = batched[0] if batched else ""
        return Trace(self.name, program, self.inputs, specs, self.outputs, batch_input)


_ADVICE = {
    "checkpoint": "remove torch.utils.checkpoint",
    "numpy": "use PyTorch's functions instead of NumPy's",
    "does not require grad": (
        "compute gradients inside a model with torch.func.grad, which also works in evaluation"
    ),
    "higher order operator": "use torch.where, which computes both branches",
}
"""Advice on errors, by words in their messages."""


def advice_on(error: Exception) -> str:
    """Return advice on an error of a model that is run or traced."""
    if isinstance(error, UnsupportedOperatorException):
        return "write it with simpler operators"
    if any(frame.filename == transformer.__file__ for frame in extract_tb(error.__traceback__)):
        return (
            "PyTorch's stacks of transformer layers inspect the values of their mask: pass"
            " is_causal=False (in a decoder, tgt_is_causal=False), or use `shoal export"
            " --convert`"
        )
    for words, advice in _ADVICE.items():
        if words in str(error):
            return advice
    return "sizes, branches and assertions of the model must not depend on the values of its input"


@cache
def _decompositions() -> dict[Any, Any]:
    """Return decompositions of operators without a lowering.

    Cached, because PyTorch takes a tenth of a second to list its decompositions.
    """
    rules: dict[Any, Any] = {**core_aten_decompositions(), **DECOMPOSITIONS}
    decompositions = {}
    for operator, rule in rules.items():
        if operator not in LOWERINGS:
            decompositions[operator] = rule
    return decompositions


def _without_mutation(
    program: fx.GraphModule,
    fakes: Sequence[Tensor],
    table: Any,
    recording: _Recording,
) -> fx.GraphModule:
    """Return the program with in-place operators replaced by others.

    This is a second pass, because PyTorch cannot do it during differentiation.
    """
    if not any(_mutates(node.target) for node in program.graph.nodes):
        return program
    pure = functionalize(fx.Interpreter(program).run, remove="mutations")
    return recording(pure, fakes, table)


def _mutates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable  # noqa: SLF001


def _record_by_make_fx(
    function: Callable[..., Any], fakes: Sequence[Tensor], table: Any
) -> fx.GraphModule:
    """Record a function by `make_fx`, without the Python function of each operator.

    Records of these take time, and nothing reads them.
    """
    recorded = make_fx(function, decomposition_table=table, _disable_torch_fn_metadata_mode=True)
    return recorded(*fakes)


def _fake_inputs(
    mode: ShapeMode,
    ports: Sequence[Port],
    batch_size: int,
) -> list[Tensor]:
    fakes: list[Tensor] = []
    batch: Any = None if mode.shape_env else batch_size
    for port in ports:
        dtype = torch.int64 if port.dtype == "int64" else torch.float32
        if BATCH in port.shape and batch is None:
            # The first input with a batch creates the symbol, which the others share.
            example = torch.zeros(_sizes(port, batch_size), dtype=dtype)
            dynamic = []
            for size in port.shape:
                dynamic.append(DimDynamic.DYNAMIC if size == BATCH else DimDynamic.STATIC)
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            fakes.append(mode.from_tensor(example, symbolic_context=context))
            batch = fakes[-1].shape[port.shape.index(BATCH)]
        else:
            with mode:
                fakes.append(torch.empty(_sizes(port, batch), dtype=dtype))
    return fakes


def _sizes(port: Port, batch: Any) -> list[Any]:
    sizes = []
    for size in port.shape:
        sizes.append(batch if size == BATCH else size)
    return sizes


@contextmanager
def recorded_modules(model: nn.Module) -> Iterator[None]:
    """Rewrite functions, and record the running module and line in traced nodes."""
    stack: list[tuple[str, type]] = []

    def note() -> None:
        entries = {}
        for depth, entry in enumerate(stack):
            entries[str(depth)] = entry
        traceback.current_meta["nn_module_stack"] = entries

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            stack.append((path, type(module)))
            note()

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        note()

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Rewriting():
            yield
    finally:
        for handle in handles:
            handle.remove()
