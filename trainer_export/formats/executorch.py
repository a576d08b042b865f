"""The format of ExecuTorch for Android, iOS and C++: one ``.pte`` for each program.

They are the train, eval and infer programs of the portable format. ExecuTorch's own training export
is not used, because its gradient of max pooling adds into uninitialised memory. Sizes are fixed: a
training step takes `TRAIN_BATCH` samples, the other programs one. XNNPACK runs the operators that
it supports, and the kernels of every ExecuTorch runtime run the others; a model that needs another
kernel is refused. The runtime's own passes would trace a program some twenty times, which takes
minutes and changes nothing here, so this module names the operators for the runtime directly.
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
from trainer_export.batch_sizes import AtSize
from trainer_export.batches import SizedBatches
from trainer_export.formats.files import SetFile, UnavailableError, silent_stderr
from trainer_export.graph import Port
from trainer_export.lowering.matrix_products import MATRIX_PRODUCTS
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.routines.evaluate import check_eval, trace_eval
from trainer_export.routines.infer import check_infer, infer_part
from trainer_export.routines.train import trace_train
from trainer_export.traced_program import BATCH, Trace
from trainer_export.train_check import check_train

TRAIN_BATCH = 32
"""Batch size of a training step; the eval and infer programs take one sample at a time."""

NOT_INSTALLED = (
    "the format executorch needs pip install 'shoal[export,executorch]'; or export without"
    " this format"
)
"""The error if ExecuTorch is not installed."""

aten = torch.ops.aten

_CHECKS = MappingProxyType(
    {
        "executorch/train": check_train,
        "executorch/eval": check_eval,
        "executorch/infer": check_infer,
    }
)
# Operators that may return their input's memory; each has a counterpart that copies.
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
# Operators that XNNPACK and the runtime's kernels support only for tensors.
_OF_TENSORS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
# XNNPACK joins at most five tensors, two at a time by a copy; the runtime's kernel joins any
# number. XNNPACK expects channels last in the others, and the pass that would reorder their inputs
# is one of those that `_partitioner` leaves out.
_LEFT_OUT = (
    "CatConfig",
    "AvgPoolingConfig",
    "ConvolutionConfig",
    "MaxDimConfig",
    "MaxPool2dConfig",
    "MeanDimConfig",
    "PreluConfig",
    "UpsampleBilinear2dConfig",
)


def is_installed() -> bool:
    """Return whether ExecuTorch is installed."""
    return importlib.util.find_spec("executorch") is not None


def write_programs(
    module: nn.Module,
    signature: Signature,
    recipe: Recipe,
) -> tuple[SetFile, ...]:
    """Write the train, eval and infer programs of a model.

    Raises:
        ExportError: the model cannot be traced, or ExecuTorch is not installed.
        UnavailableError: ExecuTorch has no kernel for an operator.
    """
    if not is_installed():
        raise ExportError(NOT_INSTALLED)
    # Programs in which the batch size is a number, not a symbol.
    signature = replace(signature, known=None)
    evaluation = trace_eval(module, signature, recipe)
    train = trace_train(module, signature, recipe)
    return (
        _write_program(train, TRAIN_BATCH),
        _write_program(evaluation, 1),
        _write_program(infer_part(evaluation), 1),
    )


def check_programs(
    files: Sequence[SetFile],
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> tuple[CheckSpec, ...]:
    """Run every program and compare it with PyTorch.

    Raises:
        ExportError: a graph deviates; the message names it and the tensor.
    """
    runtime = {"runtime": f"executorch {importlib.metadata.version('executorch')}"}
    checks: list[CheckSpec] = []
    for file in files:
        # Among many samples, one is often so close to the edge of a ReLU or a maximum that rounding
        # decides, see `repeated`.
        sizes = (TRAIN_BATCH if file.key == "executorch/train" else 1,)
        sized = replace(batches, sizes=sizes, steps=min(batches.steps, 2))
        session = ProgramSession(file)
        result = _CHECKS[file.key](session, module, recipe, sized, graph=file.key)
        checks.append(result.model_copy(update=runtime))
    return tuple(checks)


class ProgramSession:
    """A ``.pte`` with the interface of an onnxruntime session."""

    def __init__(self, file: SetFile) -> None:
        from executorch.runtime import Runtime  # noqa: PLC0415 - only where it is installed

        self._file = file
        with silent_stderr():
            self._method = Runtime.get().load_program(file.data).load_method("forward")

    def get_inputs(self) -> tuple[Port, ...]:
        """Return the inputs, in order."""
        return self._file.inputs

    def get_outputs(self) -> tuple[Port, ...]:
        """Return the outputs, in order."""
        return self._file.outputs

    def run(
        self,
        names: Sequence[str],
        feed: Mapping[str, NDArray[Any]],
    ) -> list[NDArray[Any]]:
        """Run it once; the arguments are those of onnxruntime."""
        inputs = []
        for port in self._file.inputs:
            inputs.append(torch.tensor(feed[port.name]))
        values = self._method.execute(inputs)
        by_name = {}
        for port, value in zip(self._file.outputs, values, strict=True):
            by_name[port.name] = value
        # Copies: the program writes its next results into the same memory.
        results = []
        for name in names:
            results.append(by_name[name].clone().numpy())
        return results


def _write_program(trace: Trace, batch: int) -> SetFile:
    """Return a traced program as a file, for batches of one size."""
    with silent_stderr(), _warnings_ignored():
        try:
            data = _lower(*_sized(trace, batch))
        except UnavailableError:
            raise
        except Exception as error:
            raise UnavailableError(
                "executorch",
                f"lowering failed: {first_line(error)}",
            ) from error
    return SetFile(
        f"executorch/{trace.name}",
        f"executorch/{trace.name}.pte",
        data,
        _sized_ports(trace, trace.inputs, batch),
        _sized_ports(trace, trace.outputs, batch),
    )


def _sized_ports(
    trace: Trace,
    ports: Sequence[Port],
    batch: int,
) -> tuple[Port, ...]:
    """Return the visible ports, with a number as batch size."""
    visible = []
    for port in ports:
        if port.name not in trace.hidden:
            visible.append(port)
    sized = []
    for port in visible:
        sized.append(replace(port, shape=_sizes(port, batch)))
    return tuple(sized)


def _sizes(port: Port, batch: int) -> tuple[int, ...]:
    sizes = []
    for size in port.shape:
        sizes.append(batch if size == BATCH else int(size))
    return tuple(sizes)


@contextmanager
def _warnings_ignored() -> Iterator[None]:
    """Suppress ExecuTorch's warnings about its own use of PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sized(trace: Trace, batch: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return a program for batches of one size, in operators of the runtime, and example inputs."""
    zeros = []
    for port in _sized_ports(trace, trace.inputs, batch):
        dtype = torch.int64 if port.dtype == "int64" else torch.float32
        zeros.append(torch.zeros(port.shape, dtype=dtype))  # type: ignore[arg-type]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    visible = _visible(trace)
    table = _decompositions()
    with mode:
        traced = make_fx(AtSize(visible, batch).run, decomposition_table=table)
        program = traced(*map(mode.from_tensor, zeros))
    program.graph.eliminate_dead_code()
    _numbers_as_tensors(program)
    return program, zeros


def _decompositions() -> dict[Any, Any]:
    """Return the decompositions of operators that the runtime lacks, with views as copies."""
    copies: dict[Any, Any] = {}
    for name in _VIEWS:
        view = getattr(aten, name)
        copy = getattr(aten, f"{name}_copy")
        for overload in view.overloads():
            if overload in copy.overloads():
                copies[getattr(view, overload)] = getattr(copy, overload)
    rules: dict[Any, Any] = {**core_aten_decompositions(), **MATRIX_PRODUCTS}
    # PyTorch would decompose a copy into a view again.
    kept = {}
    for operator, rule in rules.items():
        if operator not in copies.values():
            kept[operator] = rule
    return kept | copies


def _visible(trace: Trace) -> fx.GraphModule:
    """Return the program without its hidden inputs and outputs."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    values: Any = graph.graph_copy(trace.program.graph, copied)
    outputs = []
    for value, port in zip(values, trace.outputs, strict=True):
        if port.name not in trace.hidden:
            outputs.append(value)
    graph.output(outputs)
    graph.eliminate_dead_code()
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(node)
    for node, port in zip(inputs, trace.inputs, strict=True):
        if port.name in trace.hidden:
            graph.erase_node(node)
    return fx.GraphModule(trace.program, graph)


def _numbers_as_tensors(program: fx.GraphModule) -> None:
    """Replace numbers by constants, one for each number and type."""
    names: dict[tuple[float, torch.dtype], str] = {}
    for node in list(program.graph.nodes):
        if node.target not in _OF_TENSORS:
            continue
        if not any(isinstance(arg, (int, float)) for arg in node.args):
            continue
        dtype = node.meta["val"].dtype
        args = []
        for arg in node.args:
            if not isinstance(arg, (int, float)):
                args.append(arg)
                continue
            name = names.setdefault((arg, dtype), f"_number_{len(names)}")
            program.register_buffer(name, torch.tensor(arg, dtype=dtype))
            with program.graph.inserting_before(node):
                args.append(program.graph.get_attr(name))
        node.args = tuple(args)
    program.recompile()


_PARTS = (
    "graph_signature",
    "state_dict",
    "range_constraints",
    "module_call_graph",
    "example_inputs",
    "constants",
)
"""The parts of an exported program besides its graph."""


def _lower(sized: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bytes:
    """Return the ``.pte`` of a program.

    Raises:
        UnavailableError: an operator has no kernel.
    """
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager  # noqa: PLC0415
    from executorch.exir.verification.verifier import EXIREdgeDialectVerifier  # noqa: PLC0415

    program = torch.export.export(sized, tuple(inputs), strict=False)
    _name_for_runtime(program)
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    verifier = partial(EXIREdgeDialectVerifier, edge_compile_config=config, class_only=True)
    edge = torch.export.ExportedProgram(
        program.graph_module,
        program.graph,
        **{name: getattr(program, name) for name in _PARTS},
        verifiers=[verifier()],
    )
    manager = EdgeProgramManager(edge, compile_config=config)
    finished = manager.to_backend(_partitioner()).to_executorch()
    _refuse_without_kernel(finished.executorch_program)
    data: bytes = finished.buffer
    return data


def _name_for_runtime(program: torch.export.ExportedProgram) -> None:
    """Name a program's operators as the runtime does; its own passes would take minutes."""
    from executorch.exir.dialects._ops import ops  # noqa: PLC0415

    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
            space, name, overload = str(node.target).split(".")
            node.target = getattr(getattr(getattr(ops.edge, space), name), overload)


def _partitioner() -> Any:
    """Return the partitioner that selects the operators for XNNPACK."""
    from executorch.backends.xnnpack.partition.config import (  # noqa: PLC0415
        ALL_PARTITIONER_CONFIGS,
    )
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (  # noqa: PLC0415
        XnnpackPartitioner,
    )
    from executorch.exir.backend.compile_spec_schema import CompileSpec  # noqa: PLC0415
    from executorch.exir.backend.partitioner import DelegationSpec  # noqa: PLC0415

    configs = []
    for config in ALL_PARTITIONER_CONFIGS:
        if config.__name__ not in _LEFT_OUT:
            configs.append(config)
    partitioner = XnnpackPartitioner(configs)
    # With this, the backend runs one of its passes instead of all seventeen.
    one_pass = CompileSpec("dqlinear_partitioner", b"")
    partitioner.delegation_spec = DelegationSpec("XnnpackBackend", [one_pass])
    return partitioner


def _refuse_without_kernel(program: Any) -> None:
    """Refuse a program with an operator for which the runtime has no kernel."""
    from executorch.runtime import Runtime  # noqa: PLC0415

    used = set()
    for plan in program.execution_plan:
        for operator in plan.operators:
            overload = f".{operator.overload}" if operator.overload else ""
            used.add(f"{operator.name}{overload}")
    missing = used - set(Runtime.get().operator_registry.operator_names)
    if missing:
        raise UnavailableError("executorch", f"no kernel for op {', '.join(sorted(missing))}")
