"""Which module answers which entry, and the run over a file.

A module beside this one that has `HANDLERS`, functions by the prefix of the ids they answer, is
found without a list.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from fleet_protocol.discovery import discover
from fleet_protocol.errors import ShoalError
from tests.conformance.entry import Check, Entry, MismatchError, NotApplicableError, read_entries

__all__ = ["Outcome", "Verdict", "handlers", "run_entry", "run_file"]

Handler = Callable[[Entry, Check], None]


@cache
def handlers() -> Mapping[str, Handler]:
    """What computes an entry, by the prefix of its id; imports torch."""
    return discover("tests.conformance", "HANDLERS")


class Verdict(str, Enum):
    """How an entry ended."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Outcome:
    """The result of one entry.

    Attributes:
        id: of the entry.
        verdict: how it ended.
        detail: what differs, or why it does not apply, or what a reader should know.
    """

    id: str
    verdict: Verdict
    detail: str = ""

    @property
    def line(self) -> str:
        """The result as one line of text."""
        match self.verdict:
            case Verdict.PASS:
                return f"{self.id}: pass" + (f" ({self.detail})" if self.detail else "")
            case Verdict.FAIL:
                return f"{self.id}: FAIL {self.detail}"
            case _:
                return f"{self.id}: not applicable: {self.detail}"


def run_entry(entry: Entry) -> Outcome:
    """Run one entry through the product.

    Args:
        entry: from a file.

    Returns:
        Its result. An entry that lacks something, or that the product refuses, has failed.
    """
    handler = handlers().get(entry.prefix)
    if handler is None:
        known = ", ".join(sorted(handlers()))
        return Outcome(
            entry.id, Verdict.NOT_APPLICABLE, f"nothing answers {entry.prefix!r}; known are {known}"
        )
    check = Check()
    try:
        handler(entry, check)
    except NotApplicableError as error:
        return Outcome(entry.id, Verdict.NOT_APPLICABLE, str(error))
    except MismatchError as error:
        return Outcome(entry.id, Verdict.FAIL, str(error))
    except ShoalError as error:
        return Outcome(entry.id, Verdict.FAIL, f"expected a result got the refusal: {error}")
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # The file is the user's: an entry of another form must not stop the run.
        return Outcome(
            entry.id, Verdict.FAIL, f"expected a complete entry got {type(error).__name__}: {error}"
        )
    if not check.compared:
        return Outcome(
            entry.id, Verdict.FAIL, "expected something to compare got an entry without it"
        )
    return Outcome(entry.id, Verdict.PASS, "; ".join(check.notes))


def run_file(path: Path) -> list[Outcome]:
    """Run every entry of a file.

    Args:
        path: a file of worked examples.

    Returns:
        The results, in the order of the file.

    Raises:
        DataError: the file cannot be read.
    """
    return [run_entry(entry) for entry in read_entries(path)]
