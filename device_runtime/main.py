"""Runs a device from its configuration file.

The entry point of the command line and of ``python -m device_runtime``.
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
from device_runtime.predictions.measuring_exits import measure_exits
from device_runtime.predictions.own_weights import write_board_weights
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
        enrolment: the board's enrolment, instead of the one that the file names.
        level: level of the least important log lines to write.

    Returns:
        0 after a clean stop, 75 if another runtime must start, else the error's code
        (`fleet_protocol.errors`).
    """
    log_to_stderr(level, _FORMAT)
    try:
        return _run_agents(config_path, enrolment)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        # If a new release cannot read something, the previous one could.
        return RESTART if on_trial() else error.exit_code


def _run_agents(config_path: Path, enrolment: Path | None) -> int:
    """Run an agent, and start another one whenever it ends because of a new enrolment."""
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
    confidence: float | None = None,
) -> int:
    """Print the model's predictions for the samples in `data`, as lines or as JSON.

    With a `confidence` a sample leaves at the first exit that reaches it; by default that of
    ``[predict]``. The exit codes are those of `run_device`.
    """
    try:
        config = load_device_config(config_path, enrolment)
        if confidence is None and config.predict is not None:
            confidence = config.predict.confidence
        model, rows = predict(config, data, confidence)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return error.exit_code
    print_predictions(model, rows, as_json=as_json)
    return 0


def print_exits(config_path: Path, enrolment: Path | None = None, *, as_json: bool = False) -> int:
    """Print what leaving the board's model at its exits costs and saves, as lines or as JSON.

    The exit codes are those of `run_device`.
    """
    try:
        figures = measure_exits(load_device_config(config_path, enrolment))
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return error.exit_code
    if as_json:
        print_line(json.dumps([asdict(figure) for figure in figures]))
        return 0
    for figure in figures:
        print_line(figure.text)
    return 0


def export_board_weights(
    config_path: Path, out: Path, enrolment: Path | None = None, *, fleet_only: bool = False
) -> int:
    """Write the board's model into a file, and print which model it is.

    The exit codes are those of `run_device`.
    """
    try:
        config = load_device_config(config_path, enrolment)
        model = write_board_weights(config, out, fleet_only=fleet_only)
    except ShoalError as error:
        print_line(f"error: {error}", error=True)
        return error.exit_code
    described = ", ".join(f"{name} {value}" for name, value in model.items())
    print_line(f"{out}: {described}")
    return 0


def examine_device(
    config_path: Path, enrolment: Path | None = None, *, as_json: bool = False
) -> int:
    """Print a finding for each check of the board; return the exit code of the first failure.

    Lines are printed one by one, as soon as they are available; JSON is printed at the end.
    """
    # The link's log lines about the broker appear as findings.
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
    """Run the command line of a board that lacks the ``shoal`` command's packages.

    Args:
        arguments: by default those of the process; a leading ``device``, which ``shoal`` requires,
            may be omitted.

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
        return predict_file(
            options.config,
            options.data,
            options.enrolment,
            as_json=options.json,
            confidence=options.confidence,
        )
    if options.command == "exits":
        return print_exits(options.config, options.enrolment, as_json=options.json)
    if options.command == "export-weights":
        return export_board_weights(
            options.config, options.out, options.enrolment, fleet_only=options.fleet_only
        )
    return examine_device(options.config, options.enrolment, as_json=options.json)


def _level(options: argparse.Namespace) -> int:
    if options.quiet:
        return logging.WARNING
    return logging.DEBUG if options.verbose else logging.INFO


def _parser() -> argparse.ArgumentParser:
    # Not with typer, which a board may lack.
    parser = argparse.ArgumentParser(
        prog="shoal device", description="Run this board as a device of a Shoal fleet."
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "doctor", "predict", "exits", "export-weights"),
        default="run",
        help="run (the default), doctor, predict, exits or export-weights",
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
        "--confidence",
        type=float,
        help="predict: leave a model with exits at the first exit that is as sure as this",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("weights.safetensors"),
        help="export-weights: the file to write",
    )
    parser.add_argument(
        "--fleet-only",
        action="store_true",
        help="export-weights: leave out the private parts of this board",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="predict, exits, doctor: print JSON",
    )
    parser.add_argument(
        "--quiet",
        "-q",
        action="store_true",
        help="run: log only warnings and errors",
    )
    parser.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="run: also log the messages of its packages",
    )
    return parser
