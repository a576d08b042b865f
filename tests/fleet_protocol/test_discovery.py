"""What the modules of a folder offer is found without a list of their names."""

import sys

import pytest

from fleet_protocol.discovery import discover, modules_of
from fleet_protocol.errors import ConfigError


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A package of two modules with entries, one without, and a program."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name, text in {
        "__init__": "",
        "b": "ENTRIES = {'late': 3, 'early': 1}",
        "a": "ENTRIES = {'middle': 2}",
        "helper": "x = 1",
        "__main__": "raise SystemExit('a program is not imported')",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name == "shelf" or name.startswith("shelf.")]:
        del sys.modules[name]


def test_entries_come_in_the_order_of_the_modules(shelf):
    """Modules are sorted by name, so that a file system's order changes nothing; entries keep
    theirs.
    """
    assert [module.__name__ for module in modules_of("shelf")] == [
        "shelf.a",
        "shelf.b",
        "shelf.helper",
    ]
    assert list(discover("shelf", "ENTRIES").items()) == [("middle", 2), ("late", 3), ("early", 1)]
    assert discover("shelf", "NOTHING") == {}


def test_a_name_that_two_modules_have_is_refused(shelf):
    """Or the one would hide the other without a word."""
    (shelf / "c.py").write_text("ENTRIES = {'early': 4}")
    with pytest.raises(ConfigError, match=r"shelf\.b and shelf\.c both have 'early' in ENTRIES"):
        discover("shelf", "ENTRIES")
