"""Runs a function once on fake tensors and keeps what it did as a flat list of torch operators."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from traceback import extract_tb
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.func import functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import transformer
from typing_extensions import override

from fleet_protocol.errors import ExportError
from models.user_lines import at_line_of, first_line
from models.zoo.randomized_model import CHECKPOINT_REFUSAL
from trainer_export.batch_uses import Known, describe, mark_of, uses_of
from trainer_export.graph import Port
from trainer_export.lowering.table import LOWERINGS
from trainer_export.lowering.values import Spec
from trainer_export.operators import DECOMPOSITIONS
from trainer_export.passes import simplify
from trainer_export.rewriting import Rewriting, line_of, place_of

BATCH = "batch"
_TORCH = str(torch.__path__[0])
_EXAMPLE_BATCH, _OTHER_BATCH = (
    5,
    7,
)  # above 1; the other for models that have the one among their own sizes


@dataclass(frozen=True)
class Trace:
    """A traced program with the names of what goes in and out."""

    name: str
    program: fx.GraphModule  # flat list of torch operators
    inputs: tuple[Port, ...]  # in the program's order
    input_specs: tuple[Spec, ...]  # traced shapes of the inputs
    outputs: tuple[Port, ...]  # in the program's order
    batch_input: str  # name of an input whose first dimension is the batch
    # inputs and outputs that the graph shall not have; no output that it has depends on such an
    # input
    hidden: frozenset[str] = frozenset()

    def part(self, name: str, outputs: Sequence[str], hidden_inputs: Sequence[str] = ()) -> "Trace":
        """The same program as another graph with some of the outputs, without inputs that only the
        others depend on.
        """
        others = {port.name for port in self.outputs}.difference(outputs)
        return replace(self, name=name, hidden=frozenset({*others, *hidden_inputs}))

    def where(self, node: fx.Node) -> str:
        """The module a node comes from and the line of its file, for a message."""
        for candidate in (node, *node.all_input_nodes):
            found = place_of(candidate.meta, candidate.stack_trace)
            if found:
                return found
        return f"the {self.name} graph outside any module"


class _Batch(ShapeEnv):
    """Remembers the first place where the batch was taken for a number, or the model took one way
    by its size.
    """

    where = ""
    branches = False

    @override
    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate_expr(*args, **kwargs)
        caller = sys._getframe(1)  # noqa: SLF001 - no public name
        asks: FrameType | None = caller
        while asks is not None and asks.f_code.co_name != "__bool__":
            asks = asks.f_back
        who = asks.f_back if asks is not None else None
        if who is not None and not who.f_code.co_filename.startswith(_TORCH):
            self.branches |= _hangs_on_size(args[0], bool(found))
        if (self.replacements or self.branches) and not self.where:
            self.where = place_of(traceback.current_meta, line_of(caller))
        return found


def _hangs_on_size(condition: Any, found: bool) -> bool:
    """Whether a condition on the batch is another for other sizes: 1, many, and those that it
    names.
    """
    named = {int(number) + more for number in condition.atoms(sympy.Integer) for more in (-1, 0, 1)}
    sizes = {1, 2, 10**6, *(size for size in named if size > 0)}
    return any(
        bool(condition.subs(dict.fromkeys(condition.free_symbols, size))) != found for size in sizes
    )


def trace_program(
    name: str,
    function: Callable[..., list[Tensor]],
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    known: Known | None = None,
) -> Trace:
    """Trace a pure function, of one tensor per input to one per output, with a dynamic batch.

    What is `known` says where the batch is in programs that were traced before; this one's place is
    noted.

    Raises:
        ExportError: the function cannot be traced with a dynamic batch.
    """
    places = list[str]()

    def traced(example: int, environment: _Batch | None) -> Trace | None:
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        fakes = _fake_inputs(mode, inputs, example)
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
            program = _without_mutation(_recorded(function, table)(*fakes), fakes, table)
        simplify(program)
        describe(program, None if environment else example)
        specs = tuple(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
        fixed = all(isinstance(size, int) for spec in specs for size in spec.shape)
        if batched and (fixed or (environment is not None and environment.branches)):
            places.append(environment.where if environment else "")
            return None  # it works for the example alone
        return Trace(name, program, inputs, specs, outputs, next(iter(batched), ""))

    batched = [port.name for port in inputs if BATCH in port.shape]
    known = {} if known is None else known
    key = (name, *(port.name for port in inputs))
    mark = mark_of(inputs)
    if known.get(key) is not None and mark is not None:
        with suppress(Exception):  # which comes out below
            trace = traced(mark, None)
            if trace and uses_of(trace.program) == known[key]:
                return trace
    try:
        for example in (_EXAMPLE_BATCH, _OTHER_BATCH):
            trace = traced(example, _Batch())
            if trace:
                known[key] = uses_of(trace.program)
                return trace
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"the {name} graph cannot be traced{at_line_of(error)}: {first_line(error)}; {advice_on(error)}"
        ) from error
    raise ExportError(
        f"the {name} graph works for some batch sizes only{', '.join(['', *filter(None, places[:1])])}; do not use the"
        " batch size as a number or in a condition (write x.shape[0] for len(x)), and call no function of"
        " torch.jit.script"
    )


def advice_on(error: Exception) -> str:
    """What to do about an error of a model that is run or traced."""
    if isinstance(error, UnsupportedOperatorException):
        return "write it in simpler operators"
    if any(frame.filename == transformer.__file__ for frame in extract_tb(error.__traceback__)):
        what = "PyTorch's stacks of transformer layers look at the values of their mask"
        return f"{what}: give is_causal=False (a decoder tgt_is_causal=False), or take `shoal export --convert`"
    known = {
        "checkpoint": "leave torch.utils.checkpoint out",
        "numpy": "use PyTorch's functions instead of NumPy's",
        "does not require grad": "take gradients inside a model by torch.func.grad, which evaluation has, too",
        "higher order operator": "use torch.where, which computes both branches",
    }
    general = (
        "sizes, branches and assertions of the model must not depend on the values of its input"
    )
    return next((advice for words, advice in known.items() if words in str(error)), general)


@cache
def _decompositions() -> dict[Any, Any]:
    """Of operators without a lowering of our own.

    PyTorch knows how, and takes a tenth of a second to list them.
    """
    known: Any = core_aten_decompositions()
    return {op: rule for op, rule in {**known, **DECOMPOSITIONS}.items() if op not in LOWERINGS}


def _without_mutation(
    program: fx.GraphModule, fakes: Sequence[Tensor], table: Any
) -> fx.GraphModule:
    """The program with in-place operators replaced by others.

    A second pass, because PyTorch cannot do it while it also differentiates.
    """
    targets = [node.target for node in program.graph.nodes]
    if not any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):  # noqa: SLF001 - no public name
        return program
    return _recorded(functionalize(fx.Interpreter(program).run, remove="mutations"), table)(*fakes)


def _recorded(function: Callable[..., Any], table: Any) -> Callable[..., fx.GraphModule]:
    """`make_fx` that does not note which Python function an operator comes from, which takes time
    and nobody reads.
    """
    return make_fx(function, decomposition_table=table, _disable_torch_fn_metadata_mode=True)


def _fake_inputs(mode: FakeTensorMode, ports: Sequence[Port], batch_size: int) -> list[Tensor]:
    fakes: list[Tensor] = []
    batch: Any = None if mode.shape_env else batch_size
    for port in ports:
        dtype = torch.int64 if port.dtype == "int64" else torch.float32
        if BATCH in port.shape and batch is None:
            example = torch.zeros(_sizes(port, batch_size), dtype=dtype)
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


@contextmanager
def recorded_modules(model: nn.Module) -> Iterator[None]:
    """While this holds, functions are rewritten, and traced nodes remember module and line that are
    running.
    """
    stack: list[tuple[str, type]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            stack.append((path, type(module)))
            traceback.current_meta["nn_module_stack"] = {
                str(i): entry for i, entry in enumerate(stack)
            }

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        traceback.current_meta["nn_module_stack"] = {str(i): entry for i, entry in enumerate(stack)}

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
