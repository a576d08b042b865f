"""The selective average once more, slow and obvious, and layouts and plans to merge by."""

import numpy as np

from broker_server.strategies.accumulator import finish, fold, start
from models.axes import Axis, AxisKind
from models.block_names import HEAD, block_name
from models.dims import Dim
from models.layout import Layout
from models.parameters import Parameter
from models.plan import compile_plan, make_plan

CLASSES = 4


def _dim(text: str) -> tuple[str, int]:
    axis, _, inner = text.partition("*")
    return axis, int(inner or 1)


def layout_of(
    shapes: dict[str, tuple[str, ...]], sizes: dict[str, int], *, classes=CLASSES, blocks=None
) -> Layout:
    axes = {}
    for name, size in sizes.items():
        fixed = name in {"classes", "inputs", "kernel"}
        axes[name] = Axis(
            name, size, AxisKind.FIXED if fixed else AxisKind.WIDTH, 2 if name == "heads" else 1
        )
    parameters = tuple(
        Parameter(
            name,
            tuple(sizes[axis] * inner for axis, inner in map(_dim, dims)),
            tuple(Dim(*_dim(text)) for text in dims),
            (blocks or {}).get(name, HEAD),
        )
        for name, dims in shapes.items()
    )
    depth = max([1, *(int(b[5:]) for b in (blocks or {}).values() if b.startswith("block"))])
    return Layout(
        "t",
        {},
        axes,
        parameters,
        (),
        depth,
        tuple(range(1, depth + 1)),
        ("classes",),
        (3,),
        "float32",
        classes,
    )


def plan_of(layout, width, kind="static", depth=None, **settings):
    return compile_plan(layout, make_plan(layout, layout.tier(width, depth), kind, **settings))


def f32(values):
    return np.asarray(values, np.float32)


SHAPES = {
    "conv": ("a", "inputs", "kernel", "kernel"),
    "bias": ("a",),
    "deep": ("b", "a"),
    "flat": ("b", "a*3"),
    "qkv": ("heads", "b"),
    "head": ("classes", "heads"),
    "out": ("classes",),
}
BLOCKS = {
    "conv": block_name(1),
    "bias": block_name(1),
    "deep": block_name(2),
    "flat": block_name(2),
}
LAYOUT = layout_of(
    SHAPES,
    {"a": 6, "b": 5, "heads": 8, "inputs": 2, "kernel": 3, "classes": CLASSES},
    blocks=BLOCKS,
)


def merged(found, old, layout=LAYOUT):
    state = start(layout)
    for key, plan, tensors, weight, labels in found:
        fold(state, key, plan, tensors, weight=weight, labels=labels)
    return finish(state, old)


def oracle(found, old, layout=LAYOUT):
    """Entry by entry in float64, from dense index arrays: slow, obvious, and sharing no code with
    the merge.
    """
    result = {}
    for item in layout.parameters:
        total = np.zeros(item.shape)
        count = np.zeros(item.shape)
        for _, plan, tensors, weight, labels in found:
            if item.name not in plan.tensors:
                continue
            compiled = plan.tensors[item.name]
            kept = [
                np.concatenate([np.arange(r.start, r.start + r.length) for r in row])
                for row in compiled.runs
            ]
            held = np.zeros(item.shape, bool)
            held[np.ix_(*kept)] = True
            values = np.zeros(item.shape)
            values[np.ix_(*kept)] = tensors[item.name]
            if labels is not None and item.dims[0].axis == "classes":
                absent = [label for label in range(CLASSES) if label not in labels]
                held[absent] = False
            total += np.where(held, weight * values, 0)
            count += np.where(held, weight, 0)
        with np.errstate(invalid="ignore"):
            result[item.name] = (np.where(count > 0, total / count, old[item.name]), count)
    return result
