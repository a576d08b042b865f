"""What every command prints with ``--json``: flat, with the names that the reference says, of all
records the same.
"""

import ast
import itertools
import json
import re
from contextlib import closing, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

import shoal.cli
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store
from shoal.cli.console import flat
from shoal.cli.main import app as command
from shoal.cli.views.comparison import ComparedRun, comparison_records
from tests.documents.reference import PRINTED, commands, printed
from tests.shoal.view.stores import RUN, made

OTHER = "20260102-000000-efgh"
TYPED = {name: name for name in PRINTED} | {
    "compare": f"compare {RUN} {OTHER}",
    "rounds show": "rounds show 2",
}
OF_ONE_THING = {  # what they did
    "backup", "bench fleet", "device bench", "device doctor", "device exits", "device predict",
    "devices predict", "export", "export-mutual", "export-weights", "promote",
    "rename", "reproduce", "restore", "rollback", "run", "simulate", "track",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run with devices of hostile names, and another whose settings differ."""
    folder = made(tmp_path_factory.mktemp("fleet"), hostile=True)
    with closing(Store(folder)) as opened:
        run = opened.run(RUN)
        config = (
            FleetConfig.model_validate_json(run.config)
            .model_copy(update={"seed": 9})
            .model_dump_json()
        )
        opened.add_run(
            replace(run, id=OTHER, config=config), replace(opened.versions(RUN)[0], run=OTHER)
        )
    return folder


@pytest.mark.parametrize("name", PRINTED)
def test_no_value_holds_another_and_every_name_is_in_the_reference(store, name):
    """Text, numbers, true, false and null, or a list of them; JSON in no text; each record has the
    same names.
    """
    with redirect_stdout(StringIO()) as out:
        of = ["--folder", str(store.parent)] if name == "rollout show" else []
        of += (
            [] if name in {"runs", "compare"} else ["--run", RUN] if name != "rollout show" else []
        )
        command([*TYPED[name].split(), *of, "--store", str(store), "--json"], standalone_mode=False)
    found = json.loads(out.getvalue())
    records = found if isinstance(found, list) else [found]
    assert records
    assert len({tuple(record) for record in records}) == 1
    known = re.compile(
        "|".join(re.sub("<[^<>]*>", ".+", re.escape(each)) for each in printed(name))
    )
    for key, value in itertools.chain.from_iterable(record.items() for record in records):
        assert all(
            item is None or isinstance(item, str | int | float)
            for item in (value if isinstance(value, list) else [value])
        ), key
        assert not str(value).startswith(('{"', "[{")), key
        whole = [each for each in printed(name) if each.startswith(f"{key}.")]
        assert known.fullmatch(key) or (value in (None, []) and whole), key


def test_every_command_with_json_is_one_of_these():
    """A new listing gets its names into the reference."""
    typed = {
        path.removeprefix("shoal ") for path, _, options in commands() if "--json" in dict(options)
    }
    assert typed == set(PRINTED) | OF_ONE_THING


def test_nothing_else_of_the_command_line_prints_json():
    """One function prints all of it, flat; the report of the demo is a file, and an export of a fleet
    compares digests.
    """
    others = {"console.py", "report.py", "fleet_export.py"}
    for path in Path(shoal.cli.__file__).parent.rglob("*.py"):
        names = [
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        ]
        assert path.name in others or not {"dumps", "dump"} & set(names), path


def test_two_runs_that_differ_in_a_list_of_records_keep_what_else_differs():
    """The list is text, as in the table."""
    metrics = [{"name": "f1"}]
    runs = []
    for label, settings in (
        ("a", {"model.recipe.metrics": metrics, "seed": 7}),
        ("b", {"model.recipe.metrics": [], "seed": 1}),
    ):
        runs.append(ComparedRun(label, None, settings, {}, {}, frozenset(), {}))
    values = [
        (row["name"], row["value"], row["other_value"]) for row in flat(comparison_records(runs))
    ]
    assert values == [("model.recipe.metrics", "[{'name': 'f1'}]", []), ("seed", 7, 1)]


def test_what_one_record_lacks_is_null_in_it_and_not_named_twice():
    """Absent objects, lists of lists, and names with dots."""
    rows = [
        {"a": None, "b": []},
        {"a": {"x.y": 1}, "b": [[1, 2], [3]]},
        {"a": {"x.y": 2}, "b": [{"name": "n", "v": 0}]},
    ]
    assert [list(row) for row in flat(rows)] == [["a.x.y", "b.0", "b.1", "b.n.name", "b.n.v"]] * 3
    assert flat(rows)[0] == dict.fromkeys(flat(rows)[1])
    assert flat([]) == [] == flat({"of": {"e": []}})["of.e"]
