"""Shoal's exceptions, all with one base class, each with the exit code of the command line.

A message says what failed, for which device, round or tensor, and what to do next.
"""

from enum import Enum
from unicodedata import category

_LONGEST_LINE = 8000  # characters of a text from an untrusted source


class ShoalError(Exception):
    """Base class of every error that is not a bug in Shoal.

    Attributes:
        is_about_model: whether the code of a model has to change. The user of a package cannot do
            that, and gets further advice.
    """

    exit_code = 1
    is_about_model = False


class ConfigError(ShoalError):
    """A file, option or setting that the user gave is wrong."""

    exit_code = 2


class ModelError(ConfigError):
    """A model whose code does not allow what is asked, such as a cut of its width."""

    is_about_model = True


class PlanError(ShoalError):
    """A tier or plan that is impossible for the model, detected before any training starts."""

    exit_code = 2


class ExportError(ShoalError):
    """A graph that cannot be lowered, or whose results do not agree with PyTorch's."""

    exit_code = 3
    is_about_model = True


class ChoiceError(ExportError):
    """An export that fails because of a bound, a loss or a number of processes, not a model."""

    is_about_model = False


class DataError(ShoalError):
    """A data set that is missing, empty or malformed."""

    exit_code = 4


class MismatchError(DataError):
    """Valid data that does not match the fleet's contract."""


class DataChangedError(DataError):
    """Files of a data set changed while they were read, or while their samples were in use."""


class TransportError(ShoalError):
    """The broker cannot be reached, or the other side did not answer in time."""

    exit_code = 5


class BrokerRefusedError(TransportError):
    """The broker refuses a connection, a subscription or a message.

    Attributes:
        code: its reason, see `fleet_protocol.refusals`.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class BlobError(ShoalError):
    """Bytes that are truncated or corrupt, or that differ from the requested ones."""

    exit_code = 6


class StorageError(ShoalError):
    """A disk that is full, or a store that cannot be read or written."""

    exit_code = 7


class RefusalReason(str, Enum):
    """Why one side of the protocol refuses a message of the other; counted under these names."""

    MALFORMED = "malformed"
    UNKNOWN_DEVICE = "unknown-device"
    UNKNOWN_TASK = "unknown-task"
    WRONG_ROUND = "wrong-round"
    LATE = "late"
    OVERSIZED = "oversized"
    BAD_DIGEST = "bad-digest"
    BAD_SHAPE = "bad-shape"
    BAD_DTYPE = "bad-dtype"
    NOT_FINITE = "not-finite"
    BAD_LABELS = "bad-labels"
    TOO_FAR = "too-far"
    TOO_HEAVY = "too-heavy"
    UNSUPPORTED = "unsupported"
    NO_DATA = "no-data"
    DATA_MISMATCH = "data-mismatch"
    DATA_CHANGED = "data-changed"
    NO_SPACE = "no-space"
    FORGED = "forged"
    REPLAYED = "replayed"
    REVOKED = "revoked"
    BAD_SEAL = "bad-seal"
    BAD_SHARES = "bad-shares"
    SUM_OPENED = "sum-opened"
    UNSAFE_GRAPH = "unsafe-graph"
    BUSY = "busy"
    AWAY = "away"
    TOO_MANY = "too-many"
    TOO_LARGE_FOR_BROKER = "too-large-for-broker"
    REFUSED_BY_BROKER = "refused-by-broker"
    FAILED = "failed"


def single_line(text: str) -> str:
    """Return a text from an untrusted source as one short line without control characters."""
    # First, because checking a long text takes as long.
    text = text[:_LONGEST_LINE]
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " for letter in text)


def visible(text: str, *, lines: bool = True) -> str:
    r"""Escape control characters, direction marks and broken letters of a text, as in ``\x1b``.

    Line ends and tabs stay; without `lines` they are escaped, too. All output to a terminal or a
    journal passes through here, so that no file, message or name can move the cursor or overwrite
    other text.

    Example:
        >>> visible("board\x1b[2J 7")
        'board\\x1b[2J 7'
    """
    # Most texts need no change.
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        letter if _is_shown(letter) or letter in kept else ascii(letter)[1:-1] for letter in text
    )


def _is_shown(letter: str) -> bool:
    # Other spaces than the usual one are not printable for Python, but harmless.
    return letter.isprintable() or category(letter) == "Zs"


class RefusedError(ShoalError):
    """A message or update that breaks the protocol; the reason is counted and logged."""

    exit_code = 8

    def __init__(self, reason: RefusalReason, message: str) -> None:
        # Peers choose parts of the message, and it becomes one line of the log.
        super().__init__(single_line(message))
        self.reason = reason
