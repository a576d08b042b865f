"""Every command, block of settings and program in README and docs/ is tried: parsed, read as its
file, or run.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest
import tomllib
from pydantic import ValidationError
from typer.core import TyperGroup
from typer.main import get_command

from shoal.cli.main import app
from tests.documents.reference import FILES
from tests.documents.typed import FENCE, ROOT, pages

PAGES = pages()


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def typed(path):
    """The words of each line that begins with `shoal` in a block of commands; a line that goes on
    is one.
    """
    text = FENCE.sub("", path.read_text()).replace("\\\n", " ")
    for line in re.findall(r"^    (?:\w+=\S+ |sudo )?shoal (\S.*)$", text, re.MULTILINE):
        yield shlex.split(line.split(" | ")[0], comments=True)


LINES = [(name_of(path), words) for path in PAGES for words in typed(path)]
TOML = [
    (name_of(path), text)
    for path in PAGES
    for kind, text in FENCE.findall(path.read_text())
    if kind == "toml" and not text.startswith("# pyproject.toml")
]
PYTHON = [
    (name_of(path), text)
    for path in PAGES
    for kind, text in FENCE.findall(path.read_text())
    if kind == "python"
]


@pytest.mark.parametrize(
    ("page", "words"), LINES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_command_can_be_typed(page, words):
    """The command is there and takes the values of its options, files of somebody else's machine
    left aside.

    `tests/documents/test_typed.py` executes it.
    """
    group = get_command(app)
    context = None
    words = words[: words.index(">")] if ">" in words else words
    while isinstance(group, TyperGroup):
        context = group.make_context(
            group.name, list(words), parent=context, resilient_parsing=True
        )
        words = [*context._protected_args, *context.args]
        if not words and group.invoke_without_command:
            return
        name, group, words = group.resolve_command(context, words)
        assert group is not None, (page, name)
    try:
        group.make_context(group.name, words, parent=context)
    except Exception as error:
        if "does not exist" not in str(error):
            raise


MINIMAL = {
    "fleet.toml": 'fleet = "f"\n[model]\narch = "a"\n[evaluation]\ndata = { kind = "npz", path = '
    '"test.npz" }\n',
    "device.toml": 'fleet = "f"\ndevice = "d"\nbroker = "mqtt://127.0.0.1"\nstate_dir = "s"\n'
    '[data]\nkind = "npz"\npath = "t.npz"\n',
    "flash.toml": 'board = "jetson"\nenrolment = "e"\n[data]\nkind = "npz"\npath = "train.npz"\n',
    "sim.toml": '[model]\narch = "mlp"\nwidths = [1, 0.5]\n[data]\nname = '
    '"digits"\n[devices]\ncount = 2\n',
}
# Programs of the pages, by their first line, and the test that runs them.
PROGRAMS = {
    "# fedpower.py": "tests/test_notebooks.py",
    '"""A model of your own: plain PyTorch, whose sizes that may shrink come from ``cut``."""': (
        "tests/test_tutorial.py"
    ),
    "def noise(x, generator):": "tests/device_runtime/test_augment.py",
    "import base64, json, pathlib, socket": "tests/device_runtime/test_serving.py",
    "from shoal import Client": "tests/shoal/test_client.py",
    "from shoal import Adapters, Cut, architecture, with_adapters": "test_a_program_defines_what_it_says",
    "from torch import nn": "test_a_program_defines_what_it_says",
    "import torch": "test_a_program_defines_what_it_says",
    '@architecture(input_dtype={"words": "int64"})': "test_a_program_defines_what_it_says",
    '@loss({"label": "int64", "box": "float32"}, {"box": (4,)})': "test_a_program_defines_what_it_says",
}
# Blocks that do not name their file in a comment; those of other pages are of fleet.toml.
OF_PAGE = {"docs/data.md": "sim.toml", "docs/device.md": "device.toml", "docs/flash.md": "flash.toml",
           "docs/simulation.md": "sim.toml"}  # fmt: skip


def over(base, more):
    """Tables of both; where both say something, what is said later. Data is another's
    altogether.
    """
    both = {key for key in base.keys() & more.keys() - {"data"} if isinstance(more[key], dict)}
    return {**base, **more, **{key: over(base[key], more[key]) for key in both}}


def file_of(page, text):
    named = re.match(r"# (\w+\.toml)", text)
    name = (
        named[1]
        if named
        else OF_PAGE.get(page, "sim.toml" if "[model.recipe]" in text else "fleet.toml")
    )
    return name if name in FILES else "device.toml"  # attic.toml is one


@pytest.mark.parametrize(("page", "text"), TOML)
def test_every_block_of_settings_is_read(page, text):
    """Beside the least that its file needs: each key is one, and each value may stand there."""
    name = file_of(page, text)
    FILES[name][0].model_validate(over(tomllib.loads(MINIMAL[name]), tomllib.loads(text)))


def test_a_key_that_there_is_not_is_seen():
    """The test above can fail."""
    with pytest.raises(ValidationError):
        test_every_block_of_settings_is_read("docs/rounds.md", "[round]\nfractoin = 1.0\n")


def test_no_program_is_left_out():
    """Each is run by a test, here or by one that reads it or the file it is from."""
    assert {text.splitlines()[0] for _, text in PYTHON} == PROGRAMS.keys()
    for page, text in PYTHON:
        test = PROGRAMS[text.splitlines()[0]]
        if test.endswith(".py"):
            assert Path(page).name in (ROOT / test).read_text(), page
        else:
            assert test in globals()


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page, text in PYTHON if not PROGRAMS[text.splitlines()[0]].endswith(".py")],
)
def test_a_program_defines_what_it_says(page, text):
    """With what its page has imported before; a loss or metric is then one by its name."""
    torch = pytest.importorskip("torch")
    names = {"__name__": "page", "torch": torch, "functional": torch.nn.functional}
    exec("from shoal import architecture, loss, metric", names)
    before = set(names)
    exec(compile(text, page, "exec"), names)
    made = set(names) - before
    assert made >= {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if "focal" in made:
        assert names["focal"](gamma=1.5).name == "focal"
    if "both" in made:
        assert names["both"](weight=0.1).name == "both"
    if "top3" in made:
        assert names["top3"]().name == "top3"


def test_every_target_of_make_is_there():
    """Those that a page has somebody type."""
    makefile = (ROOT / "Makefile").read_text()
    named = {
        name
        for path in PAGES
        for name in re.findall(r"^    make (?:-C \S+ )?([\w-]+)", path.read_text(), re.MULTILINE)
    }
    assert named >= {"demo", "test", "install"}
    assert {name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)} == set()
