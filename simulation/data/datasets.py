"""Data sets by name: digits ships with scikit-learn.

The others are read from the folder that SHOAL_DATA names.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleet_protocol.errors import ConfigError
from simulation.data.dataset import Dataset
from simulation.data.images import cifar10, cifar100, cifar_tasks, digits, mnist
from simulation.data.sentences import cola, sst2
from simulation.data.watch import watch
from simulation.data.wikitext import wikitext2

DATASETS: Mapping[str, Callable[..., Dataset]] = MappingProxyType(
    {
        "digits": digits,
        "mnist": mnist,
        "cifar10": cifar10,
        "cifar100": cifar100,
        "cifar_tasks": cifar_tasks,
        "watch": watch,
        "wikitext2": wikitext2,
        "sst2": sst2,
        "cola": cola,
    }
)
"""The loaders by the names of the sets."""


def load_dataset(name: str, root: Path | None = None, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        name: one of :data:`DATASETS`.
        root: folder of the data sets that are not included; by default SHOAL_DATA.
        options: keyword options of the loader, such as the window of ``watch``.

    Raises:
        ConfigError: there is no set with this name, or it has no such option.
        DataError: its files are missing or damaged.
    """
    if name not in DATASETS:
        raise ConfigError(f"unknown data set {name!r}; choose from {', '.join(DATASETS)}")
    loader = DATASETS[name]
    # The first parameter of a loader is the folder.
    valid = list(inspect.signature(loader).parameters)[1:]
    for option in options:
        if option not in valid:
            raise ConfigError(
                f"data set {name} has no option {option!r}; its options: "
                f"{', '.join(valid) or 'none'}"
            )
    if root is None and os.environ.get("SHOAL_DATA"):
        root = Path(os.environ["SHOAL_DATA"])
    return loader(root, **options)
