"""The processes that hold a bench's devices: each runs a swarm until its standard input closes, then tells its bytes.

Run as a module: ``python -m shoal.bench.processes <light|bare> <fleet> <broker url> <first> <stop>``.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from fleet_protocol.child_process import python_module, when_parent_ends
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from shoal.bench.bare import bare_member
from shoal.bench.light_device import light_member
from shoal.bench.swarm import Swarm

_END_SECONDS = 10.0


def device_name(index: int) -> str:
    """Name of a device of a bench."""
    return f"light-{index:05d}"


@contextlib.contextmanager
def device_processes(kind: str, fleet: str, broker: str, devices: int, processes: int) -> Iterator[Counter[str]]:
    """Devices, ``light`` ones or those of the baseline, in processes that live as long as the context.

    At its end it has the bytes of payloads and topics that they exchanged, by kind of topic and way.
    """
    exchanged: Counter[str] = Counter()
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
        yield exchanged
    finally:
        for child in children:
            try:
                output, _ = child.communicate(b"", timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.communicate()
            if output:
                exchanged.update(json.loads(output))


def _main(kind: str, fleet: str, broker: str, first: str, stop: str) -> None:
    ended = threading.Event()
    when_parent_ends(ended.set)
    topics, whole = Topics(fleet), dict[str, bytes]()
    names = [device_name(index) for index in range(int(first), int(stop))]
    members = [light_member(topics, name, whole) if kind == "light" else bare_member(topics, name) for name in names]
    Swarm(members, BrokerAddress.parse(broker)).run(ended.is_set)
    count: Counter[str] = Counter()
    for member in members:
        count.update(member.bytes_by_kind)
    print(json.dumps(count))


if __name__ == "__main__":
    _main(*sys.argv[1:])
