"""Emulates clocks, so that simulated time does not depend on the machine that simulates.

A clock gives the time that a device would take to compute and send (Su et al., 2024,
https://arxiv.org/abs/2405.00885; specification 4.3 to 4.5). A device is a type, which has a time
per sample at each width, and a link, which has a rate:

    compute = seconds per sample at the width * samples of a step * steps * slowdown
    upload  = bits of the whole model / rate * width^2  (upload = "full_bits", as in the released
                                                        scripts)
            = bits of the update / rate                 (upload = "bytes")

A round takes as long as its slowest device, and the times of rounds are summed. The specification
leaves these points open; this module decides:

- Times for widths between two of the table are interpolated on logarithmic scales (a power law
  through the neighbours); there is no extrapolation.
- A tier with fewer blocks computes and, under ``full_bits``, sends its share of the blocks; stem
  and head are ignored, so a shallow tier appears slightly faster than it is.
- Sending to the devices takes no time unless ``download`` is set; then it takes as long as an
  upload.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from fleet_protocol.configuration import load_config, parse_config
from fleet_protocol.errors import ConfigError
from fleet_protocol.spelling import closest
from simulation.clock_settings import SHIPPED, ClockConfig, ClockTable

_BITS_PER_MEGABIT = 1e6


@dataclass(frozen=True)
class DeviceClock:
    """The properties that determine a virtual device's times.

    Attributes:
        type: name of its type in the table.
        mbps: rate of its link in both directions, in 10^6 bits per second.
        slowdown: factor by which it computes slower than its type, because of other load.
    """

    type: str
    mbps: float
    slowdown: float = 1.0


@dataclass(frozen=True)
class Load:
    """The work of a device in a round, as far as it affects the time.

    Attributes:
        width: share of the global width.
        samples: samples of each training step, the batch size. For passes with a smaller last
            batch: all samples, with the number of passes as `steps`.
        steps: number of training steps.
        depth_share: blocks of the tier over blocks of the model, in (0, 1].
        trained_share: share of the tier's blocks that it trains, in [0, 1]; 0 for only the head.
        passed_share: share of the blocks above those, through which only the gradient passes.
        upload_bytes: size of the update; only ``upload = "bytes"`` needs it.
        download_bytes: size of the weights; only ``upload = "bytes"`` with ``download`` needs it.
    """

    width: float
    samples: int = 0
    steps: int = 0
    depth_share: float = 1.0
    trained_share: float = 1.0
    passed_share: float = 0.0
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
                message lists the table's names.
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
        # A number is a rate in Mbps.
        else:
            rate = link
        # Comparisons with NaN are false, so NaN is refused, too.
        is_positive = rate > 0 and math.isfinite(rate)
        if not is_positive:
            raise ConfigError(f"a link needs a positive rate, not {rate} Mbps")
        return float(rate)

    def compute_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time of a round's training.

        Raises:
            ConfigError: the table has no such type, or its widths do not reach this one.
        """
        sample_seconds = self._sample_seconds(device.type, load.width) * load.depth_share
        sample_seconds *= _step_share(load.trained_share, load.passed_share)
        return sample_seconds * load.samples * load.steps * device.slowdown

    def upload_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time to send an update; a ConfigError if its size is needed but missing."""
        seconds = self._sending_seconds(device, load, load.upload_bytes)
        # Bytes are those of the update itself, which has nothing else in it.
        if self.config.upload == "full_bits":
            seconds *= load.trained_share
        return seconds

    def download_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time to send the weights to a device; 0 if downloads take no time.

        It equals the time of an upload of the same size.

        Raises:
            ConfigError: the size is needed but missing.
        """
        if not self.config.download:
            return 0.0
        return self._sending_seconds(device, load, load.download_bytes)

    def device_seconds(self, device: DeviceClock, load: Load) -> float:
        """Return the time of a device in a round: receiving (if counted), training, sending.

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
        """Return the time to send this many bytes, or the share of ``full_bits`` instead."""
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
        # Bits, because rates of links are in bits.
        return 8 * size_bytes / rate

    def _sample_seconds(self, name: str, width: float) -> float:
        """Return the time of a type for one sample at a width."""
        _check_name(self.table.types, name, "device type", "types")
        times = self.table.types[name].seconds_per_sample
        # Measured widths first: interpolation would change their last bits.
        if width in times:
            return times[width]
        # A power law through the two neighbours only; beyond the table there is none.
        for lower, upper in pairwise(sorted(times)):
            if lower < width < upper:
                return _interpolate(times, lower, upper, width)
        least = min(times)
        largest = max(times)
        raise ConfigError(
            f"device type {name} has no time for width {width:g}: its table covers "
            f'{least:g} to {largest:g}; add "{width:g}" = <seconds> to '
            f"[types.{name}.seconds_per_sample] of the clock's table"
        )


def _step_share(trained_share: float, passed_share: float) -> float:
    """Return the time of a step that trains a share of the blocks, relative to one of all blocks.

    A third of a step of all blocks is the forward pass, and a third each the gradients of what the
    blocks take and of their parameters.
    """
    return (1.0 + 2.0 * trained_share + passed_share) / 3.0


def _interpolate(
    times: Mapping[float, float],
    lower: float,
    upper: float,
    width: float,
) -> float:
    """Return the time at a width between two of a table's."""
    # On logarithmic scales, a power law is a straight line.
    share = math.log(width / lower) / math.log(upper / lower)
    low = math.log(times[lower])
    high = math.log(times[upper])
    return math.exp((1 - share) * low + share * high)


def load_clock(config: ClockConfig) -> Clock:
    """Return the clock of a configuration.

    Raises:
        ConfigError: the table cannot be read or is invalid.
    """
    if config.table == SHIPPED:
        shipped = files("simulation").joinpath("clock.toml")
        text = shipped.read_text(encoding="utf-8")
        table = parse_config(text, ClockTable, source="simulation/clock.toml")
        return Clock(table, config)
    if not config.table.endswith(".toml"):
        raise ConfigError(
            f"unknown clock table {config.table!r}; use {SHIPPED!r}, or the path of a .toml file"
        )
    return Clock(load_config(Path(config.table), ClockTable), config)


def _check_name(
    table: Mapping[str, object],
    name: str,
    kind: str,
    key: str,
) -> None:
    """Check that a table of the clock has a name; raises a ConfigError if not."""
    if name in table:
        return
    close = closest(name, table, cutoff=0.5)
    if close:
        hint = f"did you mean {close!r}?"
    else:
        hint = f"it has {', '.join(table) or 'none'}"
    raise ConfigError(f"the clock's table has no {kind} {name!r}; {hint} (or add it to [{key}])")
