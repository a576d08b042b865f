"""How figures, comparisons and times read in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reproduction.figures import Figure, mean_and_spread
from reproduction.measures import Measure
from reproduction.tables.published import Published

__all__ = [
    "MISSING",
    "bound_text",
    "duration_text",
    "figure_cells",
    "mean_signed",
    "measure_title",
    "seeds_text",
    "signed_text",
    "table_text",
]

MISSING = "-"
"""What stands where there is no figure."""

_NOT_REACHED = "not reached"


def figure_cells(figure: Figure) -> dict[str, str]:
    """A figure as cells by column."""
    best, last = list(figure.best.values()), list(figure.last.values())
    return {
        "arm": figure.arm.name,
        "what it is": figure.arm.about,
        "figure": measure_title(figure.measure),
        "published": _published(figure.published, figure.measure),
        "ours, best round": _mean(best, figure.measure),
        "by seed": seeds_text({seed: _value(value, figure.measure) for seed, value in figure.best.items()}),
        "ours, last round": MISSING if None in last else _mean(last, figure.measure),
    }


def table_text(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    Args:
        head: titles of the columns.
        rows: cells, as many as there are columns.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def measure_title(measure: Measure) -> str:
    """Title and unit of a measure."""
    return f"{measure.title}, {measure.unit}" if measure.unit else measure.title


def seeds_text(by_seed: Mapping[int, str]) -> str:
    """Texts of several seeds."""
    return ", ".join(f"{seed}: {text}" for seed, text in by_seed.items())


def signed_text(value: float | None, *, ratio: bool) -> str:
    """A difference with its sign, or a ratio."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if ratio else f"{value:+.2f}"


def mean_signed(values: Sequence[float | None], *, ratio: bool) -> str:
    """Mean and spread of differences or ratios."""
    mean, spread = mean_and_spread(values)
    return signed_text(mean, ratio=ratio) + ("" if spread is None else f" ± {spread:.2f}")


def bound_text(at_least: float | None, at_most: float | None) -> str:
    """What a comparison must lie between."""
    words = ([f">= {at_least:g}"] if at_least is not None else []) + (
        [f"<= {at_most:g}"] if at_most is not None else []
    )
    return " and ".join(words) or MISSING


def duration_text(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _digits(measure: Measure) -> int:
    return {"h": 3, "%": 2}.get(measure.unit, 0 if measure.name == "rounds" else 2)


def _value(value: float | None, measure: Measure) -> str:
    return _NOT_REACHED if value is None else f"{value:.{_digits(measure)}f}"


def _published(figure: Published | None, measure: Measure) -> str:
    if figure is None:
        return MISSING
    spread = "" if figure.spread is None else f" ± {figure.spread:.2f}"
    return f"{figure.value:.{min(_digits(measure), 2)}f}{spread}"


def _mean(values: Sequence[float | None], measure: Measure) -> str:
    mean, spread = mean_and_spread(values)
    if mean is None:
        return _NOT_REACHED
    return _value(mean, measure) + ("" if spread is None else f" ± {spread:.{max(_digits(measure), 1)}f}")
