"""Checks what a wheel and a source distribution contain: python -m tests.packaging.contents dist."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

__all__ = ["problems"]

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text()))
"""Top-level packages of the product."""

DATA = (
    "device_runtime/self_test_set/",
    "reproduction/tables/heterofl-1.toml",
    "shoal/cli/demo.toml",
    "shoal/flash/files/",
    "shoal/templates/",
    "shoal/view/static/",
)
"""Files that are not modules and that commands need."""

LIMIT_BYTES = 10_000_000


def expected_modules() -> set[str]:
    """The modules of the packages, by their paths."""
    modules = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            modules.add(path.relative_to(ROOT).as_posix())
    return modules


def problems_of_names(names: set[str], *, source: bool) -> list[str]:
    """What is missing from a distribution, and what should not be in it."""
    found = [f"{name} is missing" for name in sorted(expected_modules() - names)]
    for start in DATA:
        if not any(name.startswith(start) for name in names):
            found.append(f"{start} is missing")
    for name in sorted(names):
        top = name.partition("/")[0]
        metadata = ".dist-info" in top or ".egg-info" in top
        if not source and top not in PACKAGES and not metadata:
            found.append(f"{name} is not part of the product")
        if "__pycache__" in name or name.endswith((".pem", ".enrolment", ".db")):
            found.append(f"{name} should not be published")
    return found


def problems(folder: Path) -> list[str]:
    """One line for each fault of the wheel and the source distribution in a folder."""
    wheels = list(folder.glob("shoal-*.whl"))
    sources = list(folder.glob("shoal-*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        return [f"{folder} has {len(wheels)} wheels and {len(sources)} source distributions"]
    with zipfile.ZipFile(wheels[0]) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(sources[0]) as archive:
        members = [member.name for member in archive.getmembers() if member.isfile()]
    in_source = {name.partition("/")[2] for name in members}
    found = [f"wheel: {line}" for line in problems_of_names(in_wheel, source=False)]
    found += [f"sdist: {line}" for line in problems_of_names(in_source, source=True)]
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        if name not in in_source:
            found.append(f"sdist: {name} is missing")
    for path in (wheels[0], sources[0]):
        if path.stat().st_size > LIMIT_BYTES:
            found.append(f"{path.name} has {path.stat().st_size} bytes")
    return found


if __name__ == "__main__":
    faults = problems(Path(sys.argv[1]))
    print(*faults, f"{len(faults)} faults in the contents", sep="\n")
    sys.exit(bool(faults))
