"""The tables of ``sim.toml`` for the data of a simulation, and for its partition."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator
from typing_extensions import Self

from fleet_protocol.data import Augment, DataConfig
from fleet_protocol.data.augment import relocated
from fleet_protocol.frozen import FrozenModel


class DataTable(FrozenModel):
    """``[data]``: a data set by name, or your own files.

    Attributes:
        name: name of a data set in `simulation.data.datasets`; empty for your own files.
        train: your training samples, with the keys of a board's ``[data]``. A path with ``*`` takes
            all files (for images, all folders) that match; with ``[partition] kind = "subject"``
            each device gets one of them.
        test: samples of the server's test set, with the keys of a board's ``[data]``.
        root: folder of the data sets that do not come with Shoal; by default, the folder in the
            environment variable SHOAL_DATA.
        options: options of the loader, such as the window of ``watch``.
        train_limit: maximum number of training samples, spread evenly over the data set; None for
            all.
        test_limit: maximum number of test samples, spread evenly over the data set; None for all.
        validation: number of training samples, spread evenly, that are withheld from all devices
            and used for evaluation, so that you can choose settings without the test set. None
            evaluates on the test samples.
        augment: random changes to the samples of training steps; for your own files, set this key
            in ``[data.train]``.
    """

    name: str = ""
    train: DataConfig | None = None
    test: DataConfig | None = None
    root: Path | None = None
    options: Mapping[str, Any] = Field(default_factory=dict)
    train_limit: int | None = Field(default=None, ge=1)
    test_limit: int | None = Field(default=None, ge=1)
    validation: int | None = Field(default=None, ge=1)
    augment: Augment = ()

    @model_validator(mode="after")
    def _one_source(self) -> "DataTable":
        has_name = bool(self.name)
        has_train = self.train is not None
        has_test = self.test is not None
        # Exactly one of the two sources, and both of its parts.
        if has_name == has_train or has_train != has_test:
            raise ValueError(
                "name a data set, or describe your own files in [data.train] and [data.test]"
            )
        if has_train and (self.augment or self.options or self.root):
            raise ValueError(
                "root, options and augment apply only to a named data set; use the keys of"
                " [data.train] instead"
            )
        return self

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the augmentation of the training samples, from either place."""
        return self.augment if self.train is None else self.train.augment

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Apply `move` to the files of the table, including those of functions."""
        augment = []
        for name in self.augment:
            augment.append(relocated(move, name))
        table = super().relocated(move)
        return table.model_copy(update={"augment": tuple(augment)})


_KIND_OF_KEY: Mapping[str, str] = MappingProxyType(
    {"alpha": "dirichlet", "per_device": "shards", "as_released": "shards"}
)
"""Keys of ``[partition]``, with the kind that uses them."""


class PartitionTable(FrozenModel):
    """``[partition]``: assignment of samples to devices.

    Attributes:
        kind: how samples are divided among the devices: ``iid``, ``dirichlet``, ``shards`` (a
            number of labels per device, specification 1.8) or ``subject``.
        alpha: concentration parameter of the Dirichlet split.
        per_device: number of shards per device.
        as_released: whether shards follow the released code, which assigns a label to a device at
            most once.
        seed: seed for the split; None for the seed of the run.
    """

    kind: Literal["iid", "dirichlet", "shards", "subject"] = "iid"
    alpha: float = Field(default=1.0, gt=0)
    per_device: int = Field(default=2, ge=1)
    as_released: bool = False
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> "PartitionTable":
        where = f'on kind = "{self.kind}"'
        for key, kind in _KIND_OF_KEY.items():
            has_effect = self.kind == kind
            self.refuse_idle(info, key, has_effect, where=where, instead=f'kind = "{kind}"')
        return self
