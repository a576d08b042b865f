"""Write figures, verdicts and times as the cells of a table."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from reproduction.experiment import Claim
from reproduction.figures import ClaimResult, Figure, mean_and_spread
from reproduction.measures import measure_named

MISSING = "-"
"""The cell where there is no figure."""

_NOT_REACHED = "not reached"


def figure_cells(figure: Figure) -> dict[str, str]:
    """Return the cells of a figure by column."""
    digits = _digits(figure)
    measure = figure.measure
    deciding = figure.by_seed("deciding")
    best = figure.by_seed("best").values()
    last = figure.by_seed("last").values()
    title = measure.title
    if measure.unit:
        title = f"{title}, {measure.unit}"
    return {
        "arm": figure.arm.name,
        "figure": title,
        "published": _published(figure, digits),
        "ours": _mean(deciding.values(), digits),
        "by seed": _seeds(deciding, digits),
        "best round": _mean(best, digits),
        "last round": MISSING if None in last else _mean(last, digits),
    }


def _digits(figure: Figure) -> int:
    measure = figure.measure
    if measure.unit == "h":
        return 3
    if measure.name == "rounds":
        return 0
    return 2


def _published(figure: Figure, digits: int) -> str:
    published = figure.published
    if published is None:
        return MISSING
    places = min(digits, 2)
    text = f"{published.value:.{places}f}"
    if published.spread is None:
        return text
    return f"{text} ± {published.spread:.2f}"


def claim_cells(result: ClaimResult) -> dict[str, str]:
    """Return the cells of a claim or comparison with its verdict, by column."""
    claim = result.claim
    best, _ = mean_and_spread(result.best.values(), claim.how)
    seeds = _seeds(result.by_seed, 2, signed=_signed(claim), bounds=result.bounds)
    return {
        "claim": claim.says or comparison_text(claim),
        "verdict": result.verdict or MISSING,
        "wanted": _bounds(claim),
        "ours, 95 %": _interval(result),
        "by seed": seeds + _lacking(result) or MISSING,
        "best round": _number(best, claim),
        "published": _number(result.published, claim),
    }


def comparison_text(claim: Claim) -> str:
    """Name the arms that are compared, and the measure."""
    title = measure_named(claim.measure).title
    if not claim.right:
        return f"{claim.left}, {title}"
    sign = "/" if claim.how == "over" else "-"
    return f"{claim.left} {sign} {claim.right}, {title}"


def table_text(rows: Sequence[Mapping[str, str]]) -> str:
    """Write rows, of which there is at least one, as a table in Markdown."""
    columns = rows[0]
    rule = ["---"] * len(columns)
    lines = [_line(columns), _line(rule)]
    for row in rows:
        lines.append(_line(row.values()))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    joined = " | ".join(escaped)
    return f"| {joined} |"


def duration_text(seconds: float | None) -> str:
    """Write a time in seconds, minutes or hours; None is unknown."""
    if seconds is None:
        return "unknown"
    minutes = seconds / 60
    hours = seconds / 3600
    if minutes < 1:
        return f"{seconds:.1f} s"
    if minutes < 90:
        return f"{minutes:.1f} min"
    return f"{hours:.2f} h"


def _interval(result: ClaimResult) -> str:
    if not result.by_seed:
        return MISSING
    if None in result.by_seed.values():
        return _NOT_REACHED
    if result.interval is None:
        (value,) = result.by_seed.values()
        return f"{_number(value, result.claim)}, one seed"
    mean, low, high = result.interval
    ends = [_number(low, result.claim), _number(high, result.claim)]
    return f"{_number(mean, result.claim)} [{', '.join(ends)}]"


def _signed(claim: Claim) -> bool:
    return claim.how == "minus" and bool(claim.right)


def _number(value: float | None, claim: Claim) -> str:
    if value is None:
        return MISSING
    if _signed(claim):
        return f"{value:+.2f}"
    return f"{value:.2f}"


def _bounds(claim: Claim) -> str:
    bounds: list[str] = []
    if claim.at_least is not None:
        bounds.append(f"> {claim.at_least:g}")
    if claim.at_most is not None:
        bounds.append(f"< {claim.at_most:g}")
    return " and ".join(bounds) or MISSING


def _seeds(
    by_seed: Mapping[int, float | None],
    digits: int,
    *,
    signed: bool = False,
    bounds: Mapping[int, str] | None = None,
) -> str:
    sign = "+" if signed else ""
    form = f"{sign}.{digits}f"
    seeds: list[str] = []
    for seed, value in by_seed.items():
        text = _NOT_REACHED
        if value is not None:
            text = format(value, form)
        elif bounds is not None:
            text = bounds.get(seed, _NOT_REACHED)
        seeds.append(f"{seed}: {text}")
    return ", ".join(seeds)


def _lacking(result: ClaimResult) -> str:
    """Return the end of a cell, which names the stated seeds that were not run."""
    text = ""
    if result.by_seed:
        for seed in result.lacking:
            text += f", {seed}: not run"
    return text


def _mean(values: Collection[float | None], digits: int) -> str:
    mean, spread = mean_and_spread(values)
    if mean is None:
        return _NOT_REACHED
    text = f"{mean:.{digits}f}"
    if spread is None:
        return text
    places = max(digits, 1)
    return f"{text} ± {spread:.{places}f}"
