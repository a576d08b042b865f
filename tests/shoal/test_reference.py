"""The reference of files, messages, manifests and commands: complete, and what the code says."""

import pkgutil
import re
from pathlib import Path

import pytest

import shoal.cli.commands
from device_runtime.agent.releases import RESTART
from fleet_protocol.manifest import Manifest
from tests.documents import asyncapi
from tests.documents.reference import FILES, commands, keys_of, page
from tests.documents.reference import PAGES as KNOWN

PAGES = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", KNOWN)
def test_the_committed_page_is_what_the_code_says(name):
    """docs/reference is generated: run `make docs` after changing a setting."""
    assert (PAGES / f"{name}.md").read_text() == page(name)


MODELS = {
    **{name: model for name, (model, _) in FILES.items()},
    "manifest": Manifest,
    **{each.__name__: each for each in asyncapi.MESSAGES},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_there_once_with_what_it_is(name):
    """Its values, its default, and a sentence; also in tables within tables and for every kind of
    data.
    """
    keys = list(keys_of(MODELS[name]))
    places = [(key.table, key.name) for key in keys]
    assert len(places) == len(set(places)) > (25 if name in KNOWN else 1)
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


def test_every_message_has_a_heading_and_a_topic():
    """Those of bytes too: each that docs/asyncapi.json has."""
    text = page("messages")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(
        asyncapi.document()["components"]["messages"]
    )
    assert text.count("Topic: `shoal/") == text.count("\n## ")


def test_every_exit_code_is_there():
    """Each that any error of the code has, and what ends an agent for another runtime."""
    said = {int(code) for code in re.findall(r"^\| (\d+) \|", page("cli"), re.MULTILINE)}
    root = PAGES.parents[1]
    files = [
        path
        for name in ("fleet_protocol", "simulation", "reproduction", "shoal")
        for path in (root / name).rglob("*.py")
    ]
    given = {
        int(code) for path in files for code in re.findall(r"exit_code = (\d+)", path.read_text())
    }
    assert said >= given | {0, RESTART, 130} > {9}


def test_every_command_says_what_it_is_and_what_each_option_means():
    """Each module of commands is there, with what stands below it; hidden options alone say
    nothing.
    """
    found = {path: (about, options) for path, about, options in commands()}
    modules = {
        f"shoal {each.name.replace('_', '-')}"
        for each in pkgutil.iter_modules(shoal.cli.commands.__path__)
    }
    assert modules < set(found)
    assert {"shoal flash image", "shoal rounds show", "shoal device doctor"} < set(found)
    assert [path for path, (about, _) in found.items() if not about] == []
    assert [
        (path, option)
        for path, (_, options) in found.items()
        for option in options
        if not all(option)
    ] == []
