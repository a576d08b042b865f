"""Every file of an artifact set of each zoo model stays the one that was recorded.

Graphs, layouts and initial weights follow from PyTorch's version alone. The rest of a set also
holds what the exporter measured, so it is compared only on the processor of the recording.

`python -m tests.trainer_export.test_sets_unchanged` records them again, which only a commit that
means to change artifact sets may do.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.marking import mostly_slow
from tests.test_unchanged import ROOT, surroundings
from tests.trainer_export.helpers import LOSS_OF, TINY

RECORDED = ROOT / "tests" / "unchanged" / "sets.json"
CODE = "made-from.json"
"""The file of a tier that names the code of the exporter, and so changes with it."""
EXACT = {".onnx", ".safetensors"}
"""Files that do not depend on the processor; so does the layout."""


def option(value: object) -> str:
    """Return a setting as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(str(number) for number in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def exported(arch: str, folder: Path) -> dict[str, str]:
    """Export two tiers of a small model and return the digest of each file by its path."""
    settings = [f"{name}={option(value)}" for name, value in TINY[arch].items()]
    command = [sys.executable, "-m", "shoal", "export", "--arch", arch, "--widths", "1,0.5"]
    command += ["--formats", "onnx", "--out", str(folder)]
    if arch in LOSS_OF:
        command += ["--loss", LOSS_OF[arch]]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    digests: dict[str, str] = {}
    for file in sorted((folder / arch).rglob("*")):
        if file.is_file() and file.name != CODE:
            name = str(file.relative_to(folder))
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def independent_of_the_processor(digests: Mapping[str, str]) -> dict[str, str]:
    """Return the files that every processor writes alike."""
    return {
        name: digest
        for name, digest in digests.items()
        if Path(name).suffix in EXACT or Path(name).name == "layout.json"
    }


@pytest.mark.parametrize("arch", mostly_slow(TINY, lambda arch: arch == "mlp"))
def test_files_of_a_set_are_the_recorded_ones(tmp_path: Path, arch: str) -> None:
    """No file of a set differs from the recorded one in a single bit."""
    recording = json.loads(RECORDED.read_text())
    if recording["torch"] != version("torch"):
        pytest.skip("recorded with another PyTorch, whose programs differ")
    here = exported(arch, tmp_path)
    before = recording["sets"][arch]
    if recording["surroundings"] != surroundings():
        here = independent_of_the_processor(here)
        before = independent_of_the_processor(before)
    assert here == before


if __name__ == "__main__":
    sets: dict[str, dict[str, str]] = {}
    for name in TINY:
        with tempfile.TemporaryDirectory() as folder:
            sets[name] = exported(name, Path(folder))
    recording = {"torch": version("torch"), "surroundings": surroundings(), "sets": sets}
    RECORDED.write_text(json.dumps(recording, indent=1) + "\n")
