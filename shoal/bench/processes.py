"""The processes that hold a benchmark's devices.

Each runs a swarm until its standard input closes, then prints its byte counts. Run as a module:
``python -m shoal.bench.processes <light|bare> <fleet> <broker url> <first> <stop>``.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from fleet_protocol.child_process import (
    END_SECONDS,
    ChildProcess,
    python_module,
    when_parent_ends,
)
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.bare import bare_client
from shoal.bench.light_device import light_client
from shoal.bench.swarm import Swarm, SwarmClient


def device_name(index: int) -> str:
    """Return the name of a device of a benchmark."""
    return f"light-{index:05d}"


@contextlib.contextmanager
def device_processes(
    kind: str,
    fleet: str,
    broker: str,
    devices: int,
    processes: int,
) -> Iterator[Counter[str]]:
    """Run devices in processes that live as long as the context.

    Args:
        kind: ``light``, or ``bare`` for those of the baseline.
        fleet: name of the fleet.
        broker: its URL.
        devices: number of devices.
        processes: number of processes.

    Yields:
        A mapping that is filled when the context ends: the bytes of payloads and topics that the
        devices exchanged, by kind of topic and direction.
    """
    exchanged: Counter[str] = Counter()
    # The numbers of devices of two processes differ by at most one.
    bounds = [devices * index // processes for index in range(processes + 1)]
    children: list[ChildProcess] = []
    for first, stop in pairwise(bounds):
        command = python_module("shoal.bench.processes", kind, fleet, broker, str(first), str(stop))
        children.append(ChildProcess(command, output=subprocess.PIPE))
    try:
        yield exchanged
    finally:
        for child in children:
            output = _end(child)
            if output:
                exchanged.update(json.loads(output))


def _end(child: ChildProcess) -> bytes:
    """End a child, and return what it printed; empty if it had to be killed."""
    try:
        output, _ = child.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        # Without a grace period: it has had one already.
        child.end(0)
        return b""
    return output


def _client(
    kind: str,
    topics: Topics,
    index: int,
    whole: dict[str, bytes],
) -> SwarmClient:
    name = device_name(index)
    return light_client(topics, name, whole) if kind == "light" else bare_client(topics, name)


def _main(
    kind: str,
    fleet: str,
    broker: str,
    first: str,
    stop: str,
) -> None:
    ended = threading.Event()
    # Standard input also closes if the parent is killed.
    when_parent_ends(ended.set)
    topics = Topics(fleet)
    whole: dict[str, bytes] = {}  # one copy of each blob for all devices of this process
    clients = [_client(kind, topics, index, whole) for index in range(int(first), int(stop))]
    Swarm(clients, BrokerAddress.parse(broker)).run(ended.is_set)
    exchanged: Counter[str] = Counter()
    for client in clients:
        exchanged.update(client.bytes_by_kind)
    print(json.dumps(exchanged))


if __name__ == "__main__":
    _main(*sys.argv[1:])
