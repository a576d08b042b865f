"""The settings of a clock, and its table of device types and links."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import Self

from fleet_protocol.frozen import FrozenModel

SHIPPED = "boards"
"""Name of the table that comes with Shoal, the device types of specification 4.4."""

Width = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class DynamicsConfig(FrozenModel):
    """The table ``[clock.dynamics]`` of a simulation; by default nothing changes.

    Attributes:
        loads: factors by which devices slow down; in each round, each device has one of these
            factors.
        links: names of links in the clock's table, or speeds in Mbit/s; in each round, each device
            has one of these links. If empty, every device keeps its own link.
        stay: probability that a load or a link stays the same as in the previous round.
    """

    loads: tuple[Positive, ...] = Field(default=(1.0,), min_length=1)
    links: tuple[str | float, ...] = ()
    stay: float = Field(default=0.8, ge=0, le=1)


class ClockConfig(FrozenModel):
    """The table ``[clock]`` of a simulation.

    Attributes:
        table: table of device types and links: ``boards``, or the path of a TOML file in the form
            of ``simulation/clock.toml``.
        upload: how the clock determines the size of an upload: ``full_bits`` uses the key
            ``full_bits`` times the squared width, and ``bytes`` uses the actual size of the update.
        full_bits: size of the whole model in bits. The default is the released value for the CNN on
            MNIST, about 8 bits for each parameter.
        download: whether sending the weights to a device also takes time on the clock.
        dynamics: conditions that change from round to round (`simulation.dynamics`).
    """

    table: str = Field(default=SHIPPED, min_length=1)
    upload: Literal["full_bits", "bytes"] = "full_bits"
    full_bits: int = Field(default=12_352_000, ge=1)
    download: bool = False
    dynamics: DynamicsConfig = DynamicsConfig()

    def relocated(self, move: Callable[[Path], Path]) -> Self:
        """Return the table with `move` applied to the path of the device types."""
        if self.table == SHIPPED:
            return self
        path = move(Path(self.table))
        return self.model_copy(update={"table": str(path)})


class DeviceType(FrozenModel):
    """One kind of device.

    Attributes:
        seconds_per_sample: time of a training step for one sample, by width; at least one.
    """

    seconds_per_sample: Mapping[Width, Positive] = Field(min_length=1)


class ClockTable(FrozenModel):
    """Device types, and rates of links in Mbps, by name."""

    types: Mapping[str, DeviceType] = Field(min_length=1)
    links: Mapping[str, Positive] = Field(default_factory=dict)
