"""The format of ExecuTorch, which Android, iOS and C++ run: the train, eval and infer programs,
each one ``.pte``.

They are the programs of the portable format, not ExecuTorch's own training export, whose gradient
of max pooling adds into memory that nobody cleared. Sizes are numbers here: a training step takes
`TRAIN_BATCH` samples, the other programs one. What XNNPACK runs goes there, the rest to the kernels
every runtime of ExecuTorch has; a model that needs another one is refused. The runtime's own passes
trace a program anew some twenty times, which takes minutes and changes nothing here, so its
operators are named for the runtime directly.
"""

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from models.user_lines import first_line
from trainer_export.batches import SizedBatches
from trainer_export.formats.files import SetFile, UnavailableError, silent_stderr
from trainer_export.graph import Port
from trainer_export.lowering.matrix_products import MATRIX_PRODUCTS
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.routines.evaluate import check_eval, trace_eval
from trainer_export.routines.infer import check_infer, infer_part
from trainer_export.routines.train import check_train, trace_train
from trainer_export.traced_program import BATCH, Trace

TRAIN_BATCH = 32
"""Samples of a training step; the eval and infer programs take one at a time."""

NOT_INSTALLED = (
    "the format executorch needs: pip install 'shoal[export,executorch]'; or export without it"
)
"""What is wrong, and what to do, where ExecuTorch is not there."""

aten = torch.ops.aten
_CHECKS = MappingProxyType(
    {
        "executorch/train": check_train,
        "executorch/eval": check_eval,
        "executorch/infer": check_infer,
    }
)
_VIEWS = (
    "view",
    "permute",
    "slice",
    "expand",
    "squeeze",
    "select",
    "alias",
    "split_with_sizes",
    "split",
    "unbind",
)
_NUMBERS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
# XNNPACK joins at most five tensors, each two of them by a copy; the runtime's own kernel any
# number.
_LEFT_OUT = ("CatConfig",)


def is_installed() -> bool:
    """Whether ExecuTorch is there."""
    return importlib.util.find_spec("executorch") is not None


def write_programs(module: nn.Module, signature: Signature, recipe: Recipe) -> tuple[SetFile, ...]:
    """Write the train, eval and infer programs of a model.

    Raises:
        ExportError: the model cannot be traced, or ExecuTorch is not installed.
        UnavailableError: ExecuTorch has no kernel for an operator.
    """
    if not is_installed():
        raise ExportError(NOT_INSTALLED)
    signature = replace(
        signature, known=None
    )  # programs in which the batch is a value, not its name
    evaluation = trace_eval(module, signature, recipe)
    steps = (trace_train(module, signature, recipe), TRAIN_BATCH)
    return tuple(_written(*part) for part in (steps, (evaluation, 1), (infer_part(evaluation), 1)))


def check_programs(
    files: Sequence[SetFile], module: nn.Module, recipe: Recipe, batches: SizedBatches
) -> tuple[CheckSpec, ...]:
    """Run every program and compare it with PyTorch.

    An ExportError names one that deviates, and the tensor.
    """
    runtime = {"runtime": f"executorch {importlib.metadata.version('executorch')}"}
    checks = list[CheckSpec]()
    for file in files:
        # Of many samples one is soon so near to the edge of a ReLU or a maximum that rounding
        # decides, see `repeated`.
        sizes = (TRAIN_BATCH if file.key == "executorch/train" else 1,)
        sized = replace(batches, sizes=sizes, steps=min(batches.steps, 2))
        found = _CHECKS[file.key](ProgramSession(file), module, recipe, sized, graph=file.key)
        checks.append(found.model_copy(update=runtime))
    return tuple(checks)


class ProgramSession:
    """A ``.pte`` that is called as a session of onnxruntime is."""

    def __init__(self, file: SetFile) -> None:
        from executorch.runtime import Runtime  # noqa: PLC0415 - only where it is installed

        self._file = file
        with silent_stderr():
            self._method = Runtime.get().load_program(file.data).load_method("forward")

    def get_inputs(self) -> tuple[Port, ...]:
        """What it takes, in order."""
        return self._file.inputs

    def get_outputs(self) -> tuple[Port, ...]:
        """What it returns, in order."""
        return self._file.outputs

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run it once; names and feed as of onnxruntime."""
        found = self._method.execute([torch.tensor(feed[port.name]) for port in self._file.inputs])
        by_name = {port.name: value for port, value in zip(self._file.outputs, found, strict=True)}
        return [by_name[name].clone().numpy() for name in names]


# -- lowering
# ----------------------------------------------------------------------------------------------------------


def _written(trace: Trace, batch: int) -> SetFile:
    inputs, outputs = (
        tuple(
            replace(
                port,
                shape=tuple(batch if size == BATCH else size for size in port.shape),
            )
            for port in ports
            if port.name not in trace.hidden
        )
        for ports in (trace.inputs, trace.outputs)
    )
    with silent_stderr(), _calm():
        try:
            data = _lowered(_sized(trace, batch))
        except UnavailableError:
            raise
        except Exception as error:
            raise UnavailableError(
                "executorch", f"it cannot lower it: {first_line(error)}"
            ) from error
    return SetFile(
        f"executorch/{trace.name}",
        f"executorch/{trace.name}.pte",
        data,
        inputs,
        outputs,
    )


@contextmanager
def _calm() -> Iterator[None]:
    """Without what ExecuTorch says of its own use of PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sized(trace: Trace, batch: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A program for so many samples of operators that the runtime has, and examples of what goes
    in.
    """
    zeros = [
        torch.zeros(
            [batch if size == BATCH else int(size) for size in port.shape],
            dtype=torch.int64 if port.dtype == "int64" else torch.float32,
        )
        for port in trace.inputs
        if port.name not in trace.hidden
    ]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    visible = _visible(trace)
    views = [(getattr(aten, name), getattr(aten, f"{name}_copy")) for name in _VIEWS]
    shared = [
        (old, new, name)
        for old, new in views
        for name in old.overloads()
        if name in new.overloads()
    ]
    copies = {getattr(old, name): getattr(new, name) for old, new, name in shared}
    known: Any = {**core_aten_decompositions(), **MATRIX_PRODUCTS}
    table = {op: rule for op, rule in known.items() if op not in copies.values()} | copies
    with mode:
        program = make_fx(fx.Interpreter(visible).run, decomposition_table=table)(
            *map(mode.from_tensor, zeros)
        )
    program.graph.eliminate_dead_code()
    _numbers_as_tensors(program)
    return program, zeros


def _visible(trace: Trace) -> fx.GraphModule:
    """The program without what is hidden of it."""
    graph = fx.Graph()
    known = dict[fx.Node, fx.Node]()
    found: Any = graph.graph_copy(trace.program.graph, known)
    graph.output(
        [
            value
            for value, port in zip(found, trace.outputs, strict=True)
            if port.name not in trace.hidden
        ]
    )
    graph.eliminate_dead_code()
    takes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, port in zip(takes, trace.inputs, strict=True):
        if port.name in trace.hidden:
            graph.erase_node(node)
    return fx.GraphModule(trace.program, graph)


def _numbers_as_tensors(program: fx.GraphModule) -> None:
    """XNNPACK, and the kernels of these operators, take tensors only."""
    names: dict[tuple[float, torch.dtype], str] = {}
    for node in list(program.graph.nodes):
        if node.target in _NUMBERS and any(isinstance(arg, (int, float)) for arg in node.args):
            dtype = node.meta["val"].dtype
            given = []
            for arg in node.args:
                if isinstance(arg, (int, float)):
                    name = names.setdefault((arg, dtype), f"_number_{len(names)}")
                    program.register_buffer(name, torch.tensor(arg, dtype=dtype))
                    with program.graph.inserting_before(node):
                        arg = program.graph.get_attr(name)  # noqa: PLW2901
                given.append(arg)
            node.args = tuple(given)
    program.recompile()


def _lowered(sized: tuple[fx.GraphModule, list[torch.Tensor]]) -> bytes:
    """The ``.pte`` of a program; an UnavailableError where an operator has no kernel."""
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS  # noqa: PLC0415
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (  # noqa: PLC0415
        XnnpackPartitioner,
    )
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager  # noqa: PLC0415
    from executorch.exir.backend.compile_spec_schema import CompileSpec  # noqa: PLC0415
    from executorch.exir.backend.partitioner import DelegationSpec  # noqa: PLC0415
    from executorch.exir.dialects._ops import ops  # noqa: PLC0415
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier  # noqa: PLC0415
    from executorch.runtime import Runtime  # noqa: PLC0415

    program = torch.export.export(sized[0], tuple(sized[1]), strict=False)
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
            space, name, overload = str(node.target).split(".")
            node.target = getattr(getattr(getattr(ops.edge, space), name), overload)
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    parts = (
        "graph_signature",
        "state_dict",
        "range_constraints",
        "module_call_graph",
        "example_inputs",
        "constants",
    )
    verifier = partial(EXIREdgeDialectVerifier, edge_compile_config=config, class_only=True)
    edge = torch.export.ExportedProgram(
        program.graph_module,
        program.graph,
        **{part: getattr(program, part) for part in parts},
        verifiers=[verifier()],
    )
    partitioner = XnnpackPartitioner(
        [item for item in ALL_PARTITIONER_CONFIGS if item.__name__ not in _LEFT_OUT]
    )
    # With this the backend runs one of its own passes instead of all seventeen.
    partitioner.delegation_spec = DelegationSpec(
        "XnnpackBackend", [CompileSpec("dqlinear_partitioner", b"")]
    )
    made = EdgeProgramManager(edge, compile_config=config).to_backend(partitioner).to_executorch()
    kernels = set(Runtime.get().operator_registry.operator_names)
    used = {
        f"{op.name}.{op.overload}" if op.overload else op.name
        for plan in made.executorch_program.execution_plan
        for op in plan.operators
    }
    if used - kernels:
        raise UnavailableError(
            "executorch", f"no kernel for op {', '.join(sorted(used - kernels))}"
        )
    data: bytes = made.buffer
    return data
