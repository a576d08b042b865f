"""The tables of ``sim.toml`` for what a fleet has outside of its configuration.

They are the model to export, the data and its partition, the devices, and the engine.
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

Width = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Label = Annotated[int, Field(ge=-1)]
"""What a label of the data set is to a device's own task; -1 for none of its own."""


class ModelTable(FrozenModel):
    """``[model]``: what is trained.

    Attributes:
        arch: name of an architecture of the zoo, or of ``models``.
        settings: its settings; input shape, classes and vocabulary follow from the data unless they
            are given.
        models: Python file with architectures of your own.
        weights: safetensors file with global weights to start from; by default drawn with the seed.
        widths: of the tiers, relative to the global model.
        depths: of the tiers in blocks; None for the full depth alone.
        recipe: of a training step.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    models: Path | None = None
    weights: Path | None = None
    widths: tuple[Width, ...] = Field(default=(1.0,), min_length=1)
    depths: tuple[Count, ...] | None = Field(default=None, min_length=1)
    recipe: RecipeTable = RecipeTable()


class DataTable(FrozenModel):
    """``[data]``: a data set by name, or your own.

    Attributes:
        name: one of `simulation.data.datasets`; empty for your own.
        train: your training samples, by the keys of a board's ``[data]``. A path with ``*`` takes
            every file (of images every folder) that it matches, each of which one device holds with
            ``[partition] kind = "subject"``.
        test: the server's test set, likewise.
        root: folder of the sets that are not shipped; by default what SHOAL_DATA names.
        options: of the loader, such as the window of ``watch``.
        train_limit: training samples to use at most, evenly spread; None for all.
        test_limit: the same for the test samples.
        augment: random changes to the training samples of every step; of your own samples said in
            ``train``.
    """

    name: str = ""
    train: DataConfig | None = None
    test: DataConfig | None = None
    root: Path | None = None
    options: Mapping[str, Any] = Field(default_factory=dict)
    train_limit: int | None = Field(default=None, ge=1)
    test_limit: int | None = Field(default=None, ge=1)
    augment: Augment = ()

    @model_validator(mode="after")
    def _one_source(self) -> "DataTable":
        has_name = bool(self.name)
        has_train = self.train is not None
        has_test = self.test is not None
        if has_name == has_train or has_train != has_test:
            raise ValueError(
                "name one of the data sets, or give [data.train] and [data.test] of your own"
            )
        if has_train and (self.augment or self.options or self.root):
            raise ValueError(
                "root, options and augment are for a set by name; say what you need in [data.train]"
            )
        return self

    @property
    def changes(self) -> tuple[str, ...]:
        """Random changes to the training samples, wherever they are said."""
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
"""Keys of ``[partition]``, with the only kind that reads them."""


class PartitionTable(FrozenModel):
    """``[partition]``: who gets which samples.

    Attributes:
        kind: ``iid``, ``dirichlet``, ``shards`` (a number of labels per device, specification 1.8)
            or ``subject``.
        alpha: concentration of the Dirichlet split.
        per_device: shards of each device.
        as_released: with shards, the quirk of the released code.
        seed: of the split; None for the seed of the run.
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
        arch: name of an architecture of the zoo, or of ``model.models``.
        settings: its settings; what follows from the data need not be given.
        labels: a task of the device's own: what each label of the data set is to it, from 0; -1 for
            labels that none of its samples has. Its own model and its copy of the global model then
            have classes of their own, so the parts that the strategy shares must leave out whatever
            depends on them.
    """

    arch: str
    settings: Mapping[str, Any] = Field(default_factory=dict)
    labels: tuple[Label, ...] | None = None

    @property
    def classes(self) -> int | None:
        """Labels of the task of its own, None without one."""
        if self.labels is None:
            return None
        return max(self.labels) + 1

    @model_validator(mode="after")
    def _has_labels(self) -> "OwnModel":
        if self.labels is None:
            return self
        largest = max(self.labels, default=-1)
        own_labels = set(self.labels) - {-1}
        if own_labels != set(range(largest + 1)):
            raise ValueError("labels must use every label from 0 to its largest")
        if largest < 1:
            raise ValueError("labels must leave a task of at least two labels")
        return self


class OwnModelsTable(FrozenModel):
    """``[own_models]``: models that stay on devices, trained beside the model that they are sent.

    See specification 5.

    Attributes:
        models: dealt to the devices in turn.
    """

    models: tuple[OwnModel, ...] = Field(min_length=1)


class DeviceGroup(FrozenModel):
    """One entry of ``[[devices.types]]``: devices that are alike.

    Attributes:
        type: name in the clock's table.
        link: name of a link in the clock's table, or its speed in Mbit/s.
        count: devices of this kind; None shares the rest evenly among the entries without one.
        max_width: widest sub-model they can train.
        max_depth: deepest, None for any.
        dropout: chance that such a device leaves in the middle of a round and is away until its
            end.
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
        count: virtual devices.
        types: their kinds in the order of the devices' ids; one kind that can train everything by
            default.
    """

    count: int = Field(ge=1)
    types: tuple[DeviceGroup, ...] = Field(default=(DeviceGroup(),), min_length=1)

    @model_validator(mode="after")
    def _counts_add_up(self) -> "DevicesTable":
        counted = self._counted
        is_wrong = counted != self.count
        if self._open_groups:
            # Groups without a count share what the others leave, which may be nothing.
            is_wrong = counted > self.count
        if is_wrong:
            raise ValueError(f"the types count {counted} devices, devices.count is {self.count}")
        return self

    @property
    def _counted(self) -> int:
        """Devices of the groups that have a count."""
        return sum(group.count or 0 for group in self.types)

    @property
    def _open_groups(self) -> int:
        """How many groups have no count."""
        return sum(group.count is None for group in self.types)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the devices; their order as text is their order as numbers."""
        digits = len(str(self.count - 1))
        ids = []
        for index in range(self.count):
            ids.append(f"device-{index:0{digits}d}")
        return tuple(ids)

    @property
    def kinds(self) -> tuple[DeviceGroup, ...]:
        """The kind of every device, in the order of their ids."""
        open_groups = self._open_groups
        remaining = self.count - self._counted
        kinds: list[DeviceGroup] = []
        for group in self.types:
            count = group.count
            if count is None:
                # Rounded up, so that the first open groups have one more where it does not divide.
                count = -(-remaining // open_groups)
                remaining -= count
                open_groups -= 1
            kinds += [group] * count
        return tuple(kinds)


class EngineTable(FrozenModel):
    """``[engine]``: what computes; the results do not depend on the number of workers.

    Attributes:
        kind: ``local`` (processes of this machine) or ``ray``.
        workers: processes or actors; 0 for one per core.
        address: of a running Ray cluster; None starts one on this machine.
        backend: ``onnx`` (the graphs the devices run) or ``torch``.
        device: of the torch backend: ``cpu`` or ``cuda``.
        group: virtual devices of one tier that the torch backend trains together.
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
            raise ValueError('device and group are for backend = "torch"')
        if self.kind == "local" and self.address is not None:
            raise ValueError('address is for kind = "ray"')
        return self
