"""InclusiveFL's tables 2, 4 and 5: depths of a pre-trained encoder on CoLA and SST-2.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No one left behind: Inclusive federated learning over heterogeneous devices", KDD
2022, https://arxiv.org/abs/2202.08036. The protocol is specification 3.8; where the paper is silent (local steps, rates
of devices and server) the values are ours and stand in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from reproduction.experiment import Arm, Comparison, Experiment, Scale, Settings, merged
from reproduction.measures import GLOBAL, MATTHEWS, ROUNDS_TO_BEST, Measure
from reproduction.tables.published import Published, published_tables

__all__ = ["EXPERIMENTS", "SECTION"]

SECTION = 3
"""Of the specification."""

PAPER = "https://arxiv.org/abs/2202.08036"
Task = Literal["cola", "sst2"]

_DEPTHS = (2, 4, 6)
_WIDTHS = (0.59375, 0.8125, 1.0)
"""Hidden sizes 456, 624 and 768 of 768, with as many parameters as 4, 8 and 12 layers have (specification 3.7)."""

_BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "all-large": "all_large",
        "exclusivefl": "exclusive",
        "all-small": "all_small",
        "inclusivefl": "inclusive",
        "without-distillation": "without_distillation",
        "distillation-only": "distillation_only",
    }
)
_ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "all-large": "every device trains the deepest model",
        "exclusivefl": "only strong devices take part",
        "all-small": "every device trains the shallowest model",
        "heterofl": "width-cut deepest model",
        "inclusivefl": "three depths",
        "without-distillation": "three depths, no momentum distillation",
        "distillation-only": "three depths, no sharing of layers",
    }
)
_NOTES = (
    (
        "The encoder is MiniLM with depths 2, 4 and 6 (all-MiniLM-L6-v2, 22.7 M parameters) for RoBERTa-base with 4, 8"
        " and 12."
    ),
    (
        "SST-2 here is its 6,920 whole sentences; GLUE trains on 67,349 phrases. The paper's figures are of the GLUE"
        " development sets."
    ),
    (
        "The paper gives neither local steps nor learning rates: one local epoch with batches of up to 64, SGD"
        " with a rate of 0.05, FedAdam with 0.9, 0.99, tau 1e-3."
    ),
    "Device types are dealt in exact shares; the paper draws a type for each device.",
    "The published figure is the best over the rounds; ours is, too, and the last round stands beside it.",
)


_TASKS: tuple[Task, ...] = ("cola", "sst2")
_VALUES: Mapping[Task, Measure] = MappingProxyType({"cola": MATTHEWS, "sst2": GLOBAL})
"""What each task is judged by."""


def _types(ratio: str, devices: int, *, by_width: bool) -> tuple[dict[str, Any], ...]:
    """Weak, medium and strong devices.

    Args:
        ratio: such as ``1:2:7``.
        devices: how many there are.
        by_width: whether what is limited is the width.
    """
    shares = [int(part) for part in ratio.split(":")]
    counts = [devices * share // sum(shares) for share in shares]
    counts[-1] += devices - sum(counts)
    limits = _WIDTHS if by_width else _DEPTHS
    key = "max_width" if by_width else "max_depth"
    return tuple({"count": count, key: limit} for count, limit in zip(counts, limits, strict=True))


def _settings(method: str, task: Task, ratio: str, scale: Scale) -> Settings:
    """One arm.

    Args:
        method: a baseline, or ``heterofl``.
        task: the data set.
        ratio: of weak to medium to strong devices.
        scale: at which scale.
    """
    length = {"cola": 24, "sst2": 32}[task]
    options: dict[str, Any] = {"tokens": "minilm", "length": 128, "test": "dev"}
    protocol: Settings = {
        "model": {
            "arch": "minilm_encoder",
            "recipe": {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0},
        },
        "data": {"name": task, "options": options},
        "devices": {"count": 1000},
        "round": {"rounds": 1000, "fraction": 0.02},
        "train": {"learning_rate": 0.05, "epochs": 1, "batch_size": 64, "mask_labels": False},
        "server_optimizer": {"name": "fedadam", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    }
    if task == "cola":
        protocol = merged(protocol, {"evaluation": {"matthews": True}})
    devices = 1000
    if scale == "small":
        devices = 100
        protocol = merged(
            protocol,
            {
                "data": {"options": {"length": length}},
                "devices": {"count": devices},
                "round": {"rounds": 48, "fraction": 0.1},
                # With batches of 8, the rates of the whole protocol let the deep models rise and fall again.
                "train": {"batch_size": 8, "learning_rate": 0.02},
                "server_optimizer": {"learning_rate": 0.005},
                "evaluation": {"every": 3},
            },
        )
    elif scale == "smoke":
        devices = 12
        protocol = merged(
            protocol,
            {
                "data": {"options": {"length": 16}, "train_limit": 240, "test_limit": 60},
                "devices": {"count": devices},
                "round": {"rounds": 2, "fraction": 0.5},
                "train": {"batch_size": 16},
            },
        )
    return merged(protocol, _method(method, ratio, devices))


def _method(method: str, ratio: str, devices: int) -> Settings:
    if method == "heterofl":
        return {
            "model": {"widths": _WIDTHS},
            "strategy": {"name": "heterofl", "label_rule": False},
            "devices": {"types": _types(ratio, devices, by_width=True)},
        }
    tables: dict[str, Any] = {
        "model": {"depths": _DEPTHS},
        "strategy": {"name": "inclusivefl", "inclusivefl": {"beta": 0.2, "baseline": _BASELINES[method]}},
    }
    if method == "all-small":
        tables["evaluation"] = {"tier": f"w1.00-d{_DEPTHS[0]}"}
    if method != "all-large":  # where every device is strong
        tables["devices"] = {"types": _types(ratio, devices, by_width=False)}
    return tables


def _arm(name: str, task: Task, ratio: str, published: Published | None, *, rounds: bool = False) -> Arm:
    """An arm whose name begins with its method; it is judged by the rounds to the best value, or by the value alone."""
    method, value = name.partition("/")[0], _VALUES[task]
    measure = ROUNDS_TO_BEST if rounds else value
    return Arm(
        name,
        _ABOUT[method],
        (measure, value) if rounds else (value,),
        partial(_settings, method, task, ratio),
        {} if published is None else {measure.name: published},
    )


_EQUAL = "1:1:1"
_SEEDS: Mapping[Scale, tuple[int, ...]] = MappingProxyType(
    {"smoke": (1,), "small": (1, 2, 3), "paper": (1, 2, 3, 4, 5)}
)


def _table_2() -> Experiment:
    table = published_tables("inclusivefl")["inclusivefl-2"]
    methods = ("all-large", "exclusivefl", "all-small", "heterofl", "without-distillation", "inclusivefl")
    arms = tuple(
        _arm(f"{method}/{task}", task, _EQUAL, table.number(method, task) if method in table.rows else None)
        for task in _TASKS
        for method in methods
    )
    return Experiment(
        table="inclusivefl-2",
        title="InclusiveFL, table 2: CoLA and SST-2, the deepest model",
        paper=PAPER,
        arms=arms,
        seeds=_SEEDS,
        selected=MappingProxyType(
            {
                "smoke": ("all-small/sst2", "inclusivefl/sst2"),
                "small": tuple(f"{method}/sst2" for method in ("exclusivefl", "all-small", "inclusivefl")),
            }
        ),
        comparisons=tuple(
            Comparison(f"inclusivefl/{task}", f"{other}/{task}", _VALUES[task].name, at_least=bound)
            for task in _TASKS
            for other, bound in (
                ("all-small", 0.0),
                ("exclusivefl", 0.0),
                ("without-distillation", None),
                ("all-large", None),
            )
        ),
        notes=_NOTES,
    )


def _table_4() -> Experiment:
    table = published_tables("inclusivefl")["inclusivefl-4"]
    methods = ("without-distillation", "inclusivefl")
    arms = tuple(
        _arm(f"{method}/{task}", task, _EQUAL, table.number(method, task), rounds=True)
        for task in _TASKS
        for method in methods
    )
    return Experiment(
        table="inclusivefl-4",
        title="InclusiveFL, table 4: rounds to the best result, with and without momentum distillation",
        paper=PAPER,
        arms=arms,
        seeds=_SEEDS,
        selected=MappingProxyType(
            {"smoke": ("inclusivefl/sst2",), "small": tuple(f"{method}/sst2" for method in methods)}
        ),
        comparisons=tuple(
            Comparison(f"inclusivefl/{task}", f"without-distillation/{task}", ROUNDS_TO_BEST.name, "over")
            for task in _TASKS
        ),
        notes=_NOTES,
    )


def _table_5() -> Experiment:
    table = published_tables("inclusivefl")["inclusivefl-5"]
    arms = tuple(
        _arm(f"{method}/{ratio}", "cola", ratio, table.number(method, ratio))
        for ratio in table.columns
        for method in table.rows
    )
    return Experiment(
        table="inclusivefl-5",
        title="InclusiveFL, table 5: CoLA for three ratios of weak to medium to strong devices",
        paper=PAPER,
        arms=arms,
        seeds=_SEEDS,
        selected=MappingProxyType(
            {
                "smoke": ("inclusivefl/1:2:7",),
                "small": tuple(
                    f"{method}/{ratio}" for ratio in ("1:2:7", "7:2:1") for method in ("exclusivefl", "inclusivefl")
                ),
            }
        ),
        comparisons=tuple(
            Comparison(f"inclusivefl/{ratio}", f"{other}/{ratio}", MATTHEWS.name)
            for ratio in table.columns
            for other in ("exclusivefl", "all-small", "without-distillation")
        ),
        notes=(*_NOTES, "The published figure of 7:2:1 is without the sharing of layers: the arm distillation-only."),
    )


EXPERIMENTS = (_table_2(), _table_4(), _table_5())
