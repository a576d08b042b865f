"""``shoal export-mutual`` as a user types it: the table, the JSON, and errors before anything is
traced.
"""

import json

import pytest
from typer.testing import CliRunner

from fleet_protocol.errors import ShoalError
from fleet_protocol.pair_manifest import parse_pair_manifest
from shoal.cli.main import app

COMMAND = ["export-mutual", "--meme", "mlp", "--personal", "mlp", "--set", "input_shape=1,4,4"]


@pytest.mark.slow
def test_it_prints_both_models_and_publishes_one_set(tmp_path):
    """A row for each model and one for their step; the JSON has the same figures, and the set is
    where it says.
    """
    own = [
        "--set",
        "hidden=12,8",
        "--personal-set",
        "hidden=6",
        "--set",
        "classes=7",
        "--adaptor",
        "head",
    ]
    own += ["--name", "mine", "--seed", "5", "--out", str(tmp_path)]
    found = json.loads(
        CliRunner().invoke(app, [*COMMAND, *own, "--json"], catch_exceptions=False).stdout
    )
    assert found["meme.parameters"] == 12 * 17 + 8 * 13 + 7 * 9
    assert found["personal.parameters"] == 6 * 17 + 7 * 7
    assert found["step.parameters"] == found["meme.parameters"] + found["personal.parameters"]
    assert found["adaptor"] == ["head.weight", "head.bias"]
    assert 0 <= found["worst_deviation"] < 1e-4
    folder = tmp_path / "mine" / "w1.00-d1+w1.00-d1"
    assert found["set"] == str(folder)
    manifest = parse_pair_manifest((folder / "manifest.json").read_bytes())
    assert manifest.graph.size == found["step.graph_bytes"]
    assert manifest.adaptor.parameters == ("head.weight", "head.bias")


def test_the_table_says_what_is_sent_and_what_stays(tmp_path):
    """And the line below it says what to do with the set."""
    done = CliRunner().invoke(
        app, [*COMMAND, "--set", "hidden=4", "--out", str(tmp_path)], catch_exceptions=False
    )
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:-1]
        for line in done.stdout.splitlines()
        if "│" in line
    }
    assert list(rows) == ["meme (sent and averaged)", "personal, stays", "joint step"]
    assert [cell.strip() for cell in rows["personal, stays"][:3]] == ["mlp", "w1.00-d1", "118"]
    assert f'[own_model] set = "{tmp_path}/mlp+mlp/w1.00-d1+w1.00-d1"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--meme", "lenet"], "did you mean 'lenet5'"),
        (["--personal", "mpl"], "did you mean 'mlp'"),
        (["--personal-set", "input_shape=1,5,5"], "float32 [1, 4, 4] for 10 labels"),
        (
            ["--meme-set", "classes=20"],
            "for 20 labels, but the personal model mlp takes float32 [1, 4, 4] for 10 labels",
        ),
        (["--personal-set", "hiden=3"], "'hiden' (did you mean 'hidden'?)"),
        (["--personal-width", "2"], "not in (0, 1]"),
        (["--meme-depth", "3"], "mlp has no sub-model of depth 3"),
        (["--adaptor", "hed"], "neither a block nor a module hed; its blocks are head, stem"),
        (["--adaptor", "stem,head"], "all of mlp"),
        (["--models", "none.py"], "none.py"),
        (["--meme-set", "hidden"], "--meme-set: 'hidden' is not of the form name=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message(tmp_path, arguments, says):
    """What is wrong and what there is instead, with the exit code of a wrong setting, and nothing
    published.
    """
    done = CliRunner().invoke(app, [*COMMAND, *arguments, "--out", str(tmp_path)])
    assert isinstance(done.exception, ShoalError), done.output
    assert done.exception.exit_code == 2
    assert says in str(done.exception)
    assert not list(tmp_path.glob("[!.]*"))
