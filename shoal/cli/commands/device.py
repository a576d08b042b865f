"""Run the agent on this board, diagnose it, predict with its model, or measure training.

Example: shoal device run
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import DEVICE_FILE, AsJson
from shoal.extras import needs

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

DeviceFile = Annotated[Path, typer.Option("--config", help="The board's configuration.")]
Enrolment = Annotated[
    Path | None, typer.Option(help="The file that `shoal enroll` wrote for this board.")
]


@app.command("run")
def _run(
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only warnings and errors.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Log each event in its own line."),
    ] = False,
) -> None:
    """Connect to the fleet's broker and train tasks of the server, until stopped.

    On a terminal one line shows the current state; elsewhere the agent logs each event to standard
    error.

    Example: shoal device run --config device.toml
    """
    with needs("device"):
        from device_runtime.main import run_device
    from shoal.cli.live_log import shown

    with shown("shoal.device", quiet=quiet, lines=verbose):
        code = run_device(config, enrolment)
    sys.exit(code)


@app.command("predict")
def _predict(
    data: Annotated[Path, typer.Option(help="The samples: .npz, .npy, .csv or an image.")],
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Predict samples with this board's model: its own, or the newest that the fleet sent.

    No network is needed.

    Example: shoal device predict --data image.png
    """
    with needs("device"):
        from device_runtime.main import predict_file

    sys.exit(predict_file(config, data, enrolment, as_json=as_json))


@app.command("doctor")
def _doctor(
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Examine everything that can keep this board from training, and name the remedies.

    The exit code is 0, or that of the first failure.

    Example: shoal device doctor
    """
    from dataclasses import asdict

    from device_runtime.doctor import examine
    from shoal.cli.console import output_console, print_json

    console = output_console()
    findings = []
    for finding in examine(config, enrolment):
        findings.append(finding)
        if not as_json:
            colour = {"ok": "green", "warning": "yellow", "failed": "bold red"}[finding.level]
            console.print(
                f"[{colour}]{finding.level:8}[/] {finding.check:14} ",
                end="",
                highlight=False,
            )
            console.print(finding.detail, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    sys.exit(next((finding.exit_code for finding in findings if finding.level == "failed"), 0))


@app.command("bench")
def _bench(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Artifact sets, as `shoal export` writes them; by default a small one."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of training on this board, with a row in Markdown for each artifact set.

    Times are processor times of one thread, except `wall`. The command needs no network.

    Example: shoal device bench artifacts/conv
    """
    from dataclasses import asdict

    with needs("device"):
        from device_runtime.bench import SMALL, board_line, costs
    from shoal.cli.console import print_json, say

    measured_costs = costs(folder or SMALL, batch)
    if as_json:
        print_json([{"board": board_line(), **asdict(cost)} for cost in measured_costs])
        return
    for number, cost in enumerate(measured_costs):
        if not number:
            say(f"{board_line()}\n")
            say(
                "| set | batch | step, ms (quartiles) | wall, ms | opens, ms | again, ms | start, "
                "s | MB | loss |"
            )
            say("|---|---|---|---|---|---|---|---|---|")
        step = (
            f"{cost.step_ms:.3f} ({cost.step_low_ms:.3f} to {cost.step_high_ms:.3f}) | "
            f"{cost.wall_ms:.3f}"
        )
        start = f"{cost.opens_ms:.1f} | {cost.opens_again_ms:.1f} | {cost.first_step_seconds:.2f}"
        name = f"{cost.arch} {cost.tier}"
        say(f"| {name} | {cost.batch} | {step} | {start} | {cost.peak_mb:.0f} | {cost.loss:.4f} |")
