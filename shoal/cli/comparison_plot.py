"""Plots the scores of the versions of several runs over their rounds."""

from collections.abc import Sequence
from pathlib import Path

from fleet_protocol.errors import ConfigError
from shoal.cli.views.comparison import ComparedRun, name_of_scores
from simulation.results.figures import COLOURS, LINES, add_legend, new_figure, save, tick_rounds

_FORMATS = (".png", ".svg", ".pdf")


def require_format(path: Path) -> None:
    """Raise a ConfigError if the file name has no extension of a picture."""
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--plot {path}: the name must end with {', '.join(_FORMATS)}")


def plot_runs(runs: Sequence[ComparedRun], path: Path) -> Path:
    """Write a picture with a curve for each run, and return its path.

    Raises:
        ConfigError: no version was evaluated.
        StorageError: the file cannot be written.
    """
    if not any(run.scores for run in runs):
        raise ConfigError(
            "--plot: no version of these runs was evaluated, so there is nothing to plot"
        )
    figure, (axes,) = new_figure("")
    lines = []
    for position, run in enumerate(runs):
        rounds = []
        scores = []
        for version, score in run.scores.items():
            if score is not None:
                rounds.append(run.rounds[version])
                scores.append(score)
        # More runs than colours or line styles repeat them, but rarely the same pair.
        colour = COLOURS[position % len(COLOURS)]
        style = LINES[position % len(LINES)]
        lines += axes.plot(rounds, scores, style, color=colour)
    axes.set_xlabel("round")
    axes.set_ylabel(name_of_scores(runs))
    tick_rounds(axes)
    add_legend(axes, lines, [run.label for run in runs], title=None)
    return save(figure, path)
