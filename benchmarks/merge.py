"""Measure merging: throughput as a share of memcpy, and memory for 8, 64 and 256 updates."""

import itertools
import json
import sys
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.child import printed
from benchmarks.row import Row
from broker_server.strategies.accumulator import finish, fold, start
from device_runtime.board import peak_resident_bytes
from models.axes import Axis, AxisKind
from models.block_names import HEAD, block_name
from models.dims import Dim
from models.draws import PlanKind
from models.layout import Layout
from models.parameters import Parameter
from models.plan import compile_plan, make_plan
from models.slicing import CompiledPlan

# 11.7 million parameters, 47 MB: the size DESIGN decision 6 was measured with.
CHANNELS = (176, 352, 704, 1408)
WIDTHS = (1.0, 0.5, 0.25)
CLASSES = 10
THROUGHPUT_BUDGET = 0.6
ROLLING_BUDGET = 0.5
MEMORY_BUDGET = 3.0
GROWTH_BUDGET = 0.05
REPEATS = 5


def conv_layout(channels: tuple[int, ...] = CHANNELS) -> Layout:
    """Return a layout like the zoo's ``conv``: 3x3 convolutions with norms, one linear layer."""
    axes = {
        "image": Axis("image", 1, AxisKind.FIXED),
        "kernel": Axis("kernel", 3, AxisKind.FIXED),
        "classes": Axis("classes", CLASSES, AxisKind.FIXED),
    }
    parameters = []
    before = "image"
    for number, size in enumerate(channels, 1):
        out = f"conv{number}.out"
        axes[out] = Axis(out, size)
        dims = (Dim(out), Dim(before), Dim("kernel"), Dim("kernel"))
        dims_by_name = {
            "conv.weight": dims,
            "conv.bias": (Dim(out),),
            "norm.weight": (Dim(out),),
            "norm.bias": (Dim(out),),
        }
        for name, parameter_dims in dims_by_name.items():
            shape = tuple(axes[dim.axis].size for dim in parameter_dims)
            full_name = f"blocks.{number}.{name}"
            parameters.append(Parameter(full_name, shape, parameter_dims, block_name(1)))
        before = out
    parameters.append(
        Parameter("head.weight", (CLASSES, channels[-1]), (Dim("classes"), Dim(before)), HEAD)
    )
    parameters.append(Parameter("head.bias", (CLASSES,), (Dim("classes"),), HEAD))
    return Layout(
        arch="bench",
        settings={},
        axes=axes,
        parameters=tuple(parameters),
        statistics=(),
        depth=1,
        depths=(1,),
        label_axes=("classes",),
        input_shape=(1, 28, 28),
        input_dtype="float32",
        classes=CLASSES,
    )


def plans_of(
    layout: Layout,
    kind: PlanKind,
    widths: tuple[float, ...],
) -> list[CompiledPlan]:
    """Return the plans of one round, one for each width."""
    plans = []
    for width in widths:
        plan = make_plan(layout, layout.tier(width), kind, round_index=37)
        plans.append(compile_plan(layout, plan))
    return plans


def _weights(
    shapes: dict[str, tuple[int, ...]],
    seed: int,
) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _throughput(
    kind: PlanKind,
    widths: tuple[float, ...],
    updates: int,
    weight: float,
) -> tuple[float, float]:
    """Measure the processor time of merging and of copying the same bytes.

    Every update is merged and copied in turn, and of each step the fastest of some repeats counts,
    so that other work of the machine disturbs both alike.

    Returns:
        Seconds of merging, and of copying.
    """
    layout = conv_layout()
    plans = plans_of(layout, kind, widths)
    old = _weights(layout.shapes(layout.tier(1.0)), 0)
    sent = []
    copies = []
    for seed, plan in enumerate(plans, 1):
        shapes = {}
        copy = {}
        for name, tensor in plan.tensors.items():
            shapes[name] = tensor.local_shape
            copy[name] = np.zeros(tensor.local_shape, np.float32)
        sent.append(_weights(shapes, seed))
        copies.append(copy)
    merging = np.full((REPEATS, updates + 1), np.inf)
    copying = np.full((REPEATS, updates), np.inf)
    for repeat in range(REPEATS):
        state = start(layout)
        for index in range(updates):
            number = index % len(plans)
            began = time.process_time()
            fold(
                state,
                str(number),
                plans[number],
                sent[number],
                weight=weight,
                labels=range(index % 3, CLASSES),
            )
            between = time.process_time()
            for name, value in sent[number].items():
                np.copyto(copies[number][name], value)
            merging[repeat, index] = between - began
            copying[repeat, index] = time.process_time() - between
        began = time.process_time()
        finish(state, old)
        merging[repeat, updates] = time.process_time() - began
    return float(merging.min(0).sum()), float(copying.min(0).sum())


def _memory(updates: int) -> dict[str, float]:
    """Measure the resident memory of merging updates of mixed tiers, in a fresh process.

    Returns:
        The memory in sizes of the model.
    """
    layout = conv_layout()
    plans = plans_of(layout, "rolling", WIDTHS)
    tier = layout.tier(1.0)
    size = 4 * layout.parameter_count(tier)
    before = peak_resident_bytes()
    state = start(layout)
    for index in range(updates):
        plan = plans[index % len(plans)]
        update = {}
        for name, tensor in plan.tensors.items():
            update[name] = np.full(tensor.local_shape, index, np.float32)
        fold(
            state,
            plan.title,
            plan,
            update,
            weight=1.0 + index,
            labels=range(index % CLASSES + 1),
        )
        del update
    # As in the server, which reads the old weights back from its store when the round closes.
    old = {name: np.ones(shape, np.float32) for name, shape in layout.shapes(tier).items()}
    finish(state, old)
    return {"models": (peak_resident_bytes() - before) / size}


# Name, plans, widths, number of updates, and weight of each.
_CASES: tuple[tuple[str, PlanKind, tuple[float, ...], int, float], ...] = (
    ("full tiers, 60 updates", "static", (1.0,), 60, 1.0),
    ("static, tiers 1, 1/2, 1/4, 60 updates", "static", WIDTHS, 60, 1.0),
    ("static, tiers 1, 1/2, 1/4, 8 updates", "static", WIDTHS, 8, 1.0),
    ("rolling, tiers 1, 1/2, 1/4, 60 updates", "rolling", WIDTHS, 60, 1.0),
    ("weighted by samples, tiers 1, 1/2, 1/4, 60 updates", "static", WIDTHS, 60, 3.0),
)


def rows() -> list[Row]:
    """Measure throughput, then memory."""
    return [*_throughput_rows(), *_memory_rows()]


def _throughput_rows() -> list[Row]:
    rows = []
    for name, kind, widths, updates, weight in _CASES:
        merging, copying = _throughput(kind, widths, updates, weight)
        row = Row(
            f"merge throughput / memcpy: {name}",
            copying / merging,
            "ratio, CPU",
            ROLLING_BUDGET if kind == "rolling" else THROUGHPUT_BUDGET,
            at_least=True,
        )
        rows.append(row)
    return rows


def _memory_rows() -> list[Row]:
    rows = []
    sizes = []
    for updates in (8, 64, 256):
        models = json.loads(printed("-m", "benchmarks.merge", str(updates)))["models"]
        if models < 1.0:
            raise RuntimeError(
                f"{updates} updates took {models:.2f} models of memory, so the measurement is wrong"
            )
        name = f"merge memory: {updates} updates of mixed tiers"
        rows.append(Row(name, models, "model sizes", MEMORY_BUDGET))
        sizes.append(models)
    growth = max(abs(later - earlier) for earlier, later in itertools.pairwise(sizes))
    name = "merge memory growth between 8, 64 and 256 updates"
    rows.append(Row(name, growth, "model sizes", GROWTH_BUDGET))
    return rows


if __name__ == "__main__":
    print(json.dumps(_memory(int(sys.argv[1]))))
