"""Connects to a Ray cluster, or starts one on this machine, within a deadline.

It also undoes side effects of Ray, seen with Ray 2.60:

- ``ray.init`` with an unreachable address retries for more than two minutes, in native code that no
  other thread and no signal can interrupt. So a separate process tries first, because it can be
  killed.
- ``ray.init`` replaces the handler of SIGTERM. The previous handler is restored; otherwise a run
  could not end cleanly.
- A Ray started here would send usage reports to its developers; its environment disables that.
- Ray's actors import from the driver's working folder first. While Ray starts, that is the folder
  of Shoal's packages, so that no file of the user shadows them.
- When the raylet of this machine dies, Ray ends the whole process. This module cannot prevent that;
  the simulation resumes from its folder when it is started again.
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
    "check the cluster with `ray status` on one of its machines, start one with `ray start"
    " --head --port 6379`, or remove [engine] address to start Ray on this machine"
)
_ROOT = Path(__file__).resolve().parents[2]
# Slightly above Ray's minimum, because on one machine all data is exchanged through files.
_STORE_BYTES = 80 * 2**20


def connect(address: str | None, *, workers: int, deadline_seconds: float = 30.0) -> bool:
    """Connect this process to Ray.

    Args:
        address: address of a running cluster (``host:6379`` or ``auto`` on one of its machines,
            ``ray://host:10001`` from elsewhere); None starts Ray on this machine.
        workers: CPUs that a Ray started here offers.
        deadline_seconds: longest wait for an answer of the cluster.

    Returns:
        Whether the caller must call `disconnect`; False if this process was already connected.

    Raises:
        TransportError: no cluster answers at the address, or Ray cannot be started here.
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
    """Disconnect from the cluster; a cluster that was started here is stopped."""
    with _own_sigterm():
        ray.shutdown()


def _start_here(workers: int) -> None:
    """Start Ray on this machine; raises a TransportError if it does not start."""
    try:
        with _environment(RAY_USAGE_STATS_ENABLED="0"):
            ray.init(
                address="local",  # ignores RAY_ADDRESS
                num_cpus=workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_STORE_BYTES,
            )
    # Ray raises a plain Exception if it does not start within 30 seconds on a busy machine.
    except Exception as error:
        raise TransportError(
            f"Ray cannot be started on this machine: {error}; see its logs in /tmp/ray/"
            'session_latest/logs, or use [engine] kind = "local", which does not need Ray'
        ) from error


def _check_cluster(address: str, deadline_seconds: float) -> None:
    """Check that a cluster answers; raises a TransportError if it does not."""
    # A closed port fails at once, while Ray would try for minutes.
    _check_port(address, deadline_seconds)
    command = [sys.executable, "-c", _CONNECTING_PROGRAM, address]
    try:
        completed = subprocess.run(  # noqa: S603  (our own line of Python)
            command,
            capture_output=True,
            text=True,
            # The process may hang in native code, so it is killed at the deadline.
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"no Ray cluster answers at {address} within {deadline_seconds:g} s; {_HINT}"
        ) from error
    if completed.returncode:
        # The last line of a traceback has the error.
        lines = completed.stderr.strip().splitlines() or ["no reason given"]
        raise TransportError(f"the Ray cluster at {address} cannot be used: {lines[-1]}; {_HINT}")


def _check_port(address: str, deadline_seconds: float) -> None:
    """Check that a server listens at an address; raises a TransportError if not.

    The check fails immediately if there is none. An address without host and port is not checked.
    """
    # A cluster's address may have a path, and ray:// before it.
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        return
    # The brackets around an IPv6 address are part of the notation only.
    bare_host = host.removeprefix("[").removesuffix("]")
    try:
        socket.create_connection((bare_host, int(port)), deadline_seconds).close()
    except OSError as error:
        raise TransportError(f"no Ray cluster at {address}: {error}; {_HINT}") from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM afterwards."""
    # Only the main thread can set handlers; this also holds for Ray.
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
    """Change to a folder, and return to the previous one afterwards."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes that Ray starts, where the user has not set them."""
    # A value that the user has set stays.
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
