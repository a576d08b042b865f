"""Train a small fleet on this machine, compare it with its baselines, and write a report.

Example: shoal demo --rounds 5
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_protocol.errors import ConfigError
from shoal.cli.grouped import grouped
from shoal.extras import needs

if TYPE_CHECKING:
    from shoal.cli.demo import DemoConfig, Preset


@dataclass(frozen=True)
class _Options:
    data: Annotated[
        str, typer.Option(help="Data set: digits, or mnist from the folder that SHOAL_DATA names.")
    ] = "digits"
    seed: Annotated[int | None, typer.Option(min=0, help="Seed; overrides the preset's.")] = None
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; overrides the preset's.")
    ] = None
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs; overrides the preset's.")
    ] = None
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices; overrides the preset's.")
    ] = None
    widths: Annotated[
        str | None,
        typer.Option(help="Widths of the tiers, for example 1,0.5,1/8; overrides the preset's."),
    ] = None
    baselines: Annotated[
        bool | None, typer.Option(help="Also run the baselines AllSmall and Exclusive.")
    ] = None
    broker: Annotated[
        str, typer.Option(help="Broker: embedded, or mqtt://host:port of a running broker.")
    ] = "embedded"
    config: Annotated[
        Path | None, typer.Option(help="Preset file, in the form of shoal/cli/demo.toml.")
    ] = None
    runs: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs")


@grouped(_Options)
def _demo(options: _Options) -> None:
    with needs("demo"):
        from shoal.cli.demo import read_demos, run_demo

    demos = read_demos(options.config)
    preset = _changed(demos, options)
    run_demo(
        options.data,
        preset,
        demos.seed if options.seed is None else options.seed,
        options.runs,
        options.broker,
    )


def _changed(demos: "DemoConfig", options: _Options) -> "Preset":
    from shoal.cli.options import parse_floats

    choices = {"digits": demos.digits, "mnist": demos.mnist}
    if options.data not in choices:
        raise ConfigError(f"--data: no demo {options.data!r}; there are {', '.join(choices)}")
    # An option that is not given leaves the preset's value.
    changes: dict[str, Any] = {
        name: value
        for name in ("rounds", "epochs", "devices", "baselines")
        if (value := getattr(options, name)) is not None
    }
    if options.widths is not None:
        # The widest first, as `Preset.width_of` needs them.
        changes["widths"] = tuple(sorted(parse_floats("--widths", options.widths), reverse=True))
    return choices[options.data].model_copy(update=changes)
