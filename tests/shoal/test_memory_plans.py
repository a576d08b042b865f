"""The table of an export names the plans of its tiers, and `--json` has their figures."""

import json
from dataclasses import replace

import pytest

from fleet_protocol.errors import ConfigError
from models.tier import Tier
from shoal.cli.export_tables import print_reports
from shoal.cli.options import parse_memory_bounds
from trainer_export.tier_report import PlanReport, TierReport

WIDE = TierReport(Tier(1.0, 1), 100, 100, 1000, 5000, 90_000_000, 1e-6)
PLANNED = replace(WIDE, plans=(PlanReport(45_000_000, 0.31),))


def test_the_table_has_a_column_of_plans_where_a_tier_has_one(capsys):
    """Each with its peak, and the share of the step's work that it repeats."""
    print_reports([WIDE], "exported", as_json=False)
    assert "repeated" not in capsys.readouterr().out
    print_reports([WIDE, PLANNED], "exported", as_json=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "repeated" in printed
    assert "31%" in printed


def test_bounds_are_megabytes():
    """Whole ones, because they name the files of plans."""
    assert parse_memory_bounds("--memory", "96,48") == (96e6, 48e6)


@pytest.mark.parametrize("text", ["0", "-5", "96,0", "0.5", "96,,48", "many"])
def test_a_bound_that_is_none_is_refused(text):
    """Before anything is exported."""
    with pytest.raises(ConfigError, match=r"--memory: .*whole numbers"):
        parse_memory_bounds("--memory", text)


def test_json_has_the_figures_of_plans(capsys):
    """With the number of the plan in their names."""
    print_reports([PLANNED], "exported", as_json=True)
    (record,) = json.loads(capsys.readouterr().out)
    assert record["plans.0.peak_memory_bytes"] == 45_000_000
    assert record["plans.0.recomputed_share"] == 0.31
