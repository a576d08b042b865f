"""What ran where: the table of docs/support.md, made of `docs/platforms.json`.

A whole suite (`make test`, `test-installed`, `test-training`, `arm`) that ends without a failure
leaves its date, and what it ran on, in `build/platforms`; `python -m tests.documents.platforms`, a
part of `make docs`, takes them over into both. What a row says beside that is written by hand.
"""

import datetime as dt
import importlib.metadata
import json
import platform
import re
import subprocess
from pathlib import Path

__all__ = [
    "HEAD",
    "PAGE",
    "ROWS",
    "SUITES",
    "ended",
    "read_rows",
    "rewritten",
    "table_of",
    "taken_over",
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
ROWS = ROOT / "docs" / "platforms.json"
FRESH = ROOT / "build" / "platforms"
HEAD = "| part | where | emulated or hardware | date | what ran |\n|---|---|---|---|---|\n"
_TABLE = re.compile(r"(?<=## Runs by platform\n\n).*?\n(?=\n)", re.DOTALL)
_KEYS = ("part", "where", "how", "date", "ran")
# By pytest's marks.
SUITES = {
    "not slow and not installed and not arm": "test",
    "installed": "test-installed",
    "ort_training": "test-training",
    "arm": "arm",
}


def _where(suite: str) -> str:
    """This machine, or the one that the suite emulates."""
    if suite == "arm":
        said = subprocess.run(
            ["qemu-system-aarch64", "--version"], capture_output=True, text=True, check=False
        ).stdout
        version = re.search(r"version ([\d.]+)", said)
        return (
            f"aarch64, qemu-system-aarch64 {version[1] if version else ''} `-M virt`, Debian "
            f"13, Python 3.13"
        )
    names = ("torch", "onnxruntime", "onnxruntime-training-cpu")
    found = {
        each.metadata["Name"]: each.version
        for name in names
        for each in importlib.metadata.distributions(name=name)
    }
    system = platform.freedesktop_os_release()
    machine = {"x86_64": "x86-64"}.get(platform.machine(), platform.machine())
    python = ".".join(platform.python_version_tuple()[:2])
    packages = [f"{name} {version.partition('+')[0]}" for name, version in found.items()]
    return ", ".join(
        [
            machine,
            f"{system['NAME'].partition(' ')[0]} {system['VERSION_ID']}",
            f"Python {python}",
            *packages,
        ]
    )


def ended(marks: str, folder: Path = FRESH) -> None:
    """A whole suite has passed, which pytest knows by its marks."""
    if marks in SUITES:
        suite = SUITES[marks]
        folder.mkdir(parents=True, exist_ok=True)
        how = "emulated" if suite == "arm" else "hardware"
        found = {
            "where": _where(suite),
            "how": how,
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        }
        (folder / f"{suite}.json").write_text(json.dumps(found))


def read_rows(path: Path = ROWS) -> list[dict[str, str]]:
    """The stored runs, a row for each."""
    found: list[dict[str, str]] = json.loads(path.read_text())
    return found


def taken_over(rows: list[dict[str, str]], folder: Path = FRESH) -> list[dict[str, str]]:
    """The rows with what suites have left in a folder since."""
    fresh = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [row | fresh.get(row.get("suite", ""), {}) for row in rows]


def table_of(rows: list[dict[str, str]]) -> str:
    """The table, as the page has it."""
    return HEAD + "".join(f"| {' | '.join(row[key] for key in _KEYS)} |\n" for row in rows)


def rewritten(page: str, rows: list[dict[str, str]]) -> str:
    """The page with another table."""
    return _TABLE.sub(lambda _: table_of(rows), page, count=1)


if __name__ == "__main__":
    ROWS.write_text(json.dumps(taken_over(read_rows()), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(rewritten(PAGE.read_text(), read_rows()))
