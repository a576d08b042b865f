"""Formats figures, verdicts and times as the cells of a table."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean

from reproduction.by_seed import mean_and_spread
from reproduction.claim_result import REPEATED, ClaimResult
from reproduction.experiment import Claim
from reproduction.figures import Figure
from reproduction.measures import measure_named
from reproduction.power import MOST_SEEDS
from reproduction.sizes import Sizes
from reproduction.stored import Row

MISSING = "-"
"""The cell without a figure."""

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
        # A figure without a round, such as a time, has no last value.
        "last round": MISSING if None in last else _mean(last, digits),
    }


def _digits(figure: Figure) -> int:
    measure = figure.measure
    # Simulated hours often differ only in the third digit, and rounds are whole.
    if measure.unit == "h":
        return 3
    if measure.name == "rounds":
        return 0
    return 2


def _published(figure: Figure, digits: int) -> str:
    published = figure.published
    if published is None:
        return MISSING
    # Papers print two decimals at most.
    places = min(digits, 2)
    text = f"{published.value:.{places}f}"
    if published.spread is None:
        return text
    return f"{text} ± {published.spread:.2f}"


def claim_cells(result: ClaimResult) -> dict[str, str]:
    """Return the cells of a claim or comparison with its verdict, by column."""
    claim = result.claim
    best, _ = mean_and_spread(result.best.values(), claim.how)
    seeds = _seeds(
        result.by_seed,
        2,
        signed=_signed(claim),
        bounds=result.bounds,
        censored=result.censored,
    )
    return {
        "claim": claim.says or comparison_text(claim),
        "verdict": result.verdict or MISSING,
        "wanted": _bounds(claim),
        "ours, 95 %": _interval(result),
        "by seed": seeds + _lacking(result) or MISSING,
        "best round": _number(best, claim),
        "published": _number(result.published, claim),
        "needs": _need(result),
    }


def _need(result: ClaimResult) -> str:
    """Write how many seeds would decide a claim, and their time."""
    need = result.need
    if not result.claim.says:
        return MISSING
    if result.verdict == REPEATED:
        return f"see `{result.repeated_in}`"
    # More seeds cannot decide a claim whose runs are too short.
    if result.is_too_short and (need is None or not need.out_of_reach):
        return "longer runs"
    if need is None:
        return MISSING
    size = " at the measured size" if need.is_measured else ""
    if need.seeds is None:
        return f"more than {MOST_SEEDS:,} seeds{size}"
    least = "at least " if need.is_least else ""
    return f"{least}{need.seeds} seeds, {duration_text(need.seconds)}{size}"


def size_cells(rows: Iterable[Row]) -> list[dict[str, str]]:
    """Return the cells of the sizes of each arm whose runs stored them."""
    by_arm: dict[str, dict[int, Sizes]] = {}
    for row in rows:
        # Each figure of a run repeats its sizes; by seed they count once.
        if row.parameters is not None and row.flops is not None:
            sizes = Sizes(parameters=row.parameters, flops=row.flops)
            by_arm.setdefault(row.arm, {})[row.seed] = sizes
    lines: list[dict[str, str]] = []
    for arm, by_seed in by_arm.items():
        parameters = fmean(sizes.parameters for sizes in by_seed.values())
        flops = fmean(sizes.flops for sizes in by_seed.values())
        mean = Sizes(parameters=parameters, flops=flops)
        lines.append(
            {
                "arm": arm,
                "parameters": f"{mean.parameters:,.0f}",
                "FLOPs": f"{mean.flops:,.0f}",
                "space": f"{mean.mebibytes:.2f}",
            }
        )
    return lines


def comparison_text(claim: Claim) -> str:
    """Return the names of the compared arms and the measure."""
    title = measure_named(claim.measure).title
    if not claim.right:
        return f"{claim.left}, {title}"
    sign = "/" if claim.how == "over" else "-"
    return f"{claim.left} {sign} {claim.right}, {title}"


def table_text(rows: Sequence[Mapping[str, str]]) -> str:
    """Write at least one row as a table in Markdown."""
    columns = rows[0]
    rule = ["---"] * len(columns)
    lines = [_line(columns), _line(rule)]
    for row in rows:
        lines.append(_line(row.values()))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    # Otherwise a bar in a cell would begin another cell.
    escaped = [cell.replace("|", "\\|") for cell in cells]
    joined = " | ".join(escaped)
    return f"| {joined} |"


def duration_text(seconds: float | None) -> str:
    """Format a time in seconds, minutes or hours; None is unknown."""
    if seconds is None:
        return "unknown"
    minutes = seconds / 60
    hours = seconds / 3600
    if minutes < 1:
        return f"{seconds:.1f} s"
    # Up to an hour and a half, minutes are easier to compare than parts of hours.
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
    censored: Collection[int] = (),
) -> str:
    sign = "+" if signed else ""
    form = f"{sign}.{digits}f"
    seeds: list[str] = []
    for seed, value in by_seed.items():
        text = _NOT_REACHED
        if value is not None:
            text = format(value, form)
        # A bound says more than that a time was not reached.
        elif bounds is not None:
            text = bounds.get(seed, _NOT_REACHED)
        if seed in censored:
            text += " (censored)"
        seeds.append(f"{seed}: {text}")
    return ", ".join(seeds)


def _lacking(result: ClaimResult) -> str:
    """Return the end of a cell with the stated seeds that were not run."""
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
    # The spread of whole numbers has a fraction.
    places = max(digits, 1)
    return f"{text} ± {spread:.{places}f}"
