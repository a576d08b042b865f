"""Worked examples of FedRolex: windows, coverage, the merge, heads and the weightings of the
ablation (R1 to R9).
"""

import re
from types import MappingProxyType

import numpy as np

from broker_server.strategies.accumulator import finish, fold, start
from broker_server.strategies.fedrolex import plan_window
from broker_server.strategies.strategy import PlanRequest, Weighting
from broker_server.strategies.width_merge import layer_factor
from fleet_protocol.errors import PlanError
from models import Axis, Dim, Layout, Plan, Tier, Window, compile_plan, slice_weights
from tests.conformance.entry import Check, Entry, MismatchError
from tests.conformance.expectations import (
    expected_rounds_to_cover,
    mean_over_shares,
    probability_untouched,
)
from tests.conformance.heterofl_plans import published_layouts
from tests.conformance.small import average, float32, layout_of, square

__all__ = ["HANDLERS"]

_UP = Window()
_DOWN = Window(direction="down")
_RANDOM = Window(kind="random")
_DRAWS = 400  # runs of random draws; their mean is known to a twentieth of the spread
_SIGMAS = 5.0
_PUBLISHED = {"resnet": (64, 128, 256, 512)}  # specification 1.7


def _one_axis(size: int) -> Layout:
    return layout_of([Axis("k", size)], {"w": (Dim("k"),)})


def _plan(layout: Layout, width: float, round_index: int, window: Window) -> Plan:
    return plan_window(layout, PlanRequest(Tier(width), "device", round_index, 0), window).plan


def _units(size: int, kept: int, round_index: int, window: Window) -> list[int]:
    plan = _plan(_one_axis(size), kept / size, round_index, window)
    return [int(unit) for unit in plan.indices["k"]]


def _windows(entry: Entry, check: Check, window: Window) -> None:
    size = entry.inputs["K"]
    for kept in entry.inputs["n"]:
        got = [_units(size, kept, number, window) for number in entry.inputs["rounds"]]
        check.same(f"n{kept}", got, entry.expected[f"n{kept}"])
        letters = entry.expected.get(f"n{kept}_letters", [])
        check.same(
            f"n{kept}_letters",
            ["".join(chr(97 + unit) for unit in row) for row in got][: len(letters)],
            letters,
        )


def r1(entry: Entry, check: Check) -> None:
    """Windows that move up, as in the paper."""
    _windows(entry, check, _UP)


def r2(entry: Entry, check: Check) -> None:
    """Windows that move down, as in the released code."""
    _windows(entry, check, _DOWN)


def r3(entry: Entry, check: Check) -> None:
    """Layers of several sizes in one round."""
    layout = layout_of(
        [Axis(f"k{number}", size) for number, size in enumerate(entry.inputs["K"])],
        {f"w{number}": (Dim(f"k{number}"),) for number in range(len(entry.inputs["K"]))},
    )
    for key, window in (("paper", _UP), ("code", _DOWN)):
        plan = _plan(layout, entry.inputs["beta"], entry.inputs["j"], window)
        check.same(key, [units.tolist() for units in plan.indices.values()], entry.expected[key])


def _numbers(key: str) -> dict[str, int]:
    """The numbers of a key such as ``K5_n2_R3``."""
    return {letter: int(number) for letter, number in re.findall(r"([A-Za-z])(\d+)", key)}


def _rounds_to_cover(size: int, kept: int, window: Window) -> int:
    """Count the rounds until every unit was kept."""
    seen: set[int] = set()
    for number in range(1000 * size):
        seen.update(_units(size, kept, number, window))
        if len(seen) == size:
            return number + 1
    raise PlanError(f"{kept} of {size} units do not cover the axis")


def r4(entry: Entry, check: Check) -> None:
    """How often each unit is kept, and when all have been."""
    for size, kept, rounds in entry.inputs["cases"]:
        counts = np.zeros(size, int)
        for number in range(rounds):
            counts[_units(size, kept, number, _UP)] += 1
        key = f"K{size}_n{kept}_R{rounds}"
        check.same(key, counts, entry.expected["counts"][key])
    for key, expected in entry.expected["rounds_to_cover"].items():
        found = _numbers(key)
        check.same(
            f"rounds_to_cover.{key}", _rounds_to_cover(found["K"], found["n"], _UP), expected
        )


def r5(entry: Entry, check: Check) -> None:
    """Expectations of random draws: exact ones, and the draws themselves within five standard
    errors of them.
    """
    expected = entry.expected
    for size, kept in entry.inputs["cases"]:
        key = f"K{size}_n{kept}"
        mean = expected_rounds_to_cover(size, kept)
        check.same(
            f"expected_rounds_to_cover.{key}", mean, expected["expected_rounds_to_cover"][key]
        )
        rolling = _rounds_to_cover(size, kept, _UP)
        check.same(
            f"rolling_rounds_to_cover.{key}", rolling, expected["rolling_rounds_to_cover"][key]
        )
        check.same(
            f"inclusion_probability.{key}",
            1 - probability_untouched(size, kept, 1),
            expected["inclusion_probability"][key],
        )
        _draws_agree(check, size, kept, mean)
    for key, probability in expected["prob_node_untouched_after_R"].items():
        found = _numbers(key)
        got = probability_untouched(found["K"], found["n"], found["R"])
        check.same(f"prob_node_untouched_after_R.{key}", got, probability)
    check.note(f"draws of {_DRAWS} devices lie within {_SIGMAS:g} standard errors")


def _draws_agree(check: Check, size: int, kept: int, mean: float) -> None:
    layout = _one_axis(size)
    covered = []
    counts = np.zeros(size)
    for number in range(_DRAWS):
        request = PlanRequest(Tier(kept / size), f"device{number}", 0, 0)
        seen: set[int] = set()
        rounds = 0
        while len(seen) < size:
            plan = plan_window(
                layout, PlanRequest(request.tier, request.device, rounds, 0), _RANDOM
            ).plan
            units = plan.indices["k"].tolist()
            if rounds == 0:
                check.same(f"K{size}_n{kept} distinct", len(set(units)), kept)
                counts[units] += 1
            seen.update(units)
            rounds += 1
        covered.append(rounds)
    error = np.std(covered, ddof=1) / np.sqrt(_DRAWS)
    if abs(np.mean(covered) - mean) > _SIGMAS * error + 1e-9:
        raise MismatchError(
            f"mean rounds to cover of drawn plans, K{size}_n{kept}", mean, float(np.mean(covered))
        )
    share = kept / size
    spread = _SIGMAS * np.sqrt(share * (1 - share) / _DRAWS) + 1e-9
    if np.abs(counts / _DRAWS - share).max() > spread:
        raise MismatchError(
            f"share of drawn plans that keep a unit, K{size}_n{kept}",
            share,
            (counts / _DRAWS).tolist(),
        )


def r6(entry: Entry, check: Check) -> None:
    """Two windows that wrap around are averaged where both lie."""
    weights = {"W": float32(entry.inputs["W_global"])}
    layout = square(len(weights["W"]))
    for key, window in (("paper", _UP), ("code", _DOWN)):
        expected = entry.expected[key]
        clients = []
        for client in expected["clients"]:
            plan = _plan(layout, client["s"], entry.inputs["j"], window)
            for side in ("out_idx", "in_idx"):
                check.same(f"{key}.{side}", plan.indices["k"], client[side])
            returned = slice_weights(layout, plan, weights)["W"] + float32(client["delta"])
            clients.append((plan, {"W": returned}, None))
        new, counts = average(layout, weights, clients)
        check.same(f"{key}.W_new", new["W"], expected["W_new"], relative=1e-6)
        check.same(f"{key}.count", counts["W"], expected["count"])


def r7(entry: Entry, check: Check) -> None:
    """Rows of attention heads and columns of the residual stream in rolling rounds, both ways."""
    size = entry.inputs["E"]
    heads = entry.inputs["H"]
    layout = layout_of(
        [Axis("embed", size), Axis("attention", size, groups=heads)],
        {"q": (Dim("attention"), Dim("embed"))},
    )
    windows = {
        "code": ("attention", Window(direction="down", heads="as_released")),
        "head_preserving": ("attention", _UP),
        "emb_cols_code": ("embed", _DOWN),
    }
    for key, (axis, window) in windows.items():
        for label, expected in entry.expected[key].items():
            width, _, round_index = label.removeprefix("s").partition("_j")
            plan = _plan(layout, float(width), int(round_index), window)
            check.same(f"{key}.{label}", plan.indices[axis], expected)


def r8(entry: Entry, check: Check) -> None:
    """Weightings of devices that share an entry."""
    values = entry.inputs["local_values"]
    widths = entry.inputs["local_widths"]
    layout = _one_axis(max(widths))
    plans = [
        compile_plan(layout, _plan(layout, width / max(widths), 0, Window(kind="static")))
        for width in widths
    ]
    schemes: tuple[Weighting, ...] = ("avg", "width", "updates", "updates_width")
    for scheme in schemes:
        state = start(layout, layer_factor(layout, scheme))
        for plan, value, width in zip(plans, values, widths, strict=True):
            fold(state, str(width), plan, {"w": float32([value] * width)})
        new = finish(state, {"w": np.zeros(max(widths), np.float32)})
        check.same(scheme, float(new["w"][0]), entry.expected[scheme], relative=1e-6)
    if any(key.startswith("quirk") for key in entry.expected):
        check.note("the quirk rows are signs of a bug of the released code, which is not copied")


def r9(entry: Entry, check: Check) -> None:
    """Mean width and mean parameters of a distribution of devices."""
    shares = {float(rate): share for rate, share in entry.inputs["proportions"].items()}
    check.same("mean_rate", mean_over_shares(shares), entry.expected["mean_rate"])
    layout = published_layouts(_PUBLISHED, ("resnet_2222",))["resnet_2222"]
    counts = {rate: float(layout.parameter_count(layout.tier(rate))) for rate in shares}
    check.same("mean_params", mean_over_shares(shares, counts), entry.expected["mean_params"])


HANDLERS = MappingProxyType(
    {"R1": r1, "R2": r2, "R3": r3, "R4": r4, "R5": r5, "R6": r6, "R7": r7, "R8": r8, "R9": r9}
)
"""What computes an entry, by the prefix of its id."""
