"""Records a function on fake tensors as a flat program, in half of the time of PyTorch's tracer.

`make_fx` collects what a compiler needs: a proxy of every tensor and size, a snapshot of each
result, and code in Python. An export reads operators, shapes and lines only. Sizes stay in the
arguments as symbols, so arithmetic on them needs no nodes.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_COPIED_META = ("stack_trace", "nn_module_stack")  # the line and the modules, for messages
_COMPOSITE = "CompositeImplicitAutograd"


class UnfitError(Exception):
    """A program that only PyTorch's tracer can record, such as one that computes with a value."""


def record(
    function: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor], table: Mapping[Any, Any]
) -> fx.GraphModule:
    """Return the operators that a function runs on fake tensors, as `make_fx` returns them.

    The caller enters the mode of the fake tensors first.

    Args:
        function: takes a tensor for each input.
        fakes: the inputs, which lie in `node.meta["val"]` like all results.
        table: decompositions of operators.

    Raises:
        UnfitError: see there; an operator may also raise anything that it raises on fake tensors.
    """
    recorder = _Recorder(table)
    for number, fake in enumerate(fakes):
        recorder.keep(fake, recorder.graph.placeholder(f"arg{number}"))
    with recorder:
        results = function(*fakes)
    recorder.graph.output([recorder.argument(result) for result in results])
    # Lazy, because nothing reads its Python code.
    return _LazyGraphModule(recorder.root, recorder.graph)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operator that runs to a graph."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root = nn.Module()
        self.graph = fx.Graph()
        self._table = table
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the identity of one of them
        self._constants: dict[int, str] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is _DEVICE:
            return func(*args, **options)
        rule = self._table.get(func)
        if rule is not None:
            with self:
                return rule(*args, **options)
        # Autograd splits such an operator; so does this, where autograd is off.
        if _is_composite(func) and autograd_would_have_decomposed(
            func, tree_leaves((args, options))
        ):
            with self:
                result = func.decompose(*args, **options)
            if result is not NotImplemented:
                return result
        if func is _aten.detach.default and id(args[0]) in self._nodes:
            result = func(*args)
            self._keep_as(result, self._nodes[id(args[0])])
            return result
        node = self._add(func, args, options)
        result = func(*args, **options)
        self.keep(result, node)
        return result

    def _add(self, func: Any, args: Any, options: Mapping[str, Any]) -> fx.Node:
        """Add an operator to the graph, behind the constants that it reads."""
        inputs = tuple(map(self.argument, args))
        named: dict[str, Any] = {}
        for name, value in options.items():
            named[name] = self.argument(value)
        # PyTorch runs it on a constant that may be changed in place.
        target = _aten.lift_fresh_copy.default if func is _aten.lift_fresh.default else func
        return self._created("call_function", target, inputs, named)

    def _created(self, kind: str, target: Any, args: Any, options: Mapping[str, Any]) -> fx.Node:
        name = _name_of(target) if kind == "call_function" else None
        node = self.graph.create_node(kind, target, (), {}, name)
        # Only now, because PyTorch warns of a new node with symbols.
        node.args = args
        node.kwargs = dict(options)
        for key in _COPIED_META:
            value = traceback.current_meta.get(key)
            if value:
                node.meta[key] = value
        return node

    def keep(self, result: Any, node: fx.Node) -> None:
        """Note the node of a result, or of each of several.

        Raises:
            UnfitError: the result is a number.
        """
        node.meta["val"] = result
        if isinstance(result, Tensor):
            self._keep_as(result, node)
            return
        if not isinstance(result, (tuple, list)):
            raise UnfitError
        for number, entry in enumerate(result):
            if entry is None:
                continue
            part = self._created("call_function", operator.getitem, (node, number), {})
            self.keep(entry, part)

    def _keep_as(self, tensor: Tensor, node: fx.Node) -> None:
        self._kept.append(tensor)
        self._nodes[id(tensor)] = node

    def argument(self, value: Any) -> Any:
        """Return an argument of a node: nodes for tensors, also in lists.

        Raises:
            UnfitError: it is a number that depends on the batch, and not a size.
        """
        if isinstance(value, Tensor):
            node = self._nodes.get(id(value))
            return self._constant(value) if node is None else node
        if isinstance(value, torch.SymInt):
            size = value.node.maybe_as_int()
            return value if size is None else size
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise UnfitError
        if isinstance(value, (tuple, list)):
            return [self.argument(entry) for entry in value]
        return value

    def _constant(self, value: Tensor) -> fx.Node:
        """Return a node for a tensor that is not computed from the inputs."""
        if isinstance(value, FakeTensor):
            raise UnfitError
        name = self._constants.get(id(value))
        if name is None:
            name = f"constant{len(self._constants)}"
            self._constants[id(value)] = name
            setattr(self.root, name, value)
        node = self._created("get_attr", name, (), {})
        node.meta["val"] = value
        return node


@cache
def _is_composite(func: Any) -> bool:
    """Return whether PyTorch defines an operator by others."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - no public name
    return bool(has_kernel(func.name(), _COMPOSITE))


@cache
def _name_of(target: Any) -> str:
    """Return a name for nodes of an operator."""
    packet = getattr(target, "overloadpacket", target)
    return str(packet.__name__)
