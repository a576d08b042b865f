"""The table of liars in `docs/rounds.md` is that of the stored runs, and says what it is said to say."""

import json
from pathlib import Path

from broker_server.settings.robust import RobustConfig
from tests.simulation.attack_figures import FILE, ROBUST, TABLES

STORED = json.loads(FILE.read_text())
RUNS = {(run["robust"], run["liars"], run["factor"]): run["accuracy"] for run in STORED["runs"]}
COLUMNS = ((0, 1), (1, -10), (3, 10), (3, -10), (3, -1))
CLEAN = RUNS["norm_bound = 0", 0, 1]


def test_the_table_is_that_of_the_stored_runs():
    """Every setting and every lie that was simulated, with the settings that the file was made with."""
    section = (Path(FILE).parent / "rounds.md").read_text().partition("## Which updates count")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    start = next(at for at, row in enumerate(rows) if row[0] == "[robust]")
    found = {row[0].replace("`", ""): row[1:] for row in rows[start + 2 :]}
    told = {name: [f"{RUNS[(name, *c)]:.4f}" if (name, *c) in RUNS else "" for c in COLUMNS] for name in ROBUST}
    assert found == told
    assert STORED["tables"] == json.loads(json.dumps(TABLES))


def test_the_mean_fails_and_the_default_and_krum_do_not():
    """Within a point of the run without liars, whoever scales what was learnt by ten, in either direction."""
    assert RobustConfig().norm_bound == 5
    for lie in ((1, -10), (3, 10), (3, -10)):
        assert RUNS[("norm_bound = 0", *lie)] < CLEAN / 2
        assert RUNS[("the defaults", *lie)] >= CLEAN - 0.01
        if lie[0] == 3:
            assert RUNS[('merge = "krum", faulty = 0.3', *lie)] >= CLEAN - 0.01
