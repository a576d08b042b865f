"""The configuration in a folder of results says whose they are."""

import json

import pytest

from fleet_protocol.errors import ConfigError
from simulation.runner import simulate
from simulation.settings import SimulationConfig

TABLES = {
    "model": {"arch": "mlp"},
    "data": {"name": "digits"},
    "devices": {"count": 2},
    "strategy": {"name": "fml"},
}


def test_a_folder_whose_configuration_cannot_be_read_is_refused(tmp_path):
    """Nothing is overwritten, and the message says what to do."""
    config = SimulationConfig.model_validate({**TABLES, "out": tmp_path})
    stored = {**json.loads(config.model_dump_json()), "devices": {"coutn": 2}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="remove the folder"):
        simulate(config)
    assert json.loads((tmp_path / "config.json").read_text()) == stored
