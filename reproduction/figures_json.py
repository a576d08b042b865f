"""The figures and verdicts of a table as values for JSON."""

from typing import Any

from reproduction.by_seed import mean_and_spread
from reproduction.claim_result import ClaimResult
from reproduction.experiment import Experiment
from reproduction.figures import Figure, Rows, arms_of, figures, judge, stand_ins


def to_json(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """Return the table of some stored rows as values for JSON."""
    other_data: list[dict[str, str]] = []
    for published, here in stand_ins(experiment, arms_of(rows)):
        other_data.append({"published": published, "here": here})
    claims: list[dict[str, Any]] = []
    for result in judge(experiment, rows):
        if result.claim.says or result.by_seed:
            claims.append(_result_to_json(result))
    return {
        "other_data": other_data,
        "figures": list(map(_figure_to_json, figures(experiment, rows))),
        "claims": claims,
    }


def _figure_to_json(figure: Figure) -> dict[str, Any]:
    deciding = figure.by_seed("deciding")
    mean, _ = mean_and_spread(list(deciding.values()))
    return {
        "arm": figure.arm.name,
        "figure": figure.measure.name,
        "unit": figure.measure.unit,
        "published": figure.published and figure.published.value,
        "mean": mean,
        "deciding": deciding,
        "best": figure.by_seed("best"),
        "last": figure.by_seed("last"),
    }


def _result_to_json(result: ClaimResult) -> dict[str, Any]:
    claim = result.claim
    return {
        "claim": claim.says,
        "left": claim.left,
        "right": claim.right,
        "figure": claim.measure,
        "how": claim.how,
        "published": result.published,
        "interval": result.interval,
        "by_seed": result.by_seed,
        "bounds": result.bounds,
        # The names of keys are those of the report, because programs read them.
        "seeds_not_run": result.lacking,
        "censored": result.censored,
        "seeds_needed": None if result.need is None else result.need.seeds,
        "best": result.best,
        "verdict": result.verdict,
    }
