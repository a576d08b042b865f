"""Worked examples of DepthFL: the loss of several exits and its gradients (D1), FedDyn (D2)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from broker_server.strategies.depthfl import DepthFlSettings
from broker_server.strategies.feddyn import FedDynSettings, correction_of
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import Contribution, GlobalModel, StrategySettings
from device_runtime.training.routines.dynamic import next_memory
from fleet_protocol.messages import TaskMetrics
from models import Axis, Dim, Layout, Tier, compile_plan, make_plan
from tests.conformance.entry import Check, Entry
from tests.conformance.small import float32, layout_of
from trainer_export.loss import Answer
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.losses.exits import CROSS_ENTROPY

__all__ = ["HANDLERS"]


def d1(entry: Entry, check: Check) -> None:
    """Cross entropies, loss and gradients of all exits."""
    given = entry.inputs
    output = [torch.tensor(logits, dtype=torch.float64) for logits in given["logits"]]
    y = torch.tensor(given["labels"])
    numbers = {"distillation": given["distillation"], "inner": given["inner"]}
    mask = torch.ones(output[0].shape[-1], dtype=torch.float64)
    answer = Answer(y, mask, knobs=numbers)
    entropies = [CROSS_ENTROPY.value(logits, answer).item() for logits in output]
    loss, slopes = AllExitsTeach(temperature=given["temperature"]).value_and_slope(output, answer)
    check.same("ce", entropies, entry.expected["ce"])
    check.same("loss", loss.item(), entry.expected["loss"])
    check.same("grad", [slope.tolist() for slope in slopes], entry.expected["grad"])


def d2(entry: Entry, check: Check) -> None:
    """The model, the correction of the server and the memories of the devices, round by round."""
    given = entry.inputs
    layout = _two_blocks(given["start"])
    tiers = (Tier(1.0, 2), Tier(1.0, 1))
    feddyn = FedDynSettings(alpha=given["alpha"], fleet_devices=given["fleet_devices"])
    settings = StrategySettings("depthfl", "static", None, None, DepthFlSettings(feddyn=feddyn))
    strategy = build_strategy(settings, layout, tiers)
    model = GlobalModel({name: float32(value) for name, value in given["start"].items()}, {})
    memories: dict[str, Any] = {}
    for number, (trained, expected) in enumerate(
        zip(given["rounds"], entry.expected["rounds"], strict=True), 1
    ):
        sums = strategy.merge.start()
        anchors = {}
        for device, values in sorted(trained.items()):
            update = {name: float32(value) for name, value in values.items()}
            sent = {name: model.weights[name] for name in update}
            memory = memories.get(device)
            moved = sent if memory is None else {name: sent[name] + memory[name] for name in sent}
            anchors[device] = _lists(moved)
            memories[device] = next_memory(memory, sent, update)
            strategy.merge.fold(sums, _contribution(layout, device, update))
        model = strategy.merge.finish(sums, model)
        check.same(f"anchors of round {number}", anchors, expected["anchors"])
        check.same(f"model of round {number}", _lists(model.weights), expected["model"])
        corrections = {name: correction_of(model.state, name) for name in model.weights}
        check.same(f"correction of round {number}", _lists(corrections), expected["correction"])
    check.same(
        "memories",
        {name: _lists(own) for name, own in memories.items()},
        entry.expected["memories"],
    )


def _two_blocks(start: Mapping[str, Any]) -> Layout:
    """A layout of two blocks, each a vector."""
    shallow, deep = start
    axes = [Axis(name, len(values)) for name, values in start.items()]
    return layout_of(
        axes,
        {name: (Dim(name),) for name in start},
        blocks={shallow: "block1", deep: "block2"},
    )


def _contribution(layout: Layout, device: str, update: Mapping[str, Any]) -> Contribution:
    tier = Tier(1.0, len(update))
    plan = compile_plan(layout, make_plan(layout, tier))
    metrics = TaskMetrics(
        examples=1,
        batches=1,
        labels=(),
        fetch_seconds=0.0,
        train_seconds=0.0,
        resident_bytes=0,
    )
    return Contribution(device, tier, tier.id, plan, update, metrics)


def _lists(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in tensors.items()}


HANDLERS = MappingProxyType({"D1": d1, "D2": d2})
"""What computes an entry, by the prefix of its id."""
