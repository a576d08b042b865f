"""Run the agent on this board, look what ails it, or let its model predict."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson
from shoal.cli.extras import needs

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Enrolment = Annotated[Path | None, typer.Option(help="The file that `shoal enroll` wrote for this board.")]


@app.command("run")
def _run(
    config: Annotated[Path, typer.Option(help="The board's configuration, device.toml.")],
    enrolment: Enrolment = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and errors alone.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every event in a line of its own.")] = False,
) -> None:
    """Connect to the fleet's broker and train what the server asks for, until stopped.

    On a terminal one line shows what the board does; elsewhere every event is a line on standard error.
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
    config: Annotated[Path, typer.Option(help="The board's configuration, device.toml.")] = Path("device.toml"),
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Let this board's model judge samples: its own, or the newest that the fleet sent; no network is needed."""
    with needs("device"):
        from device_runtime.main import predict_file

    sys.exit(predict_file(config, data, enrolment, as_json=as_json))


@app.command("doctor")
def _doctor(
    config: Annotated[Path, typer.Option(help="The board's configuration, device.toml.")] = Path("device.toml"),
    enrolment: Enrolment = None,
    as_json: AsJson = False,
) -> None:
    """Look at all that may keep this board from training, and say what to do.

    Ends with 0 unless something failed; then with the exit code of the first failure.
    """
    from dataclasses import asdict

    from device_runtime.doctor import examine
    from shoal.cli.console import output_console, print_json

    console, findings = output_console(), []
    for finding in examine(config, enrolment):
        findings.append(finding)
        if not as_json:
            colour = {"ok": "green", "warning": "yellow", "failed": "bold red"}[finding.level]
            console.print(f"[{colour}]{finding.level:8}[/] {finding.check:14} ", end="", highlight=False)
            console.print(finding.detail, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    sys.exit(next((finding.exit_code for finding in findings if finding.level == "failed"), 0))
