"""The tutorials with models of transformers and timm, followed word for word by real processes."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.brokers import free_port

ROOT = Path(__file__).parents[2]
_PATIENCE = 900  # seconds for one command
_BOARDS = 6
_PORT = "18830"  # of the pages
_STARTING = 60  # seconds until a server listens


@dataclass(frozen=True)
class Tutorial:
    """A page, the folder of its files, and what it must reach."""

    page: str
    folder: str
    arch: str
    accuracy: float


TUTORIALS = (
    Tutorial("finetune-text.md", "finetune-text", "bert", 0.9),
    Tutorial("finetune-pictures.md", "finetune-pictures", "vit_tiny_patch16_224", 0.6),
)


def commands(page: str) -> list[list[str]]:
    """Return the commands of a page, in words."""
    text = (ROOT / "docs" / page).read_text()
    return [shlex.split(line) for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]


@contextmanager
def running(words: list[str], folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside the others until the end of the block."""
    with (folder / log).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_STARTING)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server listens, as a reader does before opening the next terminal."""
    deadline = time.monotonic() + _STARTING
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"shoal up ended with {process.wait(0.1)}")
    pytest.fail("shoal up does not listen")


@pytest.mark.packages
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.folder)
def test_a_tutorial_works_as_written(tutorial: Tutorial, tmp_path: Path) -> None:
    """Six boards of three sizes train, and the package loads what the page writes."""
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    folder = tmp_path / tutorial.folder
    kept = shutil.ignore_patterns("artifacts", "data", "state", "store", "pi-*")
    shutil.copytree(ROOT / "examples" / tutorial.folder, folder, ignore=kept)
    port = free_port()
    printed = ""
    with ExitStack() as beside:
        for program, *words in commands(tutorial.page):
            for path in folder.glob("*.toml"):
                path.write_text(path.read_text().replace(_PORT, str(port)))
            if program == "cd":
                continue
            command = ["shoal", *words]
            if words[0] in {"up", "device"}:
                process = beside.enter_context(running(command, folder, f"{words[-1]}.log"))
                if words[0] == "up":
                    wait_for_port(port, process)
                continue
            started = [sys.executable, *(words if program == "python" else ["-m", *command])]
            done = subprocess.run(
                started,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
            printed += done.stdout
        status = read_status(folder)
    assert status["run.status"] == "finished"
    assert status["evaluation.accuracy"] > tutorial.accuracy
    devices = {path.stem for path in folder.glob("pi-*.toml")}
    assert len(devices) == _BOARDS
    assert not [name for name in status if name.startswith("refusals")]
    for line in shown_lines(tutorial.page):
        assert line in printed, line


def read_status(folder: Path) -> dict[str, object]:
    """Return the status of the newest run."""
    words = ["-m", "shoal", "status", "--store", "store", "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, check=True, timeout=_PATIENCE
    )
    status: dict[str, object] = json.loads(done.stdout)
    return status


def shown_lines(page: str) -> list[str]:
    """Return the lines of Python that the page shows as printed by `export-weights`."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^(?:import|from|model =) .*$", text, re.MULTILINE)
