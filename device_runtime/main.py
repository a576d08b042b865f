"""Run a device from its configuration file; the command line's entry, and ``python -m device_runtime``'s."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from device_runtime.agent.loop import Agent
from device_runtime.doctor import examine
from device_runtime.settings import load_device_config
from fleet_protocol.errors import ShoalError

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run_device(config_path: Path, enrolment: Path | None = None) -> int:
    """Be a device until SIGTERM or SIGINT.

    An error that ends the agent is printed in one line on standard error.

    Args:
        config_path: the TOML file.
        enrolment: the board's in an enrolled fleet, instead of the one that the file names.

    Returns:
        0 after a clean stop, else the exit code of the error (see ``fleet_protocol.errors``).
    """
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format=_FORMAT)
    try:
        Agent(load_device_config(config_path, enrolment)).run()
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of a board without the ``shoal`` command's packages; returns its exit code.

    Args:
        arguments: without the program's name; by default those of the process. ``device`` in front, as ``shoal`` has
            it, may be left out.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="shoal device", description="Be a device of a Shoal fleet.")
    parser.add_argument("command", nargs="?", choices=("run", "doctor"), default="run", help="run, unless it is said")
    parser.add_argument("--config", type=Path, required=True, help="the device's TOML file")
    parser.add_argument("--enrolment", type=Path, help="the file that `shoal enroll` wrote for this board")
    options = parser.parse_args(given[given[:1] == ["device"] :])
    if options.command == "run":
        return run_device(options.config, options.enrolment)
    failures = []
    for finding in examine(options.config, options.enrolment):
        print(f"{finding.level:8} {finding.check:14} {finding.detail}", flush=True)
        failures += [finding.exit_code] if finding.level == "failed" else []
    return failures[0] if failures else 0
