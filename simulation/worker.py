"""A worker process of the local engine: ``python -m simulation.worker``.

Reads one line of `WorkerSetup`, then `WorkOrder`s, a line each, from standard input; writes
`Finished` and `Failed` lines to standard output. It exits when its input ends, which also happens
if the simulation dies.
"""

import contextlib
import os
import sys

from fleet_protocol.errors import ShoalError
from simulation.orders import Failed, WorkerSetup, WorkOrder
from simulation.virtual_device import VirtualDevices


def main() -> int:
    """Process orders until the input ends."""
    # Output of libraries must not mix with the results.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    source = sys.stdin.buffer
    devices: VirtualDevices | None = None
    setup = WorkerSetup.model_validate_json(source.readline())
    for line in source:
        order = WorkOrder.model_validate_json(line)
        try:
            devices = devices or VirtualDevices(setup)
            answers = devices.work(order)
        except ShoalError as error:
            answers = []
            for task in order.tasks:
                detail = str(error)
                answers.append(Failed(task=task.id, detail=detail, exit_code=error.exit_code))
        for result in answers:
            results.write(result.model_dump_json().encode() + b"\n")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        sys.exit(main())
