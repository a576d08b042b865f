"""Connects to a Ray cluster, or starts one on this machine, within a deadline.

It also undoes side effects of Ray, seen with Ray 2.60:

- ``ray.init`` with an address where nothing answers tries for more than two minutes, in native code
  that no other thread and no signal interrupts. A separate process tries first, because that can be
  ended.
- ``ray.init`` replaces the handler of SIGTERM. The former handler is put back, or a run could not
  end in good order.
- A Ray that is started here would report its use to Ray's makers; its environment forbids that.
- Ray lets its actors import from the driver's working folder, before everything else. While Ray
  starts, that is the folder of our packages, so that no file of the user stands in for one of
  them.
- When the raylet of this machine dies, Ray ends the whole process; nothing here can prevent that,
  and the simulation goes on from its folder when it is started again.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import ray

from fleet_protocol.errors import TransportError

_CONNECTING_PROGRAM = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]  # a ray.py in the working folder is not Ray
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
"""
_HINT = (
    "`ray status` on one of the cluster's machines tells whether it runs, `ray start --head --port "
    "6379` starts one; without [engine] address Ray is started on this machine"
)
_ROOT = Path(__file__).resolve().parents[2]
# Little more than the least that Ray accepts: on one machine everything goes through files.
_STORE_BYTES = 80 * 2**20


def connect(address: str | None, *, workers: int, deadline_seconds: float = 30.0) -> bool:
    """Make Ray's functions work in this process.

    Args:
        address: of a running cluster (``host:6379`` or ``auto`` on one of its machines,
            ``ray://host:10001`` from elsewhere); None starts Ray on this machine.
        workers: CPUs that a Ray started here offers.
        deadline_seconds: how long a cluster may take to answer.

    Returns:
        Whether `disconnect` is to be called; not if this process was connected before.

    Raises:
        TransportError: nothing answers at the address, or Ray cannot be started here.
    """
    if ray.is_initialized():
        return False
    with _own_sigterm(), _working_folder(_ROOT):
        if address is None:
            _start_here(workers)
        else:
            _check_cluster(address, deadline_seconds)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    return True


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    with _own_sigterm():
        ray.shutdown()


def _start_here(workers: int) -> None:
    """Start Ray on this machine; a TransportError if it does not start."""
    try:
        with _environment(RAY_USAGE_STATS_ENABLED="0"):
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_STORE_BYTES,
            )
    # Ray raises a bare Exception where a machine is too busy to start it within 30 seconds.
    except Exception as error:
        raise TransportError(
            f"Ray cannot be started on this machine: {error}; its logs are in /tmp/ray/"
            'session_latest/logs, and [engine] kind = "local" needs no Ray'
        ) from error


def _check_cluster(address: str, deadline_seconds: float) -> None:
    """Check that a cluster answers; a TransportError if none does."""
    _check_port(address, deadline_seconds)
    command = [sys.executable, "-c", _CONNECTING_PROGRAM, address]
    try:
        completed = subprocess.run(  # noqa: S603  (our own line of Python)
            command,
            capture_output=True,
            text=True,
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"no Ray cluster answers at {address} within {deadline_seconds:g} s; {_HINT}"
        ) from error
    if completed.returncode:
        lines = completed.stderr.strip().splitlines() or ["no reason given"]
        raise TransportError(f"the Ray cluster at {address} cannot be used: {lines[-1]}; {_HINT}")


def _check_port(address: str, deadline_seconds: float) -> None:
    """Check that something listens at an address; a TransportError if not.

    This takes no time where nothing does. An address without host and port is not checked.
    """
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), deadline_seconds).close()
    except OSError as error:
        raise TransportError(f"no Ray cluster at {address}: {error}; {_HINT}") from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Put the handler of SIGTERM back afterwards."""
    # Handlers can be set in the main thread only, by Ray as well.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _working_folder(folder: Path) -> Iterator[None]:
    """Work in a folder, and return to the former one afterwards."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that Ray starts, where the user has not set them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
