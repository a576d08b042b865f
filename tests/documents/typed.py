"""Every line of an indented block of README and docs/, and where it is executed: the one table of
all of them.

A place is a scene of `tests/documents/test_typed.py`, which executes all its lines as they stand, a
test that executes lines of its page by itself, or a reason for which a line is not executed by any
test.
"""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "PLACES",
    "ROOT",
    "Elsewhere",
    "Line",
    "Never",
    "Scene",
    "in_scene",
    "lines_of",
    "pages",
    "place_of",
]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Line:
    """What somebody types, or what a page shows instead of a command.

    Attributes:
        page: where it stands.
        text: without its comment; what goes on in a second line is one.
    """

    page: str
    text: str


@dataclass(frozen=True)
class Scene:
    """A test of `test_typed.py` that executes the line."""

    name: str


@dataclass(frozen=True)
class Elsewhere:
    """A test that executes the line already."""

    test: str


@dataclass(frozen=True)
class Never:
    """No test executes the line, for this reason."""

    reason: str


Place = Scene | Elsewhere | Never


def pages() -> list[Path]:
    """README and docs/, without decisions and what is generated."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if not {"adr", "reference"} & set(path.parts)]


def lines_of(page: str, text: str) -> list[Line]:
    """The lines of the page's indented blocks: those that begin behind an empty line."""
    text = re.sub(r"[ \t]*\\\n\s*", " ", FENCE.sub("", text))
    blocks = re.findall(r"(?:\A|\n\n)((?:    .*(?:\n|\Z)|\n(?=    ))+)", text)
    shown = [
        re.sub(r"(^|\s+)# .*$", "", line[4:])
        for block in blocks
        for line in block.splitlines()
        if line.strip()
    ]
    return [Line(page, line) for line in shown if line]


_TUTORIAL = Elsewhere("tests/test_tutorial.py")
_TEMPLATES = Elsewhere("tests/shoal/test_templates.py")
_NEWCOMER = Elsewhere("tests/shoal/flash/test_newcomer.py")
_HOWTO = Elsewhere("tests/test_howto.py")
_API = Elsewhere("tests/shoal/test_api.py")
_HOURS = Never("takes an hour and more; tests/reproduction runs every table at the scale smoke")
_ROOT = Never("needs root on a board; tests/shoal/flash runs the script or package in a folder")
_CARD = Never(
    "takes a Debian mirror and minutes; `make arm` builds a card, with the same code, and starts it"
)
_PATTERN = Never("a pattern; the examples below it run")
_FAR = Never(
    "takes a page on another machine; tests/shoal/test_remote.py and "
    "tests/broker_server/test_steering.py ask one"
)
_PIP = Never("takes a network; tests/packaging/test_installed.py installs each extra")
_CLONE = Never("takes a network; who runs the tests has done it")
_MAKE = Never("installs or runs whole suites; tests/test_documents.py looks for the target")

# By page and line; a * at the end stands for any more, and the first row that fits counts.
PLACES: dict[tuple[str, str], Place] = {
    ("README.md", "make *"): _MAKE,
    ("docs/emulated-board.md", "*"): _NEWCOMER,
    ("docs/install.md", "git clone REPOSITORY shoal"): _CLONE,
    ("docs/install.md", "make -C shoal *"): _MAKE,
    ("docs/install.md", "pip install *"): _PIP,
    ("docs/own-model.md", "shoal run --board *"): _TEMPLATES,
    ("docs/own-model.md", "*"): _TUTORIAL,
    ("docs/benchmarks/demo.md", "SHOAL_DATA=/path/to/data shoal demo --data mnist"): Never(
        "takes minutes and MNIST; tests/documents/stored_tables.py has its figures, `make demo` "
        "is the same on digits"
    ),
    ("docs/api.md", "from shoal import architecture, Cut, Registry, ..."): _PATTERN,
    ("docs/api.md", "*"): _API,
    ("docs/device.md", "pip install './shoal[device]'"): _PIP,
    ("docs/device.md", "shoal device bench*"): Scene("costs"),
    ("docs/device.md", "shoal device *"): Scene("a_board"),
    ("docs/device.md", "shoal export*"): Scene("exports"),
    ("docs/device.md", "shoal devices predict *"): Elsewhere("tests/fleet/test_predictions.py"),
    ("docs/finetuning.md", "shoal export*"): Scene("exports"),
    ("docs/flash.md", "shoal flash image --config flash.toml"): _CARD,
    ("docs/flash.md", "shoal flash image --config flash.toml --out pi-1.img --lock card.lock"): _CARD,
    ("docs/flash.md", "shoal flash image --config flash.toml --out pi-1.img.zst"): _CARD,
    ("docs/flash.md", "shoal flash *"): Scene("flash"),
    ("docs/flash.md", "shoal device doctor*"): Scene("a_board"),
    ("docs/flash.md", "tar -xf shoal-jetson-1.tar && sudo ./shoal-jetson-1/install.sh"): _ROOT,
    ("docs/flash.md", "sudo /opt/shoal/uninstall.sh"): _ROOT,
    ("docs/flash.md", "sudo apt install ./shoal-device_arm64.deb"): _ROOT,
    ("docs/flash.md", "sudo install -m 600 pi-1.enrolment /etc/shoal/enrolment && sudo*"): _ROOT,
    ("docs/flash.md", "device,files*"): Scene("flash"),
    ("docs/flash.md", "pi-*"): Scene("flash"),
    ("docs/graphs.md", "shoal export-weights*"): Scene("a_store"),
    ("docs/graphs.md", "shoal export --models*"): Scene("exports"),
    ("docs/howto.md", "shoal *"): _HOWTO,
    ("docs/packages.md", "*"): Elsewhere("tests/packages/test_page.py"),
    ("docs/finetune-pictures.md", "*"): Elsewhere("tests/packages/test_tutorials.py"),
    ("docs/finetune-text.md", "*"): Elsewhere("tests/packages/test_tutorials.py"),
    ("docs/methods/fml.md", "shoal export --arch cnn2*"): Scene("exports"),
    ("docs/methods/fml.md", "shoal export-mutual --meme cnn2*"): Scene("exports"),
    ("docs/methods/fml.md", "shoal *"): Scene("personal_models"),
    ("docs/methods/private.md", "shoal device export-weights*"): Elsewhere(
        "tests/device_runtime/test_predicting.py"
    ),
    ("docs/methods/inclusivefl.md", "shoal export*"): Scene("exports"),
    ("docs/methods/depthfl.md", "shoal device *"): Elsewhere(
        "tests/device_runtime/test_early_exits.py"
    ),
    ("docs/methods/depthfl.md", "shoal export*"): Scene("exports"),
    ("docs/methods/shares.md", "shoal export*"): Scene("exports"),
    ("docs/mobile.md", "pip install './shoal[export,executorch]'"): _PIP,
    ("docs/mobile.md", "shoal export*"): Scene("exports"),
    ("docs/operations.md", "shoal bench fleet*"): Scene("a_bench"),
    ("docs/operations.md", "shoal pause*"): Scene("steering"),
    ("docs/operations.md", "shoal resume*"): Scene("steering"),
    ("docs/operations.md", "shoal stop*"): Scene("steering"),
    ("docs/operations.md", "shoal *"): Scene("a_store"),
    ("docs/benchmarks/resilience.md", "make soak RUNS=50"): _MAKE,
    ("docs/benchmarks/resilience.md", "python -m tests.fleet.chaos --devices 50 --rounds 30"): Never(
        "takes half an hour; tests/fleet/test_chaos.py does it with fewer devices and rounds"
    ),
    ("docs/page.md", "shoal reproduce fedrolex-3 --scale small --out results"): _HOURS,
    ("docs/page.md", "export SHOAL_URL=*"): _FAR,
    ("docs/page.md", "shoal devices"): _FAR,
    ("docs/page.md", "shoal log -f"): _FAR,
    ("docs/page.md", "shoal pause"): _FAR,
    ("docs/page.md", "shoal view*"): Scene("a_page"),
    ("docs/page.md", "curl *"): Scene("a_page"),
    ("docs/page.md", "shoal rounds*"): Scene("a_store"),
    ("docs/page.md", "shoal track*"): Scene("tracking"),
    ("docs/privacy.md", "theta_new(e) = theta_old(e) + (sum_k change_k(e) + z C n(e)) / asked(e)"): Never("a formula"),
    ("docs/recipes.md", "shoal export*"): Scene("exports"),
    ("docs/release.md", "make dist"): _MAKE,
    ("docs/results/*", "shoal reproduce*"): _HOURS,
    ("docs/rollout.md", "shoal rollout start --artifacts*"): Never(
        "takes a run in progress; tests/fleet/test_rollout_sets.py types it in one"
    ),
    ("docs/rollout.md", "shoal rollout*"): Scene("a_rollout"),
    ("docs/rounds.md", "shoal rounds show*"): Scene("a_store"),
    ("docs/security.md", "shoal *"): Scene("identities"),
    ("docs/simulation.md", "shoal reproduce --list*"): Scene("tables"),
    ("docs/simulation.md", "shoal reproduce --report*"): Scene("tables"),
    ("docs/simulation.md", "shoal reproduce --all --scale small --budget 8h"): _HOURS,
    ("docs/simulation.md", "shoal reproduce heterofl-1 --scale smoke"): Scene("tables"),
    ("docs/simulation.md", "shoal simulate*"): Scene("simulations"),
    ("docs/strategies.md", "shoal simulate*"): Elsewhere("tests/simulation/test_own_strategy.py"),
    ("docs/tutorial.md", "git clone REPOSITORY shoal"): _CLONE,
    ("docs/tutorial.md", "make -C shoal install"): _CLONE,
    ("docs/tutorial.md", "source shoal/.venv/bin/activate"): _CLONE,
    ("docs/tutorial.md", "*"): _TEMPLATES,
}  # fmt: skip

_ALL = [
    line
    for path in pages()
    for line in lines_of(path.relative_to(ROOT).as_posix(), path.read_text())
]


def _fits(text: str, row: str) -> bool:
    return text.startswith(row[:-1]) if row.endswith("*") else text == row


def key_of(line: Line) -> tuple[str, str]:
    """The row of the table that the line belongs to; KeyError where there is none."""
    for page, start in PLACES:
        if _fits(line.page, page) and _fits(line.text, start):
            return page, start
    raise KeyError(
        f"{line.page} has {line.text!r}, which is in no scene: say where it is executed, or why "
        f"it is not"
    )


def place_of(line: Line) -> Place:
    """Where the line is executed; KeyError where nobody has said so."""
    return PLACES[key_of(line)]


def all_lines() -> list[Line]:
    """The lines of all pages."""
    return list(_ALL)


def in_scene(name: str) -> list[Line]:
    """The lines of one scene, in the order of pages and lines; each once."""
    found = [line for line in _ALL if place_of(line) == Scene(name)]
    return list({line.text: line for line in found}.values())
