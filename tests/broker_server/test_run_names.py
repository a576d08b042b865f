"""Names of runs: each is of one run of a store, and stands wherever an id may stand."""

import contextlib
import time

import pytest

from broker_server.settings.fleet import FleetConfig
from broker_server.store import RunRecord, Store, VersionRecord, queries
from fleet_protocol.configuration import parse_config, validate_config
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.run_names import check_run_name

OLD = "20260101-000000-aaaa"
NEW = "20260102-000000-bbbb"


def add(store, run, name):
    record = RunRecord(run, "lab", "tiny", "{}", "finished", None, time.time(), 2e9, 0, 0, name)
    store.add_run(record, VersionRecord(run, 0, 0, "b" * 64, None, None, 1.0, None))


@pytest.fixture
def store(tmp_path):
    """A run with a name, and a newer one without."""
    with contextlib.closing(Store(tmp_path / "s")) as opened:
        add(opened, OLD, "baseline")
        add(opened, NEW, None)
        yield opened


def test_a_name_stands_for_an_id(store):
    """A name counts whole, an id by its beginning; what fits nothing is answered with both."""
    assert queries.find_run(store, "baseline").id == OLD
    assert queries.find_run(store, "newest").id == NEW
    assert queries.find_run(store, "20260101").id == OLD
    with pytest.raises(ConfigError, match=rf"no run base; its runs: {NEW}, baseline \({OLD}\)"):
        queries.find_run(store, "base")


def test_a_run_is_renamed(store):
    """To a name that no other run has; its own is no change, and is not logged."""
    store.rename_run(NEW, "lower-rate")
    store.rename_run(NEW, "lower-rate")
    assert queries.find_run(store, "lower-rate").id == NEW
    assert [line.kind for line in store.events(NEW)] == ["run-renamed"]
    with pytest.raises(ConfigError, match=rf"run {OLD} .* has the name baseline; choose another"):
        store.rename_run(NEW, "baseline")
    with pytest.raises(ConfigError, match="already has the name"):
        store.rename_run(NEW, OLD)
    assert queries.find_run(store, NEW).name == "lower-rate"


def test_two_runs_never_share_a_name(store):
    """Whoever writes at the same time: the database itself refuses the second."""
    with pytest.raises(StorageError, match="UNIQUE"):
        add(store, "20260103-000000-cccc", "baseline")


@pytest.mark.parametrize(
    "name",
    ["", "a" * 65, "newest", "2026", "-a", "a b", "a/b", "a:b", "../a", "a\x1b[31m", "a\n", "é"],
)
def test_what_is_not_a_name_is_refused_by_its_rule(name):
    """In settings as in commands; a beginning of digits belongs to ids."""
    with pytest.raises(ValueError, match="a run's name has 1 to 64 letters"):
        check_run_name(name)
    document = {"fleet": "lab", "run_name": name, "model": {"arch": "m"}}
    with pytest.raises(ConfigError, match="run_name: a run's name has 1 to 64 letters"):
        validate_config(document, FleetConfig, source="fleet.toml")


def test_a_name_is_no_setting_of_a_run():
    """A run goes on under another name, and its stored configuration has none that could age."""
    config = FleetConfig.model_validate({"fleet": "lab", "model": {"arch": "m"}})
    named = config.model_copy(update={"run_name": "baseline"})
    assert named.differing_settings(config.model_dump_json()) == []


def test_a_name_with_other_letters_in_the_settings_has_the_rule_in_words():
    """Of a fleet, too: nobody reads a pattern."""
    with pytest.raises(ConfigError, match=r"fleet: use 1 to 64 letters, digits.*'my fleet'"):
        parse_config("fleet = 'my fleet'\nmodel.arch = 'm'", FleetConfig, source="fleet.toml")
