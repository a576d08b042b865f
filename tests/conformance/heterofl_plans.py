"""Worked examples of HeteroFL that concern sizes, slices, the merge, levels and shards (H1 to H5,
H9 to H12).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker_server.settings.assignment import LEVEL_RATES, assign_fix, parse_mix
from broker_server.settings.fleet import TrainConfig
from models import Axis, AxisKind, Dim, Layout, Registry, infer_layout, make_plan, slice_weights
from models.axes import kept_units
from simulation.data.partition import cut_shards, deal_shards
from tests.conformance.entry import Check, Entry, MismatchError
from tests.conformance.expectations import single_label_probability
from tests.conformance.small import average, layout_of, square

__all__ = ["HANDLERS", "published_layouts"]

_BYTES = 4
_MEBI = 2**20
_DEALS = 400
_SIGMAS = 5.0


def h1(entry: Entry, check: Check) -> None:
    """Channels kept at each level, odd sizes, and levels relative to a narrower global model."""
    sizes = entry.inputs["K"]
    rates = entry.inputs["rates"]
    for level, expected in entry.expected["levels"].items():
        check.same(
            f"levels.{level}", [Axis("k", size).kept(rates[level]) for size in sizes], expected
        )
    for (size, rate), wanted in zip(
        entry.inputs.get("odd", []), entry.expected.get("odd", []), strict=True
    ):
        kept = kept_units(size, rate)
        # The decision the example's own note asks for: 100 x 0.07 is 7.000000000000001 in floats,
        # and plain ceil gives
        # 8. Only that one unit is excused, and only where exact arithmetic agrees with the product.
        if kept != wanted == math.ceil(size * rate) and kept == math.ceil(
            Fraction(str(rate)) * size
        ):
            check.note(
                f"{size} x {rate} keeps {kept}, not {wanted}: rounding errors of floats do not "
                f"add a unit"
            )
            continue
        check.same(f"odd {size} x {rate}", kept, wanted)
    for key, levels in entry.expected.items():
        if key.startswith("relative_to_"):
            top = rates[key.removeprefix("relative_to_")]
            for level, expected in levels.items():
                got = [Axis("k", kept_units(size, top)).kept(rates[level] / top) for size in sizes]
                check.same(f"{key}.{level}", got, expected)


def h2(entry: Entry, check: Check) -> None:
    """Nested clients: each ring is averaged over those that hold it."""
    weights = entry.inputs["W_global"]
    layout = square(len(weights))
    clients = []
    for name, client in entry.inputs["clients"].items():
        plan = make_plan(layout, layout.tier(client["s"]))
        check.same(f"idx of {name}", plan.indices["k"], client["idx"])
        clients.append((plan, {"W": client["returned"]}, None))
    new, counts = average(layout, {"W": weights}, clients)
    check.same("W_new", new["W"], entry.expected["W_new"], relative=1e-6)
    check.same("count", counts["W"], entry.expected["count"])


def h3(entry: Entry, check: Check) -> None:
    """Classifier rows count only for labels the client has."""
    rows, columns = np.shape(entry.inputs["W_global"])
    layout = layout_of(
        [Axis("k", columns), Axis("classes", rows, AxisKind.FIXED)],
        {"W": (Dim("classes"), Dim("k")), "b": (Dim("classes"),)},
        labels="classes",
    )
    clients = []
    for client in entry.inputs["clients"]:
        plan = make_plan(layout, layout.tier(client["s"]))
        check.same(f"in_idx of {client.get('name', '?')}", plan.indices["k"], client["in_idx"])
        clients.append(
            (plan, {"W": client["returned_W"], "b": client["returned_b"]}, client["labels"])
        )
    weights = {"W": entry.inputs["W_global"], "b": entry.inputs["b_global"]}
    new, counts = average(layout, weights, clients)
    for name in weights:
        check.same(f"{name}_new", new[name], entry.expected[f"{name}_new"], relative=1e-6)
        check.same(f"{name}_count", counts[name], entry.expected[f"{name}_count"])


def h4(entry: Entry, check: Check) -> None:
    """Slice, change and merge a net of two layers and a norm."""
    weights = {
        name: np.asarray(entry.inputs["global_"][name], np.float32)
        for name in entry.inputs["order"]
    }
    hidden, inputs = weights["W1"].shape
    classes = len(weights["b2"])
    hidden_only = (Dim("k"),)
    dims = {
        "W1": (Dim("k"), Dim("in")),
        **dict.fromkeys(("b1", "gamma", "beta"), hidden_only),
        "W2": (Dim("classes"), Dim("k")),
        "b2": (Dim("classes"),),
    }
    layout = layout_of(
        [
            Axis("in", inputs, AxisKind.FIXED),
            Axis("k", hidden),
            Axis("classes", classes, AxisKind.FIXED),
        ],
        {name: dims[name] for name in weights},
        labels="classes",
    )
    clients = []
    for client in entry.inputs["clients"]:
        plan = make_plan(layout, layout.tier(client["s"]))
        returned = {
            name: value + client["delta"]
            for name, value in slice_weights(layout, plan, weights).items()
        }
        clients.append((plan, returned, client["labels"]))
    new, counts = average(layout, weights, clients)
    check.same("new", new, entry.expected["new"], relative=1e-6)
    check.same("count", counts, entry.expected["count"])


def h5(entry: Entry, check: Check) -> None:
    """Rows and columns a Transformer keeps, found in slices of weights that are numbered."""
    sizes = entry.inputs
    layout = infer_layout(
        Registry.zoo().get("transformer_mlm"),
        {
            "embed": sizes["E"],
            "heads": sizes["H"],
            "ffn": sizes["FFN"],
            "blocks": 1,
            "classes": 6,
            "input_shape": (5,),
        },
    )
    for width, lists in entry.expected.items():
        check.same(f"s={width}", _kept_lists(layout, float(width), lists), lists)


def _kept_lists(layout: Layout, width: float, wanted: Mapping[str, Any]) -> dict[str, list[int]]:
    numbered: dict[str, NDArray[Any]] = {
        item.name: np.arange(math.prod(item.shape)).reshape(item.shape)
        for item in layout.parameters
    }
    cut = slice_weights(layout, make_plan(layout, layout.tier(width)), numbered)
    ends = {
        "emb": "tokens.weight",
        "q": "attention.query.weight",
        "o": "attention.output.weight",
        "ffn1": "linear1.weight",
        "ffn2": "linear2.weight",
    }
    found = {}
    for key in wanted:
        role, _, side = key.partition("_")
        (name,) = [
            item.name
            for item in layout.parameters
            if item.block != "head" and item.name.endswith(ends[role])
        ]
        columns = numbered[name].shape[-1]
        found[key] = (
            cut[name][:, 0] // columns if side == "rows" else cut[name][0] % columns
        ).tolist()
    return found


def h9(entry: Entry, check: Check) -> None:
    """Rates of a fixed assignment, one by one or counted."""
    unnamed = [
        key
        for key in entry.expected
        if key not in {text.replace("-", "_") for text, _ in entry.inputs["cases"]}
    ]
    for text, devices in entry.inputs["cases"]:
        rates = assign_fix(parse_mix(text), devices)
        key = text.replace("-", "_")
        if key not in entry.expected:
            key = unnamed.pop(0)
        expected = entry.expected[key]
        if isinstance(expected, dict):
            counted = {float(rate): count for rate, count in expected.items()}
            counts = Counter(rates)
            check.same(
                f"{text} counted",
                {rate: counts[rate] for rate in counted},
                {str(r): c for r, c in counted.items()},
            )
            check.same(f"{text} devices", sum(counted.values()), devices)
        else:
            check.same(text, list(rates), expected)


def h10(entry: Entry, check: Check) -> None:
    """Shards of classes, and how often a device's draws coincide: exactly, and in deals."""
    given = entry.inputs
    per_device = entry.inputs["shards_per_user"]
    cases = [key for key in entry.expected if isinstance(entry.expected[key], dict)]
    for key, users, classes, size in zip(
        cases, given["users"], given["classes"], given["class_sizes"], strict=True
    ):
        expected = entry.expected[key]
        whole = users * per_device % classes == 0
        dealt = deal_shards(classes, users, per_device, 0, as_released=whole)
        if not whole:
            check.note(
                f"{key}: {users * per_device} shards are no multiple of {classes} classes; "
                f"classes differ by one"
            )
        sizes = [len(shard) for shard in cut_shards(np.arange(size), min(dealt.counts))]
        found = {
            "shards_per_class": min(dealt.counts),
            "sizes": sizes,
            "sizes_set": sorted(set(sizes)),
        }
        check.same(key, {name: found[name] for name in expected}, expected)
    counts = deal_shards(given["classes"][-1], given["users"][-1], per_device, 0).counts
    odds = single_label_probability(counts, per_device)
    check.same("one class only", odds, entry.expected["prob_client_has_one_class_only"])
    _deals_agree(check, given["classes"][-1], given["users"][-1], per_device, odds)


def _deals_agree(check: Check, classes: int, users: int, per_device: int, odds: float) -> None:
    if users * per_device % classes:
        return
    deals = [
        deal_shards(classes, users, per_device, seed, as_released=True) for seed in range(_DEALS)
    ]
    single = [sum(len(labels) == 1 for labels in dealt.labels) / users for dealt in deals]
    error = float(np.std(single, ddof=1)) / math.sqrt(_DEALS)
    if abs(float(np.mean(single)) - odds) > _SIGMAS * error + 1e-9:
        raise MismatchError(
            "share of devices with one class in deals", odds, float(np.mean(single))
        )
    check.note(f"{_DEALS} deals agree within {_SIGMAS:g} standard errors")


def h11(entry: Entry, check: Check) -> None:
    """The learning rate of rounds, by both conventions."""
    schedules: dict[str, Literal["after", "before"]] = {"heterofl": "after", "fedrolex": "before"}
    for name, rounds in entry.expected.items():
        given = {key: entry.inputs[name][key] for key in ("milestones", "factor")}
        train = TrainConfig(
            learning_rate=entry.inputs[name]["lr"], schedule=schedules[name], **given
        )
        for number, expected in rounds.items():
            got = train.rate_after(int(number) - 1)
            # Learning rates are small: a millionth of a unit would hide a wrong one.
            check.same(f"{name} round {number}", got, expected, absolute=1e-12, relative=1e-6)


def published_layouts(inputs: Mapping[str, Any], names: Iterable[str]) -> dict[str, Layout]:
    """The networks of HeteroFL's tables, by the names the worked examples give them.

    Args:
        inputs: sizes, as the worked example H12 gives them.
        names: ``conv``, ``transformer``, or ``resnet_`` and its blocks in each stage.
    """
    zoo = Registry.zoo()

    def of(name: str) -> Layout:
        if name == "conv":
            return infer_layout(zoo.get("conv"), {"channels": tuple(inputs["conv"])})
        if name != "transformer":
            blocks = tuple(int(digit) for digit in name.removeprefix("resnet_"))
            return infer_layout(
                zoo.get("preresnet18"), {"channels": tuple(inputs["resnet"]), "blocks": blocks}
            )
        text = inputs["transformer"]
        settings = {
            "embed": text["E"],
            "ffn": text["F"],
            "blocks": text["L"],
            "heads": text["heads"],
            "classes": text["vocab"],
            "input_shape": (text["positions"],),
        }
        return infer_layout(zoo.get("transformer_mlm"), settings)

    return {name: of(name) for name in names}


def h12(entry: Entry, check: Check) -> None:
    """Parameters and sizes of the published networks at every level."""
    levels = entry.expected.values()
    layouts = published_layouts(
        entry.inputs, sorted({key.removesuffix("_MB") for level in levels for key in level})
    )
    for level, expected in entry.expected.items():
        rate = LEVEL_RATES[level]
        counts = {
            name: layout.parameter_count(layout.tier(rate)) for name, layout in layouts.items()
        }
        sizes = {f"{name}_MB": round(count * _BYTES / _MEBI, 2) for name, count in counts.items()}
        check.same(f"level {level}", {key: {**counts, **sizes}[key] for key in expected}, expected)


HANDLERS = MappingProxyType(
    {"H1": h1, "H2": h2, "H3": h3, "H4": h4, "H5": h5, "H9": h9, "H10": h10, "H11": h11, "H12": h12}
)
"""What computes an entry, by the prefix of its id."""
