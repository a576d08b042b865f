"""The processes that hold a bench's devices: each runs a swarm until its standard input closes, then tells its bytes.

Run as a module: ``python -m shoal.bench.processes <light|bare> <fleet> <broker url> <first> <stop>``.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from fleet_protocol.child_process import python_module
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.bare import bare_member
from shoal.bench.light_device import light_member
from shoal.bench.swarm import Swarm

_END_SECONDS = 10.0


def device_name(index: int) -> str:
    """Name of a device of a bench."""
    return f"light-{index:05d}"


class DeviceProcesses:
    """Processes that hold devices.

    Attributes:
        bytes_by_kind: payload and topic bytes that the devices exchanged, by kind of topic and way; known at the end.
        cpu_seconds: of the processes; known at the end.
    """

    def __init__(self) -> None:
        self.bytes_by_kind: Counter[str] = Counter()
        self.cpu_seconds = 0.0


@contextlib.contextmanager
def device_processes(kind: str, fleet: str, broker: str, devices: int, processes: int) -> Iterator[DeviceProcesses]:
    """Devices that live as long as the context.

    Args:
        kind: ``light`` or ``bare``.
        fleet: name of the fleet.
        broker: its address.
        devices: how many.
        processes: to spread them over.
    """
    found = DeviceProcesses()
    bounds = [devices * index // processes for index in range(processes + 1)]
    children = [
        subprocess.Popen(  # noqa: S603  (our own module, arguments are ours)
            python_module("shoal.bench.processes", kind, fleet, broker, str(first), str(stop)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for first, stop in pairwise(bounds)
    ]
    try:
        yield found
    finally:
        for child in children:
            try:
                output, _ = child.communicate(b"", timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.communicate()
            if output:
                told = json.loads(output)
                found.bytes_by_kind.update(told["bytes"])
                found.cpu_seconds += told["cpu_seconds"]


def _main(kind: str, fleet: str, broker: str, first: str, stop: str) -> None:
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()  # ends when the parent closes the pipe, by intention or by dying
        ended.set()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    topics, whole = Topics(fleet), dict[str, bytes]()
    names = [device_name(index) for index in range(int(first), int(stop))]
    members = [light_member(topics, name, whole) if kind == "light" else bare_member(topics, name) for name in names]
    Swarm(members, BrokerAddress.parse(broker)).run(ended.is_set)
    count: Counter[str] = Counter()
    for member in members:
        count.update(member.bytes_by_kind)
    print(json.dumps({"bytes": count, "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
