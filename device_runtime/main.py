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
from device_runtime.doctor import Finding, examine
from device_runtime.predictions.predictor import predict
from device_runtime.settings import load_device_config
from fleet_protocol.data.samples import print_predictions
from fleet_protocol.errors import ShoalError
from fleet_protocol.logs import log_to_stderr, print_line

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run_device(config_path: Path, enrolment: Path | None = None, level: int = logging.INFO) -> int:
    """Run a device until SIGTERM or SIGINT.

    An error that ends the agent is printed in one line on standard error.

    Args:
        config_path: the device's TOML file.
        enrolment: the board's, instead of the one that the file names.
        level: least important log lines that are written.

    Returns:
        0 after a clean stop, 75 for another runtime to start, else the error's code
        (`fleet_protocol.errors`).
    """
    log_to_stderr(level, _FORMAT)
    try:
        return _run_agents(config_path, enrolment)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        # Whatever a release cannot read, the one before could.
        return RESTART if on_trial() else error.exit_code


def _run_agents(config_path: Path, enrolment: Path | None) -> int:
    """Run an agent, and another one whenever it has ended because of a new enrolment."""
    while True:
        config = load_device_config(config_path, enrolment)
        agent = Agent(config, config.files(config_path))
        code = agent.run()
        if not agent.begins_anew:
            return code


def predict_file(
    config_path: Path,
    data: Path,
    enrolment: Path | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Print what the board's model predicts for the samples in `data`, as lines or as JSON.

    Exit codes are those of `run_device`.
    """
    try:
        model, rows = predict(load_device_config(config_path, enrolment), data)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return error.exit_code
    print_predictions(model, rows, as_json=as_json)
    return 0


def examine_device(
    config_path: Path, enrolment: Path | None = None, *, as_json: bool = False
) -> int:
    """Print a finding for each check of the board; return the exit code of the first that failed.

    Lines are printed one by one, as soon as they are known; JSON in the end.
    """
    # What the link to the broker logs is a finding.
    logging.basicConfig(handlers=[logging.NullHandler()])
    findings: list[Finding] = []
    for finding in examine(config_path, enrolment):
        findings.append(finding)
        if not as_json:
            print_line(f"{finding.level:8} {finding.check:14} {finding.detail}")
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return next((finding.exit_code for finding in findings if finding.level == "failed"), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a board without the ``shoal`` command's packages.

    Args:
        arguments: by default those of the process; ``device`` in front, as ``shoal`` has it, may be
            left out.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["device"]:
        del words[0]
    parser = _parser()
    options = parser.parse_args(words)
    if options.command == "run":
        return run_device(options.config, options.enrolment, _level(options))
    if options.command == "predict":
        if options.data is None:
            parser.error("predict needs --data")
        return predict_file(options.config, options.data, options.enrolment, as_json=options.json)
    return examine_device(options.config, options.enrolment, as_json=options.json)


def _level(options: argparse.Namespace) -> int:
    if options.quiet:
        return logging.WARNING
    return logging.DEBUG if options.verbose else logging.INFO


def _parser() -> argparse.ArgumentParser:
    # Not with typer, which a board need not have.
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
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="the device's TOML file",
    )
    parser.add_argument(
        "--enrolment",
        type=Path,
        help="the file that `shoal enroll` wrote for this board",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="predict: the samples, .npz, .npy, .csv or an image",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="predict, doctor: print JSON",
    )
    parser.add_argument(
        "--quiet",
        "-q",
        action="store_true",
        help="run: log warnings and errors alone",
    )
    parser.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="run: log what its packages say, too",
    )
    return parser
