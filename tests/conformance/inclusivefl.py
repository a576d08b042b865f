"""Worked examples of InclusiveFL: rounds, ranges of layers, FedAdam and absent groups (I1 to
I4).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies import accumulator as merge
from broker_server.strategies import inclusivefl, server_optimizer
from broker_server.strategies.inclusive_state import InclusiveState
from broker_server.strategies.inclusivefl import InclusiveSettings
from broker_server.strategies.ladder import Ladder
from broker_server.strategies.optimizer_rules import OptimizerSettings
from models import Axis, AxisKind, Dim, Layout, compile_plan, make_plan
from tests.conformance.entry import Check, Entry, NotApplicableError
from tests.conformance.small import layout_of

__all__ = ["HANDLERS"]

Tensors = Mapping[str, NDArray[Any]]


def _layered(depth: int) -> Layout:
    """A model of one number for the embeddings, for each layer and for the head."""
    names = ["emb", *(f"l{number}" for number in range(1, depth + 1)), "head"]
    blocks = {"emb": "stem", **{f"l{number}": f"block{number}" for number in range(1, depth + 1)}}
    one = (Dim("one"),)
    return layout_of([Axis("one", 1, AxisKind.FIXED)], dict.fromkeys(names, one), blocks=blocks)


def _tensors(numbers: Mapping[str, float]) -> dict[str, NDArray[np.float32]]:
    return {name: np.array([value], np.float32) for name, value in numbers.items()}


def _numbers(tensors: Tensors) -> dict[str, float]:
    return {name: float(value[0]) for name, value in tensors.items()}


def _fedadam(given: Mapping[str, Any]) -> OptimizerSettings:
    if given.get("bias_correction") or given.get("m0", 0) != 0:
        raise NotApplicableError(
            "the server's FedAdam has no bias correction, and its m is 0 at first (specification "
            "3.5)"
        )
    return OptimizerSettings(
        name="fedadam",
        learning_rate=given["eta"],
        beta1=given["beta1"],
        beta2=given["beta2"],
        tau=given["tau"],
        second_start=float(given.get("v0", 0)),
    )


def _mean_update(layout: Layout, depth: int, updates: Sequence[Mapping[str, float]]) -> Tensors:
    """The unweighted mean of a group's updates, by the server's merge."""
    plan = compile_plan(layout, make_plan(layout, layout.tier(1.0, depth)))
    state = merge.start(layout)
    for update in updates:
        merge.fold(state, f"depth{depth}", plan, _tensors(update))
    merged = merge.finish(
        state, {item.name: np.zeros(item.shape, np.float32) for item in layout.parameters}
    )
    return {name: merged[name] for name in plan.tensors}


def i1(entry: Entry, check: Check) -> None:
    """Whole rounds: means, distillation, optimizer steps, momenta and sharing."""
    depths = entry.inputs["depths"]
    layout = _layered(max(depths.values()))
    own = {group: _tensors(numbers) for group, numbers in entry.inputs["init"].items()}
    deepest = max(depths, key=lambda group: depths[group])
    settings = InclusiveSettings(entry.inputs["beta"], _fedadam(entry.inputs["fedadam"]))
    state = inclusivefl.init(layout, depths, own[deepest], settings, own)
    for number, (updates, expected) in enumerate(
        zip(entry.inputs["client_updates"], entry.expected, strict=True), 1
    ):
        check.same("t", number, expected["t"])
        state, found = _round(layout, state, settings, updates)
        for key, got in found.items():
            wanted = expected[key]
            check.same(
                f"round {number} {key}",
                {group: got[group] for group in wanted},
                wanted,
                relative=1e-6,
            )
    check.note("the momentum is taken after the injection, as in algorithm 1")


def _round(
    layout: Layout, state: InclusiveState, settings: InclusiveSettings, updates: Mapping[str, Any]
) -> tuple[InclusiveState, Mapping[str, Mapping[str, Any]]]:
    """One round: the new state, and by the words of the worked examples what was seen in it, by
    group.
    """
    counts = {group: len(given) for group, given in updates.items()}
    depths = state.ladder.depths
    means = {
        group: _mean_update(layout, depths[group], given)
        for group, given in updates.items()
        if given
    }
    new, seen = inclusivefl.apply(state, means, counts, settings)
    return new, {
        "n": counts,
        "mean_update": {group: _numbers(mean) for group, mean in means.items()},
        "update_after_distillation": {
            group: _numbers(update) for group, update in seen.distilled.items()
        },
        "momentum_used": {
            group: float(momentum[0][0]) for group, momentum in state.momenta.items()
        },
        "momentum_new": {group: float(momentum[0][0]) for group, momentum in new.momenta.items()},
        "after_fedadam": {group: _numbers(model) for group, model in seen.stepped.items()},
        "after_aggregation": {group: _numbers(model) for group, model in new.models.items()},
    }


def i2(entry: Entry, check: Check) -> None:
    """Which layers are shared, distilled and isolated."""
    ladder = Ladder.from_depths(entry.inputs["depths"])
    owners = {
        number: "".join(sorted(ladder.owners(number))) for number in range(1, ladder.deepest + 1)
    }

    def answer(key: str) -> Any:
        if key == "injected_into":
            return {group: ladder.top(group) for group in ladder.groups if ladder.deeper(group)}
        if key == "isolated":
            return {group: ladder.top(group) for group in ladder.groups}
        if key.startswith("momentum_"):
            return list(
                ladder.momentum_layers(key.removeprefix("momentum_").removesuffix("_layers"))
            )
        wanted = "".join(sorted(key.removeprefix("shared_by_").removeprefix("only_")))
        return [number for number, groups in owners.items() if groups == wanted]

    for key, expected in entry.expected.items():
        check.same(key, answer(key), expected)


def i3(entry: Entry, check: Check) -> None:
    """The server's FedAdam, step by step."""
    settings = _fedadam(entry.inputs)
    weights: Tensors = {"w": np.array([entry.inputs["w0"]], np.float64)}
    state = server_optimizer.init(settings, weights)
    steps = []
    for update in entry.inputs["g"]:
        weights, state = server_optimizer.apply(
            settings, state, weights, {"w": np.array([update], np.float64)}
        )
        steps.append(
            [float(state.first["w"][0]), float(state.second["w"][0]), float(weights["w"][0])]
        )
    check.same("m_v_w", steps[: len(entry.expected["m_v_w"])], entry.expected["m_v_w"])


def i4(entry: Entry, check: Check) -> None:
    """How much groups count in the average of a layer when one of them has no device."""
    counts = entry.inputs["n"]
    groups = list(counts)
    ladder = Ladder.from_depths({group: number for number, group in enumerate(groups, 2)})
    for key, expected in entry.expected.items():
        owners = key.removeprefix("layers_shared_by_")
        if owners == key:
            continue
        layer = next(n for n in range(1, ladder.deepest + 1) if "".join(ladder.owners(n)) == owners)
        shares = ladder.shares(layer, counts)
        got = [None if shares is None else shares.get(group) for group in groups]
        check.same(key, got, expected)
    _kept_when_absent(check, ladder)


def _kept_when_absent(check: Check, ladder: Ladder) -> None:
    """Layers none of whose owners has a device keep their values."""
    layout = _layered(ladder.deepest)
    start = {
        item.name: np.array([number + 0.5], np.float32)
        for number, item in enumerate(layout.parameters)
    }
    settings = InclusiveSettings()
    state = inclusivefl.init(layout, ladder.depths, start, settings)
    first = ladder.groups[0]
    update = {name: np.ones(1, np.float32) for name in state.models[first]}
    new, _ = inclusivefl.apply(state, {first: update}, {first: 2}, settings)
    for number in range(ladder.depths[first], ladder.deepest + 1):
        for group in ladder.owners(number):
            (name,) = state.stack.layer(number)
            check.same(
                f"layer {number} of {group} kept", new.models[group][name], start[name].tolist()
            )


HANDLERS = MappingProxyType({"I1": i1, "I2": i2, "I3": i3, "I4": i4})
"""What computes an entry, by the prefix of its id."""
