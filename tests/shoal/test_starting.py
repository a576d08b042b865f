"""The options about initial weights: what is read, and the table of what a model took."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from broker_server.store import schema
from fleet_protocol.errors import ConfigError
from shoal import store_folder
from shoal.cli.starting import read_start_option


def read(path, pairs=(), **changes):
    options = {"partial": True, "least_share": None, "as_json": False, **changes}
    return read_start_option(path, pairs, **options)


def test_the_table_says_what_was_taken_left_and_random(tmp_path, capsys):
    """On standard output; beside JSON on standard error."""
    ones = np.ones((2, 2), np.float32)
    save_file({f"b.{n}.w": ones for n in range(3)} | {"old.w": ones}, tmp_path / "a.safetensors")
    model = {f"b.{n}.w": ones * 0 for n in range(3)} | {"new.w": ones * 0}
    for as_json in (False, True):
        read(tmp_path, as_json=as_json).put_into(model)
        printed = capsys.readouterr()
        text = printed.err if as_json else printed.out
        assert not (printed.out if as_json else printed.err)
        for words in ("b.*.w", "old.w", "the model does not have it", "new.w", "stayed random"):
            assert words in text
    assert "3 tensors taken, 1 left, 1 random" in " ".join(_table(tmp_path, model, capsys).split())


def _table(path, model, capsys):
    read(path).put_into(model)
    return capsys.readouterr().out


def test_options_that_do_not_belong_together_and_folders_of_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--start-share applies only to --start-partial"):
        read(tmp_path, partial=False, least_share=0.1)
    with pytest.raises(ConfigError, match="neither a store nor the folder of a checkpoint"):
        read(tmp_path)
    save_file({"w": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    for text in ("a", "=a"):
        with pytest.raises(ConfigError, match="give THEIRS=OURS"):
            read(tmp_path, [text])
    assert read(None) is None


def test_a_store_is_known_by_its_database_without_its_packages(tmp_path):
    """Both names are one; an export from other files runs without the packages of a server."""
    assert store_folder.DATABASE == schema.DATABASE
    assert not store_folder.is_store(tmp_path)
    (tmp_path / schema.DATABASE).touch()
    assert store_folder.is_store(tmp_path)
