"""How figures, verdicts and times read in a table."""

from collections.abc import Mapping, Sequence

from reproduction.experiment import Claim
from reproduction.figures import Figure, Judged, mean_and_spread
from reproduction.measures import measure_named

MISSING = "-"
"""What stands where there is no figure."""

_NOT_REACHED = "not reached"


def figure_cells(figure: Figure) -> dict[str, str]:
    """A figure as cells by column."""
    digits = 3 if figure.measure.unit == "h" else 0 if figure.measure.name == "rounds" else 2
    deciding, best, last = (
        list(figure.by_seed(name).values()) for name in ("deciding", "best", "last")
    )
    published = figure.published
    spread = "" if published is None or published.spread is None else f" ± {published.spread:.2f}"
    return {
        "arm": figure.arm.name,
        "figure": f"{figure.measure.title}, {figure.measure.unit}".removesuffix(", "),
        "published": MISSING
        if published is None
        else f"{published.value:.{min(digits, 2)}f}{spread}",
        "ours": _mean(deciding, digits),
        "by seed": _seeds(figure.by_seed("deciding"), digits),
        "best round": _mean(best, digits),
        "last round": MISSING if None in last else _mean(last, digits),
    }


def claim_cells(item: Judged) -> dict[str, str]:
    """A claim or comparison with its verdict, as cells by column."""
    best = mean_and_spread(list(item.best.values()), item.claim.how)[0]
    return {
        "claim": item.claim.says or comparison_text(item.claim),
        "verdict": item.verdict or MISSING,
        "wanted": _bounds(item.claim),
        "ours, 95 %": _interval(item),
        "by seed": _seeds(item.by_seed, 2, signed=_signed(item.claim), bounds=item.bounds)
        + _lacking(item)
        or MISSING,
        "best round": _number(best, item.claim),
        "published": _number(item.published, item.claim),
    }


def comparison_text(claim: Claim) -> str:
    """Which arms are compared, and by what."""
    other = f" {'/' if claim.how == 'over' else '-'} {claim.right}" if claim.right else ""
    return f"{claim.left}{other}, {measure_named(claim.measure).title}"


def table_text(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows, of which there is at least one, as a table in Markdown."""
    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *(list(row.values()) for row in rows),
    ]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def duration_text(seconds: float | None) -> str:
    """A time in seconds, minutes or hours; unknown where it is None."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.2f} h"


def _interval(item: Judged) -> str:
    if not item.by_seed:
        return MISSING
    if None in item.by_seed.values():
        return _NOT_REACHED
    if item.interval is None:
        return f"{_number(next(iter(item.by_seed.values())), item.claim)}, one seed"
    middle, low, high = (_number(value, item.claim) for value in item.interval)
    return f"{middle} [{low}, {high}]"


def _signed(claim: Claim) -> bool:
    return claim.how == "minus" and bool(claim.right)


def _number(value: float | None, claim: Claim) -> str:
    return MISSING if value is None else f"{value:+.2f}" if _signed(claim) else f"{value:.2f}"


def _bounds(claim: Claim) -> str:
    least = [] if claim.at_least is None else [f"> {claim.at_least:g}"]
    return (
        " and ".join(least + ([] if claim.at_most is None else [f"< {claim.at_most:g}"])) or MISSING
    )


def _seeds(
    by_seed: Mapping[int, float | None],
    digits: int,
    *,
    signed: bool = False,
    bounds: Mapping[int, str] | None = None,
) -> str:
    form = f"{'+' if signed else ''}.{digits}f"
    known = bounds or {}
    return ", ".join(
        f"{seed}: {known.get(seed, _NOT_REACHED) if value is None else format(value, form)}"
        for seed, value in by_seed.items()
    )


def _lacking(item: Judged) -> str:
    return "".join(f", {seed}: not run" for seed in item.lacking) if item.by_seed else ""


def _mean(values: Sequence[float | None], digits: int) -> str:
    mean, spread = mean_and_spread(values)
    if mean is None:
        return _NOT_REACHED
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{max(digits, 1)}f}")
