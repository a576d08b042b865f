"""Run a device from its configuration file.

The command line's entry, and ``python -m device_runtime``'s.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from device_runtime.agent.loop import Agent
from device_runtime.agent.releases import RESTART, on_trial
from device_runtime.doctor import examine
from device_runtime.predicting import predict
from device_runtime.settings import load_device_config
from fleet_protocol.data.samples import print_predictions
from fleet_protocol.errors import ShoalError
from fleet_protocol.logs import log_to_stderr, print_line

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run_device(config_path: Path, enrolment: Path | None = None, level: int = logging.INFO) -> int:
    """Be a device until SIGTERM or SIGINT.

    An error that ends the agent is printed in one line on standard error.

    Returns 0 after a clean stop, 75 for another runtime to start, else the error's code
    (`fleet_protocol.errors`).
    """
    log_to_stderr(level, _FORMAT)
    try:
        return Agent(load_device_config(config_path, enrolment)).run()
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return (
            RESTART if on_trial() else error.exit_code
        )  # whatever a release cannot read, the one before could


def predict_file(
    config_path: Path,
    data: Path,
    enrolment: Path | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Print what the board's model says of the samples in `data`, as lines or as JSON.

    Errors as of `run_device`.
    """
    try:
        model, rows = predict(load_device_config(config_path, enrolment), data)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return error.exit_code
    print_predictions(model, rows, as_json=as_json)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of a board without the ``shoal`` command's packages; returns its exit code.

    The arguments are by default those of the process; ``device`` in front, as ``shoal`` has it, may
    be left out.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="shoal device", description="Be a device of a Shoal fleet."
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "doctor", "predict"),
        default="run",
        help="run, unless it is said",
    )
    parser.add_argument("--config", type=Path, required=True, help="the device's TOML file")
    parser.add_argument(
        "--enrolment",
        type=Path,
        help="the file that `shoal enroll` wrote for this board",
    )
    parser.add_argument(
        "--data", type=Path, help="predict: the samples, .npz, .npy, .csv or an image"
    )
    parser.add_argument("--json", action="store_true", help="predict, doctor: print JSON")
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="run: log warnings and errors alone"
    )
    parser.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="run: log what its packages say, too",
    )
    options = parser.parse_args(given[given[:1] == ["device"] :])
    if options.command == "run":
        level = (
            logging.WARNING if options.quiet else logging.DEBUG if options.verbose else logging.INFO
        )
        return run_device(options.config, options.enrolment, level)
    if options.command == "predict":
        if options.data is None:
            parser.error("predict needs --data")
        return predict_file(options.config, options.data, options.enrolment, as_json=options.json)
    findings = []
    for finding in examine(options.config, options.enrolment):
        findings.append(finding)
        if not options.json:
            print_line(f"{finding.level:8} {finding.check:14} {finding.detail}")
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return next((finding.exit_code for finding in findings if finding.level == "failed"), 0)
