"""Merging: throughput as a share of memcpy of the same bytes, and memory for 8, 64 and 256 updates."""

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
from models.dims import Dim
from models.draws import PlanKind
from models.layout import HEAD, Layout, Parameter, block_name
from models.plan import compile_plan, make_plan
from models.slicing import CompiledPlan

CHANNELS = (
    176,
    352,
    704,
    1408,
)  # 11.7 million parameters, 47 MB: the size DESIGN decision 6 was measured with
WIDTHS = (1.0, 0.5, 0.25)
CLASSES = 10
THROUGHPUT_BUDGET = 0.6
ROLLING_BUDGET = 0.5
MEMORY_BUDGET = 3.0
GROWTH_BUDGET = 0.05
REPEATS = 5


def conv_layout(channels: tuple[int, ...] = CHANNELS) -> Layout:
    """A layout like the zoo's ``conv``: 3x3 convolutions with norms, then one linear layer."""
    axes = {
        "image": Axis("image", 1, AxisKind.FIXED),
        "kernel": Axis("kernel", 3, AxisKind.FIXED),
    }
    axes["classes"] = Axis("classes", CLASSES, AxisKind.FIXED)
    parameters = []
    before = "image"
    for number, size in enumerate(channels, 1):
        out = f"conv{number}.out"
        axes[out] = Axis(out, size)
        dims = (Dim(out), Dim(before), Dim("kernel"), Dim("kernel"))
        shapes = {
            "conv.weight": dims,
            "conv.bias": (Dim(out),),
            "norm.weight": (Dim(out),),
            "norm.bias": (Dim(out),),
        }
        for name, place in shapes.items():
            shape = tuple(axes[dim.axis].size for dim in place)
            parameters.append(Parameter(f"blocks.{number}.{name}", shape, place, block_name(1)))
        before = out
    parameters.append(
        Parameter("head.weight", (CLASSES, channels[-1]), (Dim("classes"), Dim(before)), HEAD)
    )
    parameters.append(Parameter("head.bias", (CLASSES,), (Dim("classes"),), HEAD))
    return Layout(
        "bench",
        {},
        axes,
        tuple(parameters),
        (),
        1,
        (1,),
        ("classes",),
        (1, 28, 28),
        "float32",
        CLASSES,
    )


def plans_of(layout: Layout, kind: PlanKind, widths: tuple[float, ...]) -> list[CompiledPlan]:
    """Of a round, one for each width."""
    return [
        compile_plan(layout, make_plan(layout, layout.tier(width), kind, round_index=37))
        for width in widths
    ]


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _throughput(
    kind: PlanKind, widths: tuple[float, ...], updates: int, weight: float
) -> tuple[float, float]:
    """Seconds of the processor to merge and to copy the same bytes.

    Every update is merged and copied in turn, and of each step the fastest of some repeats counts,
    so that whatever else the machine does disturbs both alike.
    """
    layout = conv_layout()
    plans = plans_of(layout, kind, widths)
    old = _weights(layout.shapes(layout.tier(1.0)), 0)
    given = [
        _weights({n: t.local_shape for n, t in plan.tensors.items()}, 1 + i)
        for i, plan in enumerate(plans)
    ]
    copies = [{name: np.zeros_like(value) for name, value in one.items()} for one in given]
    merging = np.full((REPEATS, updates + 1), np.inf)
    copying = np.full((REPEATS, updates), np.inf)
    for repeat in range(REPEATS):
        state = start(layout)
        for index in range(updates):
            at = index % len(plans)
            began = time.process_time()
            fold(
                state,
                str(at),
                plans[at],
                given[at],
                weight=weight,
                labels=range(index % 3, CLASSES),
            )
            between = time.process_time()
            for name, value in given[at].items():
                np.copyto(copies[at][name], value)
            merging[repeat, index] = between - began
            copying[repeat, index] = time.process_time() - between
        began = time.process_time()
        finish(state, old)
        merging[repeat, updates] = time.process_time() - began
    return float(merging.min(0).sum()), float(copying.min(0).sum())


def _memory(updates: int) -> dict[str, float]:
    """Resident memory of merging this many updates of mixed tiers, as multiples of the model; for a
    fresh process.
    """
    layout = conv_layout()
    plans = plans_of(layout, "rolling", WIDTHS)
    tier = layout.tier(1.0)
    size = 4 * layout.parameter_count(tier)
    before = peak_resident_bytes()
    state = start(layout)
    for index in range(updates):
        plan = plans[index % len(plans)]
        update = {
            name: np.full(item.local_shape, index, np.float32)
            for name, item in plan.tensors.items()
        }
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
    finish(
        state,
        {name: np.ones(shape, np.float32) for name, shape in layout.shapes(tier).items()},
    )
    return {"models": (peak_resident_bytes() - before) / size}


def rows() -> list[Row]:
    """Measure."""
    found = []
    cases: list[tuple[str, PlanKind, tuple[float, ...], int, float]] = [
        ("full tiers, 60 updates", "static", (1.0,), 60, 1.0),
        ("static, tiers 1, 1/2, 1/4, 60 updates", "static", WIDTHS, 60, 1.0),
        ("static, tiers 1, 1/2, 1/4, 8 updates", "static", WIDTHS, 8, 1.0),
        ("rolling, tiers 1, 1/2, 1/4, 60 updates", "rolling", WIDTHS, 60, 1.0),
        (
            "weighted by samples, tiers 1, 1/2, 1/4, 60 updates",
            "static",
            WIDTHS,
            60,
            3.0,
        ),
    ]
    for name, kind, widths, updates, weight in cases:
        merging, copying = _throughput(kind, widths, updates, weight)
        budget = ROLLING_BUDGET if kind == "rolling" else THROUGHPUT_BUDGET
        found.append(
            Row(
                f"merge throughput / memcpy: {name}",
                copying / merging,
                "ratio, CPU",
                budget,
                at_least=True,
            )
        )
    memory = {
        updates: json.loads(printed("-m", "benchmarks.merge", str(updates)))["models"]
        for updates in (8, 64, 256)
    }
    for updates, models in memory.items():
        if models < 1.0:
            raise RuntimeError(
                f"{updates} updates took {models:.2f} models of memory, so the measurement is wrong"
            )
        found.append(
            Row(
                f"merge memory: {updates} updates of mixed tiers",
                models,
                "model sizes",
                MEMORY_BUDGET,
            )
        )
    growth = max(abs(b - a) for a, b in itertools.pairwise(memory.values()))
    return [
        *found,
        Row(
            "merge memory growth between 8, 64 and 256 updates",
            growth,
            "model sizes",
            GROWTH_BUDGET,
        ),
    ]


if __name__ == "__main__":
    print(json.dumps(_memory(int(sys.argv[1]))))
