"""``make mutants``: mistakes put on purpose where they would be the quietest, and those that no
test noticed.

mutmut changes one expression at a time and runs the tests that reach it; ``[tool.mutmut]`` in
pyproject.toml says where and with which tests. What survives is printed, with the reason why it is
no mistake if ``mutants.toml`` beside this file knows one. A survivor without a reason fails the
command: write a test that finds it.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MUTMUT = Path(sys.executable).with_name("mutmut")
REASONS = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Survivor:
    """A change that no test noticed.

    Attributes:
        name: as mutmut calls it.
        function: module and name of what was changed.
        status: why it counts as surviving: ``survived``, ``timeout``, ``no tests``, ...
        was: the changed lines before.
        becomes: and after.
    """

    name: str
    function: str
    status: str
    was: str
    becomes: str


@dataclass
class Reason:
    """Why some changes are no mistakes.

    Attributes:
        why: in words.
        change: the changed text.
        into: what it may become.
        function: where; everywhere if empty.
        used: how many survivors it explains.
    """

    why: str
    change: str
    into: Sequence[str]
    function: str = ""
    used: int = field(default=0, compare=False)

    def explains(self, survivor: Survivor) -> bool:
        """Whether one of the changes it allows, at one place, is the whole of what was changed."""
        if self.function not in {"", survivor.function}:
            return False
        places = [found.start() for found in re.finditer(re.escape(self.change), survivor.was)]
        return any(
            survivor.was[:place] + text + survivor.was[place + len(self.change) :]
            == survivor.becomes
            for place in places
            for text in self.into
        )


def function_of(name: str) -> str:
    """``models.plan.xǁPlanǁslice__mutmut_3`` is about ``models.plan.Plan.slice``."""
    module, _, mangled = name.rpartition("__mutmut_")[0].rpartition(".")
    return f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def mutmut(*arguments: str) -> str:
    """Output of a short mutmut command."""
    return subprocess.run([MUTMUT, *arguments], check=True, capture_output=True, text=True).stdout


def survivors() -> Iterator[Survivor]:
    """What the last run left alive."""
    for line in mutmut("results").splitlines():
        name, status = line.strip().split(": ")
        changed = [
            row for row in mutmut("show", name).splitlines() if not row.startswith(("---", "+++"))
        ]
        was, becomes = (
            "\n".join(row[1:].strip() for row in changed if row.startswith(sign)) for sign in "-+"
        )
        yield Survivor(name, function_of(name), status, was, becomes)


def main() -> int:
    """Run, print what survived, and count those that nobody can explain."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    if gone := [
        path for path in settings["only_mutate"] if not Path(path).is_file()
    ]:  # mutmut would not say so
        print(
            f"there is no {', '.join(gone)}: correct only_mutate of [tool.mutmut] in pyproject.toml"
        )
        return 2
    shutil.rmtree(
        "mutants", ignore_errors=True
    )  # what it keeps there does not know that a test has changed
    shown = (
        None if sys.stdout.isatty() else subprocess.PIPE
    )  # it draws a picture of its progress, again and again
    done = subprocess.run([MUTMUT, "run", *sys.argv[1:]], check=False, stdout=shown, text=True)
    if done.returncode:
        print(done.stdout or "")
        return done.returncode
    reasons = [Reason(**entry) for entry in tomllib.loads(REASONS.read_text())["no_mistake"]]
    found = list(survivors())
    unexplained = 0
    for survivor in found:
        reason = next((reason for reason in reasons if reason.explains(survivor)), None)
        if reason is None:
            unexplained += 1
        else:
            reason.used += 1
        print(f"\n{survivor.name}: {survivor.status}")
        print("\n".join(f"  - {line}" for line in survivor.was.splitlines()))
        print("\n".join(f"  + {line}" for line in survivor.becomes.splitlines()))
        print(f"  {'NO TEST NOTICES' if reason is None else f'no mistake: {reason.why}'}")
    for reason in reasons:
        if not reason.used:
            print(
                f"\nexplains nothing any more, remove it from {REASONS.name}: {reason.change!r} "
                f"({reason.why})"
            )
    print(f"\n{len(found)} survived, {unexplained} of them without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
