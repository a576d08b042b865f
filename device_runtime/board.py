"""What the board is: processor, memory, runtimes, temperature, power.

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

# onnxruntime-training also runs the portable step, so each of its packages offers both backends.
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
    """A probed board."""

    arch: str  # machine type, as in ``uname -m``
    system: str  # operating system and release
    cores: int  # processors this process may use
    ram_bytes: int  # memory of the board, 0 where the system does not tell
    free_ram_bytes: int  # memory available now, 0 where the system does not tell
    backends: Mapping[str, str]  # training backend to the version of the package that runs it
    python: str  # version of the interpreter
    temperature_celsius: float | None  # hottest thermal zone, where the board tells
    on_battery: bool | None  # whether a battery is discharging, where the board has one


@functools.cache  # reading a package's metadata takes 3 ms, which every task would pay
def installed_backends() -> Mapping[str, str]:
    """Backends this environment can run, with ``<package> <version>``.

    Nothing is imported for it.
    """
    found: dict[str, str] = {}
    for package, backends in BACKEND_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            for backend in backends:
                found.setdefault(backend, f"{package} {version}")
    return found


def check_system() -> None:
    """See that there can be a runtime for this system.

    A ConfigError says which to install otherwise.
    """
    if sys.maxsize < 2**32:
        raise ConfigError(
            f"this is a 32-bit Python on {platform.machine()}, for which there is no onnxruntime; install a 64-bit"
            " system (Raspberry Pi OS 64-bit)"
        )


def clock_doubt() -> str:
    """What is to be done about a clock that is behind this installation; empty where it is not."""
    now = time.time()
    if now >= Path(__file__).stat().st_mtime - _SKEW_SECONDS:
        return ""
    return (
        f"it is {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))} on this board, before Shoal was installed:"
        " certificates will seem not valid yet; let it fetch the time (timedatectl set-ntp true), or set it"
    )


def runtime_version() -> str:
    """Version of Shoal on this board."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "unknown"


def texts(paths: Iterator[Path]) -> Iterator[tuple[Path, str]]:
    """Small files of the system that can be read, with their content."""
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield path, path.read_text(encoding="ascii").strip()


def temperature(sysfs: Path) -> float | None:
    """Of the hottest thermal zone, or without zones sensor, in degrees Celsius.

    `sysfs` as of `probe`.
    """
    for pattern in ("thermal/thermal_zone*/temp", "hwmon/hwmon*/temp*_input"):
        values = [
            int(text) / 1000 for _, text in texts(sysfs.glob(pattern)) if text.lstrip("-").isdigit()
        ]
        if values:
            return max(values)
    return None


def _of_batteries(sysfs: Path, name: str) -> list[str]:
    """A file of each battery that feeds the board.

    Those of a mouse or a pen say that they are a device's.
    """
    found = [
        path.parent for path, text in texts(sysfs.glob("power_supply/*/type")) if text == "Battery"
    ]
    feeding = [
        path for path in found if "Device" not in [text for _, text in texts(path.glob("scope"))]
    ]
    return [text for path in feeding for _, text in texts(path.glob(name))]


def on_battery(sysfs: Path) -> bool | None:
    """Whether a battery discharges; `sysfs` as of `probe`."""
    states = _of_batteries(sysfs, "status")
    return "Discharging" in states if states else None


def charge(sysfs: Path) -> float | None:
    """Of the emptiest battery, in [0, 1]; `sysfs` as of `probe`."""
    return min(
        (int(text) / 100 for text in _of_batteries(sysfs, "capacity") if text.isdigit()),
        default=None,
    )


def proc_number(path: Path, key: str) -> int:
    """A line ``Key:   123 kB`` of a proc file, in bytes, or ``key 123``; 0 where there is none."""
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="ascii", errors="replace")
        if found := re.search(rf"^{key}:?\s+(\d+)( kB)?$", text, re.MULTILINE):
            return int(found[1]) * (1024 if found[2] else 1)
    return 0


def boot_id() -> str:
    """Which of its starts this computer is in; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _ram_bytes() -> int:
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no sysconf on Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def available_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_name() -> str:
    """What the board calls itself, as ``Raspberry Pi 5 Model B Rev 1.0``, else its processor."""
    with contextlib.suppress(OSError):
        return Path("/proc/device-tree/model").read_text("utf-8", "replace").rstrip("\0\n")
    with contextlib.suppress(OSError):
        found = re.search(
            r"^model name\s*: (.*)",
            Path("/proc/cpuinfo").read_text("ascii", "replace"),
            re.MULTILINE,
        )
        return found[1] if found else platform.machine()
    return platform.machine()


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, 0 where the system does not tell.

    Read from ``/proc`` where there is one: ``getrusage`` starts from the size of the parent at the
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
    """Look at the board."""
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
