"""Run the agent on this board, diagnose the board, use its model, or measure training.

Example: shoal device run
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import DEVICE_FILE, AsJson
from shoal.extras import needs

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

DeviceFile = Annotated[Path, typer.Option("--config", help="Configuration file of the board.")]
Enrolment = Annotated[
    Path | None, typer.Option(help="Enrolment file that `shoal enroll` wrote for this board.")
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
        typer.Option("--verbose", "-v", help="Log each event on its own line."),
    ] = False,
) -> None:
    """Connect to the fleet's broker and do training tasks for the server until stopped.

    On a terminal, one line shows the current state; otherwise the agent logs each event to standard
    error.

    Example: shoal device run --config device.toml
    """
    with needs("device"):
        from device_runtime.main import run_device
    from shoal.cli.live_log import shown

    with shown("shoal.device", quiet=quiet, lines=verbose):
        code = run_device(config, enrolment)
    # Behind the block, which removes the status line.
    sys.exit(code)


@app.command("predict")
def _predict(
    data: Annotated[Path, typer.Option(help="Samples: a .npz, .npy or .csv file, or an image.")],
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    as_json: AsJson = False,
    confidence: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="In a model with exits, stop at the first exit whose largest probability is at"
            " least this number.",
        ),
    ] = None,
) -> None:
    """Get predictions from this board's personal model, or else from the fleet's newest model.

    No network is needed.

    Example: shoal device predict --data image.png
    """
    with needs("device"):
        from device_runtime.main import predict_file

    code = predict_file(config, data, enrolment, as_json=as_json, confidence=confidence)
    sys.exit(code)


@app.command("exits")
def _exits(
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Measure what early exits cost and save, on this board's held-out samples.

    Each line has a value for `shoal device predict --confidence`, the accuracy, and the time per
    sample. For each exit, the line also shows the share of samples that leave there, and their
    accuracy.

    Example: shoal device exits
    """
    with needs("device"):
        from device_runtime.main import print_exits

    sys.exit(print_exits(config, enrolment, as_json=as_json))


@app.command("export-weights")
def _export_weights(
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("weights.safetensors"),
    fleet_only: Annotated[
        bool,
        typer.Option("--fleet-only", help="Omit this board's private parts."),
    ] = False,
) -> None:
    """Write this board's model, including its private parts, to a safetensors file.

    No server has the private parts. No network is needed, and nothing is sent.

    Example: shoal device export-weights --out board.safetensors
    """
    with needs("device"):
        from device_runtime.main import export_board_weights

    sys.exit(export_board_weights(config, out, enrolment, fleet_only=fleet_only))


@app.command("doctor")
def _doctor(
    config: DeviceFile = DEVICE_FILE,
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Check everything that can prevent this board from training, and suggest remedies.

    The exit code is 0, or the exit code of the first failure.

    Example: shoal device doctor
    """
    from dataclasses import asdict

    from device_runtime.doctor import examine
    from shoal.cli.console import output_console, print_json

    console = output_console()
    findings = []
    # Printed as they arrive, because some checks take seconds.
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
    # The first failure is usually the cause of the later ones.
    sys.exit(next((finding.exit_code for finding in findings if finding.level == "failed"), 0))


@app.command("bench")
def _bench(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of artifact sets that `shoal export` wrote; by default, a small"
            " built-in model."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of training on this board, and print a Markdown row for each artifact set.

    Times are processor times of one thread, except for `wall`. No network is needed.

    Example: shoal device bench artifacts/conv
    """
    from dataclasses import asdict

    with needs("device"):
        from device_runtime.bench import SMALL, board_line, costs
    from shoal.cli.console import print_json, print_text

    # A generator: rows appear while the next set is measured, as a board may take minutes for each.
    measured_costs = costs(folder or SMALL, batch)
    if as_json:
        print_json([{"board": board_line(), **asdict(cost)} for cost in measured_costs])
        return
    for number, cost in enumerate(measured_costs):
        # The headings come with the first row, so that none stand above an error.
        if not number:
            print_text(f"{board_line()}\n")
            print_text(
                "| set | batch | step, ms (quartiles) | wall, ms | opens, ms | again, ms | start, "
                "s | MB | loss |"
            )
            print_text("|---|---|---|---|---|---|---|---|---|")
        step = (
            f"{cost.step_ms:.3f} ({cost.step_low_ms:.3f} to {cost.step_high_ms:.3f}) | "
            f"{cost.wall_ms:.3f}"
        )
        start = f"{cost.opens_ms:.1f} | {cost.opens_again_ms:.1f} | {cost.first_step_seconds:.2f}"
        name = f"{cost.arch} {cost.tier}"
        print_text(
            f"| {name} | {cost.batch} | {step} | {start} | {cost.peak_mb:.0f} | {cost.loss:.4f} |"
        )
