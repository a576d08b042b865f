"""Configurations that earlier versions stored are those of today, so that a folder of results can be gone on with."""

import json

import pytest

from fleet_protocol.errors import ConfigError
from reproduction.catalogue import find_experiment
from reproduction.running import collect, jobs
from simulation.results.history import write_history
from simulation.runner import simulate
from simulation.settings import SimulationConfig
from simulation.stored import as_of_today
from tests.reproduction.test_rendering import row

TABLES = {"model": {"arch": "mlp"}, "data": {"name": "digits"}, "devices": {"count": 2}, "strategy": {"name": "fml"}}
OWN = {"models": [{"arch": "mlp", "settings": {"hidden": [6]}, "labels": None}]}


def earlier(config: SimulationConfig) -> dict:
    """As it was written when the table of own models and the clock's boards had other names."""
    stored = json.loads(config.model_dump_json())
    stored["personal"] = stored.pop("own_models")
    stored["clock"]["table"] = "whale"
    return stored


@pytest.mark.parametrize("own", [None, OWN])
def test_a_configuration_of_an_earlier_version_is_todays(own):
    """With models of the devices' own, and without, where the table was stored as null."""
    config = SimulationConfig.model_validate({**TABLES, "own_models": own})
    assert SimulationConfig.model_validate(as_of_today(earlier(config))) == config
    assert SimulationConfig.model_validate(as_of_today(json.loads(config.model_dump_json()))) == config


def test_a_clock_of_ones_own_stays():
    """A path is nobody's former name."""
    config = SimulationConfig.model_validate({**TABLES, "clock": {"table": "mine.toml"}})
    assert as_of_today(json.loads(config.model_dump_json()))["clock"]["table"] == "mine.toml"


def test_results_of_an_earlier_version_are_in_the_table(tmp_path):
    """`shoal reproduce` finds a complete run whose result.json has the former names."""
    experiment = find_experiment("fml-1")
    (job, *_) = jobs(experiment, "small", tmp_path)
    record = {
        "table": "fml-1",
        "scale": "small",
        "arm": job.arm.name,
        "config": earlier(job.config),
        "versions": {},
        "machine": "test",
    }
    write_history(job.config.out, [row(1, 0.5)])
    (job.config.out / "result.json").write_text(json.dumps(record))
    assert job.complete
    assert [result.arm.name for result in collect(experiment, "small", tmp_path)] == [job.arm.name]


def test_a_folder_whose_configuration_cannot_be_read_is_refused(tmp_path):
    """Nothing is overwritten, and the message says what to do."""
    config = SimulationConfig.model_validate({**TABLES, "out": tmp_path})
    (tmp_path / "config.json").write_text(json.dumps({**earlier(config), "devices": {"coutn": 2}}))
    with pytest.raises(ConfigError, match="remove the folder"):
        simulate(config)
