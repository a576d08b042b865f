"""The reference of the configuration files: complete, and what the code says."""

from pathlib import Path

import pytest

from shoal.reference import FILES, keys_of, page

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", FILES)
def test_the_committed_page_is_what_the_code_says(name):
    """docs/reference is generated: run `make docs` after changing a setting."""
    assert (PAGES / f"{name}.md").read_text() == page(name)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_there_once_with_what_it_is(name):
    """Its values, its default, and a sentence; also in tables within tables and for every kind of data."""
    keys = list(keys_of(FILES[name][0]))
    places = [(key.table, key.name) for key in keys]
    assert len(places) == len(set(places)) > 25
    assert [key for key in keys if not (key.values and key.default and key.about)] == []


def test_values_and_defaults_are_those_of_the_file():
    """As they are typed into TOML."""
    found = {(key.table, key.name): key for key in keys_of(FILES["device.toml"][0])}
    assert found["", "max_width"].values == "number > 0 and <= 1"
    assert found["", "max_width"].default == "`1`"
    assert found["", "backend"].values == '`"auto"`, `"onnx"`, `"ort-training"`'
    assert found["", "broker"].default == "required"
    assert found["[tls]", "ca_file"].values == "path or none"
    assert found["[data, kind = 'csv']", "kind"].values == '`"csv"`'
