"""Write figures, verdicts and times as the cells of a table."""

from collections.abc import Iterable, Mapping, Sequence

from reproduction.experiment import Claim
from reproduction.figures import ClaimResult, Figure, mean_and_spread
from reproduction.measures import measure_named

MISSING = "-"
"""The cell where there is no figure."""

_NOT_REACHED = "not reached"


def figure_cells(figure: Figure) -> dict[str, str]:
    """Return the cells of a figure by column."""
    digits = _digits(figure)
    deciding = figure.by_seed("deciding")
    best = figure.by_seed("best")
    last = list(figure.by_seed("last").values())
    return {
        "arm": figure.arm.name,
        "figure": f"{figure.measure.title}, {figure.measure.unit}".removesuffix(", "),
        "published": _published(figure, digits),
        "ours": _mean(list(deciding.values()), digits),
        "by seed": _seeds(deciding, digits),
        "best round": _mean(list(best.values()), digits),
        "last round": MISSING if None in last else _mean(last, digits),
    }


def _digits(figure: Figure) -> int:
    if figure.measure.unit == "h":
        return 3
    return 0 if figure.measure.name == "rounds" else 2


def _published(figure: Figure, digits: int) -> str:
    published = figure.published
    if published is None:
        return MISSING
    text = f"{published.value:.{min(digits, 2)}f}"
    if published.spread is None:
        return text
    return f"{text} ± {published.spread:.2f}"


def claim_cells(result: ClaimResult) -> dict[str, str]:
    """Return the cells of a claim or comparison with its verdict, by column."""
    claim = result.claim
    best = mean_and_spread(list(result.best.values()), claim.how)[0]
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
    sign = "/" if claim.how == "over" else "-"
    right = f" {sign} {claim.right}" if claim.right else ""
    return f"{claim.left}{right}, {measure_named(claim.measure).title}"


def table_text(rows: Sequence[Mapping[str, str]]) -> str:
    """Write rows, of which there is at least one, as a table in Markdown."""
    lines = [_line(rows[0]), _line(["---"] * len(rows[0]))]
    lines += [_line(row.values()) for row in rows]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def duration_text(seconds: float | None) -> str:
    """Write a time in seconds, minutes or hours; None is unknown."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _interval(result: ClaimResult) -> str:
    if not result.by_seed:
        return MISSING
    if None in result.by_seed.values():
        return _NOT_REACHED
    if result.interval is None:
        (value,) = result.by_seed.values()
        return f"{_number(value, result.claim)}, one seed"
    mean, low, high = result.interval
    ends = f"{_number(low, result.claim)}, {_number(high, result.claim)}"
    return f"{_number(mean, result.claim)} [{ends}]"


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
    form = f"{'+' if signed else ''}.{digits}f"
    seeds: list[str] = []
    for seed, value in by_seed.items():
        if value is None:
            text = (bounds or {}).get(seed, _NOT_REACHED)
        else:
            text = format(value, form)
        seeds.append(f"{seed}: {text}")
    return ", ".join(seeds)


def _lacking(result: ClaimResult) -> str:
    """Return the end of a cell, which names the stated seeds that were not run."""
    text = ""
    if result.by_seed:
        for seed in result.lacking:
            text += f", {seed}: not run"
    return text


def _mean(values: Sequence[float | None], digits: int) -> str:
    mean, spread = mean_and_spread(values)
    if mean is None:
        return _NOT_REACHED
    text = f"{mean:.{digits}f}"
    if spread is None:
        return text
    return f"{text} ± {spread:.{max(digits, 1)}f}"
