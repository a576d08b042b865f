"""The tutorial of docs/own-model.md, followed word for word by real processes."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.brokers import free_port

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "examples" / "tutorial"
SHOAL = Path(sys.executable).with_name("shoal")


def section() -> str:
    return (ROOT / "docs" / "own-model.md").read_text().split("## Ten minutes")[1].split("\n## ")[0]


def commands() -> list[list[str]]:
    """The indented command lines of the section, in order."""
    return [
        line.split() for line in re.findall(r"^    ((?:shoal|python) .*)$", section(), re.MULTILINE)
    ]


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    """As a reader does, who sees the server's greeting before opening the next terminal."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=0.5),
        ):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"shoal up ended with {process.wait(0.1)}")
    pytest.fail("shoal up does not listen")


def test_the_page_shows_the_file_it_talks_about():
    """A reader can copy the model from the page: it is the whole file of the example."""
    shown = re.search(r"```python\n(.*?)```", section(), re.DOTALL).group(1)
    assert shown == (TUTORIAL / "my_models.py").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_works_as_written(tmp_path):
    """Export, data, server, three boards, a run, weights for torch: each command of the page, in
    its order.
    """
    folder = tmp_path / "tutorial"
    shutil.copytree(
        TUTORIAL, folder, ignore=shutil.ignore_patterns("artifacts", "data", "state", "store")
    )
    port = str(free_port())
    for path in folder.glob("*.toml"):
        path.write_text(path.read_text().replace("18830", port))
    background = []
    outputs = {}
    try:
        for words in commands():
            program = SHOAL if words[0] == "shoal" else Path(sys.executable)
            command = [program, *words[1:]]
            if words[1] in {"up", "device"}:
                with (folder / f"{words[-1]}.log").open("wb") as log:
                    background.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log))
                if words[1] == "up":
                    wait_for_port(int(port), background[-1])
                continue
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, f"{words}: {done.stderr}"
            outputs[words[1]] = done.stdout
        status = subprocess.run(
            [SHOAL, "status", "--store", "store", "--json"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for process in background:
            process.terminate()
        codes = [process.wait(60) for process in background]
    assert codes == [0, 0, 0, 0]
    assert json.loads(status.stdout)["evaluation.accuracy"] > 0.9
    assert "w0.25-d1" in outputs["export"]
    assert (folder / "small_cnn.pt").is_file()
