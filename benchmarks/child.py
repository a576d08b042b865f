"""Runs a part of a benchmark in a separate process, to measure time and memory of that part."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def printed(*arguments: str, timeout: float = 300) -> str:
    """Run Python in the repository with some arguments, and return its output.

    Raises:
        RuntimeError: it failed; the message is the end of its error output.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=REPOSITORY,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout
