"""FML's table 1 and its studies of different models and different tasks.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: "Federated mutual learning", 2020, https://arxiv.org/abs/2006.16765.
The protocol is specification 5.6. Table 1 prints the accuracy of the global model; on a device's own data FML's
personal models compete with FedAvg's global one, and both figures are read from the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from reproduction.experiment import Arm, Comparison, Experiment, Scale, Settings, merged
from reproduction.measures import GLOBAL, OWN
from reproduction.tables.published import published_tables
from simulation.data.cifar_tasks import CIFAR_TASKS

__all__ = ["EXPERIMENTS", "SECTION"]

SECTION = 5
"""Of the specification."""

PAPER = "https://arxiv.org/abs/2006.16765"
DEVICES = 5

_SPLITS = ("iid", "non-iid-1", "non-iid-2", "non-iid-3")
_CLASS_SHARES: Mapping[str, float] = MappingProxyType({"non-iid-1": 0.6, "non-iid-2": 0.4, "non-iid-3": 0.2})
"""Classes that a device may hold, as a share of all (specification 5.6)."""

_CLASSES: Mapping[str, int] = MappingProxyType({"mnist": 10, "cifar10": 10, "cifar100": 100})
_METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fedavg": {"name": "fedavg"},
        "fedprox": {"name": "fedprox", "fedprox": {"mu": 0.01}},
        "fml": {"name": "fml", "fml": {"alpha": 0.5, "beta": 0.5}},
        # With alpha = 1 a personal model ignores its meme: it learns alone.
        "alone": {"name": "fml", "fml": {"alpha": 1.0, "beta": 0.5}},
    }
)
_ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "fedavg": "one global model, weighted by samples",
        "fedprox": "FedAvg with a proximal term",
        "fml": "personal models and memes teach each other",
        "alone": "personal models that ignore their memes",
    }
)
_NOTES = (
    (
        "Rounds, local epochs, batch, momentum and learning rate are those of the released code, since the paper"
        " lost its own; mu of FedProx is 0.01, which neither names."
    ),
    (
        "A device's own data is its part of the test set, with the same classes as its training data. The figure"
        " of FedAvg and FedProx is that of the global model, the figure of FML that of the personal models;"
        " nothing masks absent classes."
    ),
    "The best round is chosen on the test set; the last round stands beside it.",
)


def _settings(method: str, data: str, split: str, archs: tuple[str, ...], scale: Scale) -> Settings:
    """One arm.

    Args:
        method: how devices learn together.
        data: the data set.
        split: of the data.
        archs: that of the global model, then those of the personal models, one for each device in turn.
        scale: at which scale.
    """
    rounds = 50
    arch, *personal = archs
    per_device = round(_CLASS_SHARES[split] * _CLASSES[data]) if split in _CLASS_SHARES else None
    protocol = merged(
        {
            "model": {
                "arch": arch,
                "recipe": {
                    "momentum": 0.9,
                    "weight_decay": 5e-4,
                    "clip_norm": 0.0,
                    "proximal": method == "fedprox",
                },
            },
            "data": {"name": data},
            "partition": {"kind": "iid"} if per_device is None else {"kind": "shards", "per_device": per_device},
            "devices": {"count": DEVICES},
            "round": {"rounds": rounds},
            "train": {
                "learning_rate": 0.01,
                "epochs": 5,
                "batch_size": 128,
                "milestones": _decays(rounds),
                "factor": 0.1,
                "mask_labels": False,
            },
            "strategy": _METHODS[method],
            "evaluation": {"local": True},
        },
        {"own_models": {"models": tuple({"arch": name} for name in personal)}} if method in ("fml", "alone") else {},
    )
    if scale == "small":
        return merged(protocol, _small(data))
    if scale == "smoke":
        return merged(protocol, _smoke(archs))
    return protocol


def _decays(rounds: int) -> tuple[int, ...]:
    """Closed rounds after which the rate falls: each third of the run (specification 5.6)."""
    return tuple(range(rounds // 3, rounds, rounds // 3))


def _small(data: str) -> Settings:
    samples = 10_000 if data == "mnist" else 5_000
    return {
        "data": {"train_limit": samples, "test_limit": 5_000},
        "round": {"rounds": 15},
        "train": {"milestones": _decays(15)},
        "evaluation": {"every": 3},
    }


def _smoke(archs: Sequence[str]) -> Settings:
    # LeNet-5 needs sides of 12 pixels, and digits has 8.
    images = {"name": "mnist", "train_limit": 500, "test_limit": 200} if "lenet5" in archs else {"name": "digits"}
    return {
        "data": images,
        "partition": {"per_device": 2},
        "round": {"rounds": 2},
        "train": {"epochs": 1, "milestones": ()},
    }


def _table_1() -> Experiment:
    table = published_tables("fml")["fml-1"]
    arms = []
    for column in table.columns:
        data, _, arch = column.partition("-")
        for split in _SPLITS:
            for method in ("fedavg", "fedprox", "fml"):
                figure = table.number(f"{method}/{split}", column)
                arms.append(
                    Arm(
                        f"{method}/{column}/{split}",
                        f"{_ABOUT[method]}; {data}, {arch}, {split}",
                        (GLOBAL, OWN),
                        partial(_settings, method, data, split, (arch, arch)),
                        {} if figure is None else {GLOBAL.name: figure},
                    )
                )
    small = tuple(
        f"{method}/{column}/{split}"
        for column in ("mnist-mlp", "mnist-lenet5")
        for split in ("iid", "non-iid-3")
        for method in ("fedavg", "fml")
    )
    return Experiment(
        table="fml-1",
        title="FML, table 1: global models of five devices",
        paper=PAPER,
        arms=tuple(arms),
        seeds=MappingProxyType({"smoke": (1,), "small": (1, 2, 3), "paper": (1, 2, 3)}),
        selected=MappingProxyType({"smoke": ("fedavg/mnist-mlp/non-iid-3", "fml/mnist-mlp/non-iid-3"), "small": small}),
        comparisons=tuple(
            Comparison(
                f"fml/{column}/{split}",
                f"fedavg/{column}/{split}",
                measure.name,
                at_least=0.0 if measure is OWN and split == "non-iid-3" else None,
            )
            for column in table.columns
            for split in _SPLITS
            for measure in (GLOBAL, OWN)
        ),
        notes=_NOTES,
    )


def _models() -> Experiment:
    personal = ("mlp", "lenet5", "cnn1", "cnn2", "cnn2")
    arms = tuple(
        Arm(
            method,
            f"{_ABOUT[method]}; global LeNet-5" + ("" if method == "fedavg" else f", personal {', '.join(personal)}"),
            (GLOBAL, OWN),
            partial(_settings, method, "cifar10", "iid", ("lenet5", *personal)),
        )
        for method in ("fedavg", "alone", "fml")
    )
    names = tuple(arm.name for arm in arms)
    return Experiment(
        table="fml-models",
        title="FML, model heterogeneity: personal models of five shapes on CIFAR-10",
        paper=PAPER,
        arms=arms,
        seeds=MappingProxyType({"smoke": (1,), "small": (1,), "paper": (1, 2, 3)}),
        selected=MappingProxyType({"smoke": ("fml",), "small": names}),
        comparisons=(
            Comparison("fml", "alone", OWN.name, at_least=0.0),
            Comparison("fml", "fedavg", OWN.name),
            Comparison("fml", "fedavg", GLOBAL.name),
        ),
        notes=(*_NOTES, "The paper shows this study in a figure, without numbers in the text."),
    )


# Cars and ships apart from animals: airplane, automobile, ship and truck have the labels 0, 1, 8 and 9.
_ANIMALS = tuple(int(label not in (0, 1, 8, 9)) for label in range(10))
_PARITY = tuple(digit % 2 for digit in range(10))
_SHARED = ("trunk",)


def _task_settings(method: str, scale: Scale) -> Settings:
    """Two tasks; the convolutions of CNN2 are the global model, and each device has an adaptor of its own."""
    base = _settings(method, "cifar10", "iid", ("cnn2", "lenet5", "cnn1"), scale)
    tasks: tuple[Mapping[str, Any], ...] = (
        {"arch": "lenet5", "labels": tuple(range(10))},
        {"arch": "cnn1", "labels": _ANIMALS},
    )
    other: dict[str, Any] = {}
    if scale == "paper":
        tasks = ({"arch": "lenet5", "labels": CIFAR_TASKS[0]}, {"arch": "cnn1", "labels": CIFAR_TASKS[1]})
        other = {"data": {"name": "cifar_tasks"}, "partition": {"kind": "subject"}}
    elif scale == "smoke":
        tasks = ({"arch": "mlp", "labels": tuple(range(10))}, {"arch": "cnn1", "labels": _PARITY})
        other = {"data": {"name": "digits"}, "model": {"settings": {"channels": (8, 16, 16)}}}
    changed = merged(base, other, {"strategy": {"fml": {"shared": _SHARED}}, "own_models": {"models": tasks}})
    if scale == "smoke":  # of the subset of MNIST that stands for CIFAR-10 where LeNet-5 is trained
        changed["data"] = {"name": "digits"}
    return changed


def _tasks() -> Experiment:
    arms = tuple(
        Arm(
            method,
            f"{_ABOUT[method]}; two tasks, the convolutions of CNN2 shared",
            (OWN,),
            partial(_task_settings, method),
        )
        for method in ("alone", "fml")
    )
    return Experiment(
        table="fml-tasks",
        title="FML, task heterogeneity: one fleet, two tasks",
        paper=PAPER,
        arms=arms,
        seeds=MappingProxyType({"smoke": (1,), "small": (1, 2), "paper": (1, 2, 3)}),
        selected=MappingProxyType({"smoke": ("fml",)}),
        comparisons=(Comparison("fml", "alone", OWN.name, at_least=0.0),),
        notes=(
            *_NOTES,
            (
                "Three devices have the first task and two the second. The paper shows this study in a figure, without"
                " numbers in the text."
            ),
        ),
    )


EXPERIMENTS = (_table_1(), _models(), _tasks())
