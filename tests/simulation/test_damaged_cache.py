"""Files that a simulation wrote, and that a full disk, a power cut or somebody else has changed:
each is named in one line, with what to do.
"""

import numpy as np
import pytest

from fleet_protocol.errors import ConfigError, DataError
from simulation.claim import claim_folder
from simulation.data.held import SampleSplit, VirtualData
from simulation.settings import SimulationConfig

DAMAGED = {"empty": b"", "cut": b"PK\x03\x04 cut off", "text": b"no array", "nested": b"[" * 99_999}
COUNT = 6


@pytest.fixture
def folder(tmp_path):
    """Samples of two devices."""
    np.save(tmp_path / "train_x.npy", np.zeros((COUNT, 2), np.float32))
    np.save(tmp_path / "train_y.npy", np.zeros(COUNT, np.int64))
    np.save(tmp_path / "black.npy", np.zeros((), np.float32))
    np.savez(tmp_path / "test.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    halves = (np.arange(3), np.arange(3, COUNT))
    SampleSplit(halves, (np.arange(2), np.arange(2, 4))).save(tmp_path / "parts.npz")
    return tmp_path


def use(folder):
    VirtualData(folder, folder / "parts.npz").with_test(0)


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("name", ["train_x.npy", "black.npy", "parts.npz", "test.npz"])
def test_a_damaged_file_of_samples_is_named(name, content, folder):
    """And is to be removed, since the simulation writes it again."""
    use(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=r"or is truncated or damaged: .*; remove it"):
        use(folder)


@pytest.mark.parametrize("content", [*DAMAGED.values(), b"[1]", b'{"a": 1}'])
def test_damaged_digests_are_named(content, tmp_path):
    """Those of the files that the configuration of a folder names."""
    document = {
        "out": tmp_path,
        "model": {"arch": "mlp"},
        "data": {"name": "digits"},
        "devices": {"count": 2},
    }
    config = SimulationConfig.model_validate(document)
    claim_folder(config, begun=False)
    claim_folder(config, begun=True)
    (tmp_path / "files.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"files\.json cannot be read .* use another `out`"):
        claim_folder(config, begun=True)
