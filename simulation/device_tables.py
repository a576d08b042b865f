"""The tables of ``sim.toml`` for virtual devices, and for the engine that computes their tasks."""

from typing import Literal

from pydantic import Field, model_validator

from fleet_protocol.byte_counts import ByteCount
from fleet_protocol.frozen import FrozenModel
from simulation.clock_settings import Width


class DeviceGroup(FrozenModel):
    """One entry of ``[[devices.types]]``: devices of one kind.

    Attributes:
        type: name of the device type in the clock's table.
        link: name of a link in the clock's table, or speed of the link in Mbit/s.
        count: number of devices of this kind; None divides the remaining devices evenly among the
            entries without a count.
        max_width: width of the largest sub-model that these devices can train.
        max_depth: depth of the largest sub-model that these devices can train; None for any depth.
        memory: free memory of these devices, such as ``"512 MB"`` or a number of bytes; training
            may use the share ``tiers.memory_share`` of it. 0 for no limit.
        dropout: probability that a device of this kind goes offline during a round; it then stays
            offline until the round ends.
    """

    type: str = "MacBookPro2018"
    link: str | float = "wifi"
    count: int | None = Field(default=None, ge=0)
    max_width: Width = 1.0
    max_depth: int | None = Field(default=None, ge=1)
    memory: ByteCount = 0
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
