"""`shoal compare`: runs of one store, of several, and of simulations, side by side."""

import json
import os
import shutil
from contextlib import closing

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from broker_server.store import Store
from broker_server.store.configurations import save_config
from fleet_protocol.errors import ConfigError
from shoal.cli.main import app
from tests.shoal.view.stores import RUN, made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders: two simulations, of which the second has another seed, and a store."""
    first = tmp_path_factory.mktemp("first")
    made(first)
    second = tmp_path_factory.mktemp("second")
    shutil.copytree(first, second, dirs_exist_ok=True)
    with closing(Store(second / "store")) as store, store._begin() as connection:
        connection.execute(text("update runs set config = json_set(config, '$.seed', 9)"))
    third = tmp_path_factory.mktemp("third") / "store"
    shutil.copytree(first / "store", third)
    return [str(first), str(second), str(third)]


def typed(*words):
    result = CliRunner().invoke(app, ["compare", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_folders_of_simulations_and_stores_are_compared(folders):
    records = json.loads(typed(*folders, "--json"))
    assert {(record["run"], record["other_run"]) for record in records} == {
        (folders[0], folders[1]),
        (folders[0], folders[2]),
    }
    settings = [record for record in records if record["what"] == "setting"]
    assert [
        (record["other_run"], record["name"], record["other_value"]) for record in settings
    ] == [(folders[1], "seed", 9)]
    scores = [record for record in records if record["what"] == "accuracy"]
    assert [record["name"] for record in scores] == ["1", "2", "3", "4"] * 2
    shown = typed(*folders)
    assert "4 of 6" in shown
    assert "seed" in shown


def test_a_run_of_a_folder_is_named_behind_a_colon(folders):
    records = json.loads(typed(f"{folders[0]}:{RUN[:9]}", folders[1], "--json"))
    assert {record["run"] for record in records} == {f"{folders[0]}:{RUN[:9]}"}
    with pytest.raises(ConfigError, match="has no run none"):
        typed(f"{folders[0]}:none", folders[1])


def settings_of(*names):
    records = json.loads(typed(*names, "--json"))
    return {
        record["name"]: (record["value"], record["other_value"])
        for record in records
        if record["what"] == "setting"
    }


def test_simulations_differ_by_their_settings_and_not_by_their_files(folders, tmp_path):
    """The recipe is that of the artifacts; the partition is in the simulation's folder."""
    names = []
    for number, clip_norm in enumerate((1.0, 5.0)):
        folder = tmp_path / str(number)
        names.append(str(folder))
        shutil.copytree(folders[0], folder)
        for path in folder.glob("artifacts/*/*/manifest.json"):
            manifest = json.loads(path.read_bytes())
            manifest["recipe"]["clip_norm"] = clip_norm
            path.write_text(json.dumps(manifest))
        simulation = {"partition": {"alpha": clip_norm}, "model": {"weights": None}}
        (folder / "config.json").write_text(json.dumps(simulation))
        with closing(Store(folder / "store")) as store, store._begin() as connection:
            for key, value in (
                ("store", folder / "store"),
                ("model.artifacts", folder / "artifacts"),
                ("model.weights", folder / "init.safetensors"),
            ):
                changed = f"update runs set config = json_set(config, '$.{key}', :value)"
                connection.execute(text(changed), {"value": str(value)})
            connection.execute(text("update runs set fleet = 'simulation'"))
        with closing(Store(folder / "store")) as store:
            save_config(store.folder, RUN, store.runs()[0].config)
    assert settings_of(*names) == {
        "model.recipe.clip_norm": (1.0, 5.0),
        "partition.alpha": (1.0, 5.0),
    }
    for content in ("{", "[" * 99_999):
        (tmp_path / "1" / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"1/config\.json cannot be read"):
            typed(*names)


@pytest.mark.attack(
    "file",
    "A store's database names a different folder for the artifacts, and the store is compared",
    "Shoal opens nothing in that folder, and omits the recipe",
    "2026-11-29",
)
def test_a_compared_store_opens_no_folder_that_its_database_names(folders, tmp_path):
    """Pipes in place of the manifests there would keep the command waiting for ever."""
    stranger = tmp_path / "stranger"
    shutil.copytree(folders[0], stranger)
    elsewhere = tmp_path / "elsewhere"
    for path in (stranger / "artifacts").glob("*/*/manifest.json"):
        pipe = elsewhere / path.relative_to(stranger / "artifacts")
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
    assert elsewhere.is_dir()
    with closing(Store(stranger / "store")) as store, store._begin() as connection:
        changed = "update runs set config = json_set(config, '$.model.artifacts', :value)"
        connection.execute(text(changed), {"value": str(elsewhere)})
    assert settings_of(folders[0], str(stranger)) == {}


def test_a_mistyped_folder_is_named_with_those_that_are_like_it(folders, tmp_path, monkeypatch):
    """It was taken for a run, and only the default store was blamed."""
    shutil.copytree(folders[0], tmp_path / "fedavg")
    monkeypatch.chdir(tmp_path)
    text = r"no folder fedvag \(did you mean 'fedavg'\?\); and as the name of a run: "
    with pytest.raises(ConfigError, match=text + "there is no store in runs/store"):
        typed("fedavg", "fedvag")
    with pytest.raises(ConfigError, match=text + r".* has no run fedvag"):
        typed("fedavg", "fedvag", "--store", "fedavg/store")
    with pytest.raises(ConfigError, match=r"there is no folder fedvag \(did you mean"):
        typed("fedavg", f"fedvag:{RUN}")


def test_metrics_have_a_table_each(folders, tmp_path):
    """As the errors of numbers, which have no accuracy."""
    shutil.copytree(folders[0], tmp_path / "numbers")
    mae = {"name": "mae", "rule": "mean", "value": 0.0625, "sums": []}
    with closing(Store(tmp_path / "numbers" / "store")) as store, store._begin() as connection:
        changed = "json_set(evaluation, '$.accuracy', null, '$.metrics', json(:metrics))"
        connection.execute(
            text(f"update versions set evaluation = {changed} where evaluation is not null"),
            {"metrics": json.dumps([mae])},
        )
    numbers = str(tmp_path / "numbers")
    shown = typed(numbers, folders[0])
    assert "mae" in shown
    assert "0.0625" in shown
    records = json.loads(typed(numbers, folders[0], "--json"))
    metrics = [record for record in records if record["what"] == "mae"]
    assert {(record["value"], record["other_value"]) for record in metrics} == {(0.0625, None)}


def test_losses_are_called_losses(folders, tmp_path):
    """Where no run has an accuracy, neither the table nor the axis names one."""
    shutil.copytree(folders[0], tmp_path / "losses")
    with closing(Store(tmp_path / "losses" / "store")) as store, store._begin() as connection:
        connection.execute(
            text("update versions set evaluation = json_set(evaluation, '$.accuracy', null)")
        )
    losses = str(tmp_path / "losses")
    assert "accuracy" not in typed(losses, losses)
    assert "accuracy, or loss" in typed(losses, folders[0])
    assert "or loss" not in typed(folders[0], folders[2])
    records = json.loads(typed(losses, losses, "--json"))
    assert {record["what"] for record in records} == {"loss", "f1"}


def test_an_ending_that_cannot_be_drawn_is_refused_before_anything_is_printed(folders):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["compare", *folders, "--plot", "curves.xyz"])
    assert "must end with .png" in str(result.exception)
    assert result.stdout == ""


def test_curves_are_drawn(folders, tmp_path):
    pytest.importorskip("matplotlib")
    typed(*folders, "--plot", str(tmp_path / "curves.svg"))
    assert "</svg>" in (tmp_path / "curves.svg").read_text()
    with pytest.raises(ConfigError, match=r"must end with \.png, \.svg, \.pdf"):
        typed(*folders, "--plot", str(tmp_path / "curves.jpeg"))


def test_what_cannot_be_compared_is_named(folders, tmp_path):
    with pytest.raises(ConfigError, match="name 2 to 12 runs or stores, not 1"):
        typed(folders[0])
    with pytest.raises(ConfigError, match="is neither a store nor the folder of a simulation"):
        typed(folders[0], str(tmp_path))
