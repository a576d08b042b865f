"""FedRolex's model of the next word trains on a text whose labels are the words behind."""

import numpy as np

from simulation.data_tables import PartitionTable
from simulation.runner import simulate
from tests.simulation.simulations import settings

TEXT = "the board sends its update and the server merges the update and sends the model "


def test_the_next_word_is_learnt(tmp_path):
    """Of a text that repeats itself nearly all words follow from those before."""
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(TEXT * 60)
    (folder / "wiki.test.tokens").write_text(TEXT * 12)
    config = settings(
        tmp_path / "run",
        tmp_path / "cache",
        model={
            "arch": "next_word",
            "settings": {
                "embed": 32, "heads": 2, "head_dim": 8, "ffn": 32, "blocks": 1, "dropout": 0.0,
            },
            "widths": (1.0, 0.5),
        },
        data={
            "name": "wikitext2",
            "root": tmp_path,
            "train_limit": None,
            "test_limit": None,
            "options": {"rows": 6, "test_rows": 2, "length": 8, "target": "next"},
        },
        partition=PartitionTable(kind="subject"),
        strategy={"name": "fedrolex"},
        tiers={"levels": "a1-b1"},
        round={"rounds": 6, "fraction": 1.0},
        evaluation={"every": 5, "perplexity": 2},
        train={"epochs": 2, "learning_rate": 0.2},
        engine={"workers": 1},
    )  # fmt: skip
    rows = simulate(config).rounds
    judged = [row for row in rows if row.accuracy is not None]
    assert judged[-1].accuracy > 0.7
    assert judged[-1].perplexity < np.sqrt(len(set(TEXT.split())))
