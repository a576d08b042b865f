"""Emulates clocks, so that simulated time does not depend on the machine that simulates.

A clock says how long a device would compute and send (Su et al., 2024,
https://arxiv.org/abs/2405.00885; specification 4.3 to 4.5). A device is a type, which has a time
per sample at each width, and a link, which has a rate:

    compute = seconds per sample at the width * samples of a step * steps * slowdown
    upload  = bits of the whole model / rate * width^2  (upload = "full_bits", as in the released
                                                        scripts)
            = bits of the update / rate                 (upload = "bytes")

A round takes as long as its slowest device, and rounds add up. What the specification leaves open
is decided here:

- A width between two of a table's is interpolated on logarithmic scales, along the power law
  through its neighbours; nothing is extrapolated.
- A tier with fewer blocks computes and, under ``full_bits``, sends its share of the blocks; stem
  and head count as nothing, so a shallow tier looks a little faster than it is.
- Sending to the devices takes no time, unless ``download`` is set; then as long as sending back.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import Self

from fleet_protocol.configuration import load_config, parse_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.spelling import closest

SHIPPED = "boards"
"""Name of the table that comes with Shoal, the device types of specification 4.4."""

_BITS_PER_MEGABIT = 1e6

Width = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class DynamicsConfig(FrozenModel):
    """The table ``[clock.dynamics]`` of a simulation; by default nothing changes.

    Attributes:
        loads: how many times slower a device computes, one of these in every round.
        links: names of links in the clock's table, or rates in Mbps, one of these in every round;
            empty, and every device keeps its own.
        stay: probability that a load, or a link, is that of the round before.
    """

    loads: tuple[Positive, ...] = Field(default=(1.0,), min_length=1)
    links: tuple[str | float, ...] = ()
    stay: float = Field(default=0.8, ge=0, le=1)


class ClockConfig(FrozenModel):
    """The table ``[clock]`` of a simulation.

    Attributes:
        table: ``boards``, or the path of a TOML file of device types and links, in the form of
            ``clock.toml`` here.
        upload: ``full_bits``: an upload is `full_bits` times the squared width; ``bytes``: what the
            update really has.
        full_bits: bits of the whole model. The default is the released one for the CNN on MNIST,
            about 8 bits for each of its parameters.
        download: whether sending the weights to a device takes time, too.
        dynamics: what changes from round to round (`simulation.dynamics`).
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


@dataclass(frozen=True)
class DeviceClock:
    """What a virtual device's times depend on.

    Attributes:
        type: name of its type in the table.
        mbps: rate of its link, in 10^6 bits per second, both ways.
        slowdown: how many times slower than its type it computes, because of what else it does.
    """

    type: str
    mbps: float
    slowdown: float = 1.0


@dataclass(frozen=True)
class Load:
    """What a device does in a round, as far as its time depends on it.

    Attributes:
        width: share of the global width.
        samples: of each training step: the batch size. For passes over data whose last batch is
            smaller, all the samples, with the number of passes as `steps`.
        steps: number of training steps.
        depth_share: blocks of the tier over blocks of the model, in (0, 1].
        upload_bytes: size of the update; only ``upload = "bytes"`` needs it.
        download_bytes: size of the weights; only ``upload = "bytes"`` with ``download`` needs it.
    """

    width: float
    samples: int = 0
    steps: int = 0
    depth_share: float = 1.0
    upload_bytes: int | None = None
    download_bytes: int | None = None


@dataclass(frozen=True)
class Clock:
    """The times of devices.

    >>> clock = load_clock(ClockConfig())
    >>> device = clock.device("RaspberryPi4", "bluetooth")
    >>> round(clock.device_seconds(device, Load(0.25, samples=64, steps=10)), 6)
    4.489196
    """

    table: ClockTable
    config: ClockConfig

    def device(self, type: str, link: str | float) -> DeviceClock:  # noqa: A002
        """Return a device by the name of its type, on a link by name or of a rate in Mbps.

        Raises:
            ConfigError: the table has no such type or link, or the rate is not positive; the
                message says what it has.
        """
        _check_name(self.table.types, type, "device type", "types")
        return DeviceClock(type, self.mbps(link))

    def mbps(self, link: str | float) -> float:
        """Return the rate of a link by name, or the rate itself, in 10^6 bits per second.

        Raises:
            ConfigError: the table has no such link, or the rate is not positive.
        """
        if isinstance(link, str):
            _check_name(self.table.links, link, "link", "links")
            rate = self.table.links[link]
        else:
            rate = link
        # Comparisons with NaN are false, so it is refused as well.
        is_positive = rate > 0 and math.isfinite(rate)
        if not is_positive:
            raise ConfigError(f"a link of {rate} Mbps sends nothing; give a positive rate")
        return float(rate)

    def compute_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time of a round's training.

        Raises:
            ConfigError: the table has no such type, or its widths do not reach this one.
        """
        sample_seconds = self._sample_seconds(device.type, load.width) * load.depth_share
        return sample_seconds * load.samples * load.steps * device.slowdown

    def upload_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time to send an update; a ConfigError where its size is needed and missing."""
        return self._sending_seconds(device, load, load.upload_bytes)

    def download_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time to send the weights to a device; 0 where that does not count.

        It is that of an upload of the same size.

        Raises:
            ConfigError: the size is needed and not given.
        """
        if not self.config.download:
            return 0.0
        return self._sending_seconds(device, load, load.download_bytes)

    def device_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time of a device in a round: receiving if it counts, training, sending.

        Raises:
            ConfigError: the table does not reach this width, or a size is missing.
        """
        download = self.download_seconds(device, load)
        compute = self.compute_seconds(device, load)
        upload = self.upload_seconds(device, load)
        return download + compute + upload

    def _sending_seconds(
        self,
        device: DeviceClock,
        load: Load,
        size_bytes: int | None,
    ) -> float:
        """Return the time to send so many bytes, or the share of ``full_bits`` instead."""
        rate = device.mbps * _BITS_PER_MEGABIT
        if self.config.upload == "full_bits":
            whole_seconds = self.config.full_bits / rate
            # The number of parameters grows with the square of the width, and with the blocks.
            return whole_seconds * load.width**2 * load.depth_share
        if size_bytes is None:
            raise ConfigError(
                'upload = "bytes" needs the size of the update; without it, use upload = '
                '"full_bits"'
            )
        return 8 * size_bytes / rate

    def _sample_seconds(self, name: str, width: float) -> float:
        """Return the time of a type for one sample at a width."""
        _check_name(self.table.types, name, "device type", "types")
        times = self.table.types[name].seconds_per_sample
        if width in times:
            return times[width]
        for lower, upper in pairwise(sorted(times)):
            if lower < width < upper:
                return _interpolate(times, lower, upper, width)
        least = min(times)
        largest = max(times)
        raise ConfigError(
            f"device type {name} has no time for width {width:g}: its table goes from "
            f'{least:g} to {largest:g}; add "{width:g}" = <seconds> to '
            f"[types.{name}.seconds_per_sample] of the clock's table"
        )


def _interpolate(
    times: Mapping[float, float],
    lower: float,
    upper: float,
    width: float,
) -> float:
    """Return the time at a width between two of a table's."""
    # On logarithmic scales a power law is a straight line.
    share = math.log(width / lower) / math.log(upper / lower)
    low = math.log(times[lower])
    high = math.log(times[upper])
    return math.exp((1 - share) * low + share * high)


def load_clock(config: ClockConfig) -> Clock:
    """Return the clock of a configuration.

    Raises:
        ConfigError: the table cannot be read, or there is something wrong in it.
    """
    if config.table == SHIPPED:
        shipped = files("simulation").joinpath("clock.toml")
        text = shipped.read_text(encoding="utf-8")
        table = parse_config(text, ClockTable, source="simulation/clock.toml")
        return Clock(table, config)
    if not config.table.endswith(".toml"):
        raise ConfigError(
            f"no clock table {config.table!r}; there is {SHIPPED!r}, or give the path of your own, "
            "a .toml file"
        )
    return Clock(load_config(Path(config.table), ClockTable), config)


def _check_name(
    table: Mapping[str, object],
    name: str,
    kind: str,
    key: str,
) -> None:
    """Check that a table of the clock has a name; a ConfigError if not."""
    if name in table:
        return
    close = closest(name, table, cutoff=0.5)
    if close:
        hint = f"did you mean {close!r}?"
    else:
        hint = f"it has {', '.join(table) or 'none'}"
    raise ConfigError(f"the clock's table has no {kind} {name!r}; {hint} (or add it to [{key}])")
