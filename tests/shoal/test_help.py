"""Help texts: panels, examples that can be typed, and plain English."""

import re
import shlex

import pytest
import typer

from shoal.cli.main import _PANELS, app
from tests.documents.plain import faults
from tests.documents.reference import commands

TEXTS = {path: (text, options) for path, text, options in commands()}
LONGEST = 40
"""Lines of a help text that needs no panels."""


def command_of(words):
    """The command that some words call, its context, and the words that are left for it."""
    command = typer.main.get_command(app)
    context = command.context_class(command, info_name="shoal")
    words = list(words)
    while words and words[0] in getattr(command, "commands", ()):
        command = command.resolve_command(context, [words[0]])[1]
        context = command.context_class(command, parent=context, info_name=words.pop(0))
    return command, context, words


def test_every_command_stands_in_a_panel():
    names = [name for panel in _PANELS.values() for name in panel]
    assert sorted(names) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("path", [path for path in TEXTS if path != "shoal"])
def test_a_help_text_has_an_example_that_parses(path):
    """The example calls this command, or one of its group, with options that exist."""
    (example,) = re.findall(r"^ *Example: (shoal .*)$", TEXTS[path][0], re.MULTILINE)
    assert f"{example} ".startswith(f"{path} ")
    command, context, words = command_of(shlex.split(example)[1:])
    command.make_context(context.info_name, words, parent=context.parent)


@pytest.mark.parametrize("path", TEXTS)
def test_a_help_text_is_plain_english(path):
    """Also where an option explains itself; rich would swallow a word in brackets."""
    text, options = TEXTS[path]
    sentences = [text, *(about for _, about in options)]
    for sentence in sentences:
        words = re.sub(r"\[(default|env var|required|x[<>]|[0-9.]+<|\d)[^\]]*\]", "", sentence)
        assert [f"{fault.remedy}: {fault.sentence}" for fault in faults(words)] == []
        assert not re.search(r"(?<!http)\[[a-z]", words), words


@pytest.mark.parametrize("path", TEXTS)
def test_a_long_help_text_has_panels(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    command, context, _ = command_of(path.split()[1:])
    command.get_help(context)
    shown = capsys.readouterr().out
    assert "─ Options ─" in shown or "─ Commands ─" in shown
    assert shown.count("\n") <= LONGEST or shown.count("╭─") > 1
