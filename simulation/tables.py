"""The tables of ``sim.toml`` for parts that a fleet has outside its configuration.

They describe the model to export, the data and its partition, the devices, and the engine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator
from typing_extensions import Self

from fleet_protocol.data import Augment, DataConfig
from fleet_protocol.data.augment import relocated
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.recipe import RecipeTable
from models.tier import HEAD_SHARE

Width = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Label = Annotated[int, Field(ge=-1)]
"""The device's label for a label of the data set; -1 for none."""


class ModelTable(FrozenModel):
    """``[model]``: the model to train.

    Attributes:
        arch: name of an architecture of the zoo, or of one in the file ``models``.
        settings: settings of the architecture; by default, input shape, classes and vocabulary come
            from the data.
        models: Python file with your own architectures.
        weights: safetensors file with the initial global weights; by default, they are drawn with
            the seed.
        widths: widths of the tiers, relative to the global model.
        depths: depths of the tiers in blocks; None for only the full depth.
        trained: shares of the blocks that tiers train, counted from the top; ``head`` trains no
            block.
        windows: whether to also export each trained share at all its other positions, for
            ``strategy.window``.
        recipe: recipe of a training step.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    models: Path | None = None
    weights: Path | None = None
    widths: tuple[Width, ...] = Field(default=(1.0,), min_length=1)
    depths: tuple[Count, ...] | None = Field(default=None, min_length=1)
    trained: tuple[Width | Literal["head"], ...] = Field(default=(1.0,), min_length=1)
    windows: bool = False
    recipe: RecipeTable = RecipeTable()

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the trained shares as numbers."""
        shares: list[float] = []
        for share in self.trained:
            shares.append(HEAD_SHARE if share == "head" else share)
        return tuple(shares)


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
        validation: number of training samples, spread evenly, that no device trains on and that are
            used for evaluation, so that you can choose settings without the test set. None
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


class OwnModel(FrozenModel):
    """One entry of ``[[own_models.models]]``.

    Attributes:
        arch: name of an architecture of the zoo, or of one in the file ``model.models``.
        settings: settings of the architecture; values that come from the data may be omitted.
        labels: labels of the device's own task: for each label of the data set, the device's label
            (counted from 0), or -1 if the device's samples do not have the label. The personal
            model and the copy of the global model then have different classes, so the parts that
            the strategy shares must exclude everything that depends on the classes.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    labels: tuple[Label, ...] | None = None

    @property
    def classes(self) -> int | None:
        """Return the number of labels of its own task; None without one."""
        if self.labels is None:
            return None
        return max(self.labels) + 1

    @model_validator(mode="after")
    def _has_labels(self) -> "OwnModel":
        if self.labels is None:
            return self
        largest = max(self.labels, default=-1)
        # -1 stands for labels outside the task.
        own_labels = set(self.labels) - {-1}
        # A gap would make a class that no sample has.
        if own_labels != set(range(largest + 1)):
            raise ValueError("labels must use every label from 0 to its largest")
        if largest < 1:
            raise ValueError("labels must define a task of at least two labels")
        return self


class OwnModelsTable(FrozenModel):
    """``[own_models]``: personal models that stay on devices, trained with the sent model.

    See specification 5.

    Attributes:
        models: the personal models, which are assigned to the devices in turn.
    """

    models: tuple[OwnModel, ...] = Field(min_length=1)


class DeviceGroup(FrozenModel):
    """One entry of ``[[devices.types]]``: devices of one kind.

    Attributes:
        type: name of the device type in the clock's table.
        link: name of a link in the clock's table, or speed of the link in Mbit/s.
        count: number of devices of this kind; None divides the remaining devices evenly among the
            entries without a count.
        max_width: width of the largest sub-model that these devices can train.
        max_depth: depth of the largest sub-model that these devices can train; None for any depth.
        dropout: probability that a device of this kind goes offline during a round; it then stays
            offline until the round ends.
    """

    type: str = "MacBookPro2018"
    link: str | float = "wifi"
    count: int | None = Field(default=None, ge=0)
    max_width: Width = 1.0
    max_depth: int | None = Field(default=None, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class DevicesTable(FrozenModel):
    """``[devices]``.

    Attributes:
        count: number of virtual devices.
        types: kinds of devices, in the order of the devices' ids; by default, one kind that can
            train the whole model.
    """

    count: int = Field(ge=1)
    types: tuple[DeviceGroup, ...] = Field(default=(DeviceGroup(),), min_length=1)

    @model_validator(mode="after")
    def _counts_add_up(self) -> "DevicesTable":
        counted = self._counted
        is_wrong = counted != self.count
        if self._open_groups:
            # Groups without a count share the remaining devices, possibly none.
            is_wrong = counted > self.count
        if is_wrong:
            raise ValueError(
                f"the counts of the types add up to {counted} devices, but devices.count is"
                f" {self.count}"
            )
        return self

    @property
    def _counted(self) -> int:
        """Return the number of devices in groups with a count."""
        return sum(group.count or 0 for group in self.types)

    @property
    def _open_groups(self) -> int:
        """Return the number of groups without a count."""
        return sum(group.count is None for group in self.types)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the devices; their text order equals their numeric order."""
        # Padded with zeros, so that "device-10" does not come before "device-2".
        digits = len(str(self.count - 1))
        ids = []
        for index in range(self.count):
            ids.append(f"device-{index:0{digits}d}")
        return tuple(ids)

    @property
    def kinds(self) -> tuple[DeviceGroup, ...]:
        """Return the kind of every device, in the order of their ids."""
        open_groups = self._open_groups
        remaining = self.count - self._counted
        kinds: list[DeviceGroup] = []
        for group in self.types:
            count = group.count
            if count is None:
                # Rounded up, so that the first groups without a count get one more device if
                # necessary.
                count = -(-remaining // open_groups)
                remaining -= count
                open_groups -= 1
            kinds += [group] * count
        return tuple(kinds)


class EngineTable(FrozenModel):
    """``[engine]``: the compute engine; results do not depend on the number of workers.

    Attributes:
        kind: where virtual devices train: ``local`` (processes of this machine) or ``ray``.
        workers: number of processes or actors; 0 for one per core.
        address: address of a running Ray cluster; with None, a cluster starts on this machine.
        backend: backend for training steps: ``onnx`` (the graphs that devices run) or ``torch``.
        device: device of the torch backend, ``cpu`` or ``cuda``.
        group: number of virtual devices of one tier that the torch backend trains together.
    """

    kind: Literal["local", "ray"] = "local"
    workers: int = Field(default=0, ge=0)
    address: str | None = None
    backend: Literal["onnx", "torch"] = "onnx"
    device: Literal["cpu", "cuda"] = "cpu"
    group: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _go_together(self) -> "EngineTable":
        is_default = self.device == "cpu" and self.group == 1
        if self.backend == "onnx" and not is_default:
            raise ValueError('device and group require backend = "torch"')
        if self.kind == "local" and self.address is not None:
            raise ValueError('address requires kind = "ray"')
        return self
