"""Properties of the board: processor, memory, runtimes, temperature, power.

Read from the system, without extra packages.
"""

import contextlib
import functools
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fleet_protocol.errors import ConfigError

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]

# onnxruntime-training also runs the portable step, so its packages offer both backends.
BACKEND_PACKAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("onnxruntime-training-cpu", ("ort-training", "onnx")),
    ("onnxruntime-training", ("ort-training", "onnx")),
    ("onnxruntime", ("onnx",)),
    ("onnxruntime-gpu", ("onnx",)),
    ("onnxruntime-openvino", ("onnx",)),
)

_SYSFS = Path("/sys/class")
_SKEW_SECONDS = 86_400.0


@dataclass(frozen=True)
class Board:
    """A measured board."""

    arch: str  # machine type, as in ``uname -m``
    system: str  # operating system and release
    cores: int  # processors this process may use
    ram_bytes: int  # memory of the board in bytes; 0 if the system does not report it
    free_ram_bytes: int  # memory available now, in bytes; 0 if the system does not report it
    backends: Mapping[str, str]  # training backend to the version of the package that runs it
    python: str  # version of the interpreter
    temperature_celsius: float | None  # hottest thermal zone, if the board reports one
    on_battery: bool | None  # whether a battery is discharging, if the board has one


@functools.cache  # Reading a package's metadata takes 3 ms, which every task would pay.
def installed_backends() -> Mapping[str, str]:
    """Return the backends that this environment can run, with ``<package> <version>``.

    Nothing is imported.
    """
    installed: dict[str, str] = {}
    for package, backends in BACKEND_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            for backend in backends:
                installed.setdefault(backend, f"{package} {version}")
    return installed


def check_system() -> None:
    """Check that a runtime exists for this system.

    Raises:
        ConfigError: none exists; the message names the system to install.
    """
    if sys.maxsize < 2**32:
        raise ConfigError(
            f"this Python is a 32-bit build on {platform.machine()}, for which onnxruntime "
            "does not exist; install a 64-bit system (Raspberry Pi OS 64-bit)"
        )


def clock_doubt() -> str:
    """Return the remedy for a clock that is behind this installation; empty if it is not."""
    now = time.time()
    if now >= Path(__file__).stat().st_mtime - _SKEW_SECONDS:
        return ""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return (
        f"the clock of this board shows {date}, which is before Shoal was installed, so"
        " certificates will not seem to be valid yet; synchronise the clock (timedatectl set-ntp"
        " true), or set it"
    )


def runtime_version() -> str:
    """Return the version of Shoal on this board."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "unknown"


def texts(paths: Iterator[Path]) -> Iterator[tuple[Path, str]]:
    """Yield small system files that can be read, with their content."""
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield path, path.read_text(encoding="ascii").strip()


def temperature(sysfs: Path) -> float | None:
    """Return the degrees Celsius of the hottest thermal zone or, without zones, sensor.

    For `sysfs` see `probe`.
    """
    for pattern in ("thermal/thermal_zone*/temp", "hwmon/hwmon*/temp*_input"):
        values: list[float] = []
        for _path, text in texts(sysfs.glob(pattern)):
            if text.lstrip("-").isdigit():
                values.append(int(text) / 1000)  # the kernel reports thousandths of a degree
        if values:
            return max(values)
    return None


def on_battery(sysfs: Path) -> bool | None:
    """Return whether a battery discharges; None without a battery; for `sysfs` see `probe`."""
    states = _of_batteries(sysfs, "status")
    return "Discharging" in states if states else None


def charge(sysfs: Path) -> float | None:
    """Return the charge of the emptiest battery, in [0, 1]; for `sysfs` see `probe`."""
    percents = [int(text) for text in _of_batteries(sysfs, "capacity") if text.isdigit()]
    return min(percents) / 100 if percents else None


def _of_batteries(sysfs: Path, name: str) -> list[str]:
    """Return the content of a file for each battery that powers the board.

    Batteries of peripherals, such as a mouse or a pen, declare the scope of a device and are
    skipped.
    """
    values: list[str] = []
    for path, kind in texts(sysfs.glob("power_supply/*/type")):
        battery = path.parent
        scopes = [text for _path, text in texts(battery.glob("scope"))]
        if kind == "Battery" and "Device" not in scopes:
            values += [text for _path, text in texts(battery.glob(name))]
    return values


def proc_number(path: Path, key: str) -> int:
    """Return the number in a line of a proc file; 0 if there is none.

    The line is ``Key: 123 kB``, which is returned in bytes, or ``key 123``.
    """
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="ascii", errors="replace")
        match = re.search(rf"^{key}:?\s+(\d+)( kB)?$", text, re.MULTILINE)
        if match:
            return int(match[1]) * (1024 if match[2] else 1)
    return 0


def boot_id() -> str:
    """Return the id of this computer's current boot; empty if the system does not report it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _ram_bytes() -> int:
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def available_cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_name() -> str:
    """Return the board's model, as ``Raspberry Pi 5 Model B Rev 1.0``, or else its processor's."""
    with contextlib.suppress(OSError):
        # Boards without a BIOS report their model here.
        return Path("/proc/device-tree/model").read_text("utf-8", "replace").rstrip("\0\n")
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("ascii", "replace")
        match = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
        return match[1] if match else platform.machine()
    return platform.machine()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process so far; 0 if the system does not report it.

    Read from ``/proc`` if it exists, because ``getrusage`` starts from the parent's size at the
    fork.
    """
    peak = proc_number(Path("/proc/self/status"), "VmHWM")
    if peak:
        return peak
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def probe(sysfs: Path = _SYSFS) -> Board:
    """Measure the board; `sysfs` is where the kernel shows devices by class."""
    return Board(
        arch=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        cores=available_cores(),
        ram_bytes=_ram_bytes(),
        free_ram_bytes=proc_number(Path("/proc/meminfo"), "MemAvailable"),
        backends=installed_backends(),
        python=platform.python_version(),
        temperature_celsius=temperature(sysfs),
        on_battery=on_battery(sysfs),
    )
