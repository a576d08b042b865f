"""Checks everything that may keep a board from training, one item after another.

Each finding says what to do. A check imports what it needs only when it runs, so that a board that
lacks a package is informed of it.
"""

import contextlib
import errno
import platform
import queue
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from device_runtime.board import (
    check_system,
    clock_doubt,
    installed_backends,
    probe,
    texts,
)
from device_runtime.conditions import ConditionWatch, Reading
from device_runtime.self_test import provider_test, self_test
from device_runtime.settings import DeviceConfig, load_device_config
from fleet_protocol.errors import (
    BrokerRefusedError,
    ConfigError,
    MismatchError,
    ShoalError,
    StorageError,
    TransportError,
)
from fleet_protocol.onnx_runtime import check_runtime

# The server's status is retained, so it arrives immediately if a server has announced itself.
_SERVER_SECONDS = 3.0
_PROBE_SECONDS = 5.0
_LITTLE_MEMORY = 150 * 2**20  # the agent itself takes 60 to 90 MB
_RADIOS = Path("/sys/class/rfkill")
_HOT_CELSIUS = 80.0  # a Raspberry Pi slows down above this temperature

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: its name.
        level: its severity.
        detail: what was found and, unless all is well, what to do.
        exit_code: 0 unless the check failed.
    """

    check: str
    level: Level
    detail: str
    exit_code: int = 0


class _CheckWarningError(Exception):
    """A fault that does not keep the board from training."""


def examine(config_path: Path, enrolment: Path | None = None) -> Iterator[Finding]:
    """Yield a finding for each check of a board, as soon as it is available.

    Checks are skipped if they need a configuration that cannot be read, or a broker that does not
    answer.

    Args:
        config_path: the device's TOML file.
        enrolment: the board's enrolment, instead of the one that the file names.
    """
    for name, check in _GENERAL:
        yield _finding(name, check)
    configs: list[DeviceConfig] = []  # the next check adds the configuration if it can be read
    yield _finding("configuration", partial(_configuration, config_path, enrolment, configs))
    for config in configs:
        yield from _examine_configured(config)


def _examine_configured(config: DeviceConfig) -> Iterator[Finding]:
    for name, check in _CONFIGURED:
        yield _finding(name, partial(check, config))
    watch = ConditionWatch(config.conditions)
    watch.check(0.0)
    for name, reading in watch.readings.items():
        yield _finding(f"condition {name}", partial(_condition, reading))
    network = _finding("network", partial(_network, config))
    yield network
    if network.level == "ok":
        broker = _finding("broker", partial(_broker, config))
        yield broker
        if broker.level != "failed":
            yield _finding("access rules", partial(_access, config))


def _finding(name: str, check: Callable[[], str]) -> Finding:
    """Run a check; its result, or its error, is the finding."""
    try:
        return Finding(name, "ok", check())
    except _CheckWarningError as warning:
        return Finding(name, "warning", str(warning))
    except ShoalError as error:
        return Finding(name, "failed", str(error), error.exit_code)


# Checks that need no configuration.


def _system() -> str:
    check_system()
    system = f"{platform.system()} {platform.release()}"
    return f"{platform.machine()}, {system}, Python {platform.python_version()}"


def _radio() -> str:
    for path, kind in texts(_RADIOS.glob("*/type")):
        switches = [text for _path, text in texts(path.parent.glob("soft"))]
        if kind == "wlan" and "1" in switches:
            raise _CheckWarningError(
                "the Wi-Fi of this board is switched off (rfkill), as it is until its country is"
                " set: set `country` in [network] of flash.toml and write the card again, or run"
                " `raspi-config nonint do_wifi_country DE`"
            )
    return "no Wi-Fi is switched off"


def _packages() -> str:
    missing: list[str] = []
    if find_spec("paho") is None:
        missing.append("paho-mqtt")
    if not installed_backends():
        missing.append("onnxruntime")
    if missing:
        raise ConfigError(f"not installed: {' and '.join(missing)}; pip install 'shoal[device]'")
    # Two installed packages of onnxruntime overwrite parts of each other.
    check_runtime()
    return ", ".join(f"{backend}: {package}" for backend, package in installed_backends().items())


def _clock() -> str:
    doubt = clock_doubt()
    if doubt:
        raise _CheckWarningError(doubt)
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def _board() -> str:
    board = probe()
    if not board.ram_bytes or not board.free_ram_bytes:
        raise _CheckWarningError(
            "/proc/meminfo reports no free memory, so the server cannot choose a sub-model "
            "that fits; mount /proc"
        )
    free = f"{board.free_ram_bytes / 2**20:.0f} of {board.ram_bytes / 2**20:.0f} MiB of memory free"
    if board.free_ram_bytes < _LITTLE_MEMORY:
        raise _CheckWarningError(
            f"{free}: too little for the agent and a sub-model; stop other programs, "
            "or set a small max_width"
        )
    celsius = board.temperature_celsius
    heat = "" if celsius is None else f", {celsius:.0f} °C"
    if celsius is not None and celsius >= _HOT_CELSIUS:
        raise _CheckWarningError(
            f"{free}{heat}: the processor slows down at this temperature; cool it, or set "
            "threads = 1"
        )
    power = ", on battery" if board.on_battery else ""
    return f"{board.cores} cores, {free}{heat}{power}"


# Checks that need the configuration.


def _configuration(path: Path, enrolment: Path | None, configs: list[DeviceConfig]) -> str:
    config = load_device_config(path, enrolment)
    configs.append(config)
    why = config.shut_out()
    if why:
        raise ConfigError(why)
    doubt = config.ended()
    if doubt:
        raise _CheckWarningError(doubt)
    depth = "" if config.max_depth is None else f", max_depth {config.max_depth}"
    return f"device {config.device} of fleet {config.fleet}, max_width {config.max_width:g}{depth}"


def _state(config: DeviceConfig) -> str:
    folder = config.state_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe_file = folder / f"doctor-{uuid.uuid4().hex}"
        probe_file.write_bytes(b"x" * 4096)
        probe_file.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        remedy = "make it writable for this user, or set state_dir"
        if error.errno == errno.ENOSPC:
            remedy = "free some space, or use a larger card"
        raise StorageError(f"{folder} cannot be written: {error.strerror}; {remedy}") from error
    space = f"{folder}, {free / 2**20:.0f} MiB free"
    if free < config.max_cache_bytes:
        raise _CheckWarningError(
            f"{space}, less than max_cache_bytes ({config.max_cache_bytes / 2**20:.0f} MiB); "
            "free some space or lower it"
        )
    return space


def _runtime(config: DeviceConfig) -> str:
    from device_runtime.training.backends import choose_backend  # noqa: PLC0415  (numpy)

    backend = choose_backend(config.backend)
    problem = self_test(config.state_dir, backend)
    if problem:
        raise ConfigError(problem)
    return f"backend {backend}: a small graph runs"


def _providers(config: DeviceConfig) -> str:
    wanted = config.accelerators()
    only_cpu = "the CPU; [runtime] providers names nothing else"
    if wanted is None:
        return only_cpu
    trials: list[str] = []
    for key, trial in wanted.known().items():
        trials.append(f"graph {key[:8]}: {key.rpartition(' ')[2]} {trial}")
    problems = [problem for name in wanted.names if (problem := provider_test(name))]
    if problems:
        raise _CheckWarningError("; ".join([*problems, *trials]))
    working = f"{', '.join(wanted.names)} compute a small graph" if wanted.names else only_cpu
    return "; ".join([working, *trials])


def _data(config: DeviceConfig) -> str:
    from device_runtime.agent.data_findings import sentences  # noqa: PLC0415  (numpy)
    from fleet_protocol.data import load_data  # noqa: PLC0415
    from fleet_protocol.data.contract import reconcile  # noqa: PLC0415
    from fleet_protocol.data.positions import describe_positions  # noqa: PLC0415
    from fleet_protocol.data.terms import read_contract  # noqa: PLC0415

    data = load_data(config.data)
    contract = read_contract(config.state_dir)
    own_labels = config.own_model is not None
    try:
        reconcile(data, contract, own_labels=own_labels)
    except MismatchError as error:
        if contract is None:  # the fleet may have a contract that this board has not received yet
            raise _CheckWarningError(
                f"{error}; no change is needed if the fleet's contract sets it"
            ) from error
        raise
    text = f"{len(data)} samples of shape {tuple(data.x.shape[1:])} in {data.source}"
    if data.y.ndim == 1 and data.y.dtype.kind != "f" and not data.label_names:
        text += f", labels from {data.y.min()} to {data.y.max()}"
    if contract is not None:
        text += "; they fit the fleet's contract"
    taken = describe_positions(data, contract, own_labels=own_labels)
    if taken:
        text += f", where {taken}"
    if data.facts.left_out:
        text += f"; left out: {data.facts.left_out_text}"
    doubts = [_capitalised(sentence) for sentence in sentences(data, contract)]
    if doubts:
        raise _CheckWarningError(". ".join([text, *doubts]))
    return text


def _capitalised(sentence: str) -> str:
    return f"{sentence[:1].upper()}{sentence[1:]}"


def _condition(reading: Reading) -> str:
    if not reading.text:
        raise _CheckWarningError(
            "this board does not report it, so the condition always holds; remove it from "
            "[conditions]"
        )
    if reading.reason:
        raise _CheckWarningError(f"{reading.text}; the board would pause now: {reading.reason}")
    return reading.text


def _network(config: DeviceConfig) -> str:
    address = config.address()
    try:
        hosts = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(
            f"the host name {address.host!r} is unknown ({error.strerror or error}); check "
            "`broker`, or write an IP address"
        ) from error
    try:
        with socket.create_connection((address.host, address.port), _PROBE_SECONDS):
            return f"{address.host} is {hosts[0][4][0]}, port {address.port} answers"
    except OSError as error:
        raise TransportError(
            f"port {address.port} of {address.host} does not answer "
            f"({error.strerror or error}). Is the broker running, and does it listen on this "
            "network? A Mosquitto that the server starts listens on 127.0.0.1 unless "
            'fleet.toml sets `listen = "0.0.0.0"` in [broker], and the embedded broker only '
            "on 127.0.0.1"
        ) from error


def _broker(config: DeviceConfig) -> str:
    from fleet_protocol.topics import Topics  # noqa: PLC0415
    from fleet_protocol.transport import open_transport  # noqa: PLC0415

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = open_transport(config.address(), f"shoal-doctor-{uuid.uuid4().hex[:12]}", inbox)
    topic = Topics(config.fleet).server_status
    with contextlib.closing(link):
        link.connect(_PROBE_SECONDS)
        # A refused subscription is reported by the check of the access rules.
        with contextlib.suppress(BrokerRefusedError):
            link.subscribe(topic)
        announced = _waits_for(inbox, topic)
    if announced:
        return (
            f"connected to {link.address}; the server of fleet {config.fleet} has announced itself"
        )
    raise _CheckWarningError(
        f"connected to {link.address}, but no server of a fleet {config.fleet!r} has "
        "announced itself there; is `fleet` spelled as in fleet.toml, is `shoal up` "
        f"running, and do the broker's access rules let this board read {topic}?"
    )


def _access(config: DeviceConfig) -> str:
    from device_runtime.access_check import check_access  # noqa: PLC0415  (paho)

    return check_access(config)


def _waits_for(inbox: queue.SimpleQueue[Any], topic: str) -> bool:
    """Return whether a message on a topic arrives in time."""
    from fleet_protocol.transport import Received  # noqa: PLC0415

    deadline = time.monotonic() + _SERVER_SECONDS
    with contextlib.suppress(queue.Empty):
        while True:
            event = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(event, Received) and event.topic == topic:
                return True
    return False


_GENERAL: tuple[tuple[str, Callable[[], str]], ...] = (
    ("system", _system),
    ("packages", _packages),
    ("clock", _clock),
    ("board", _board),
    ("radio", _radio),
)
_CONFIGURED: tuple[tuple[str, Callable[[DeviceConfig], str]], ...] = (
    ("state folder", _state),
    ("runtime", _runtime),
    ("providers", _providers),
    ("data", _data),
)
