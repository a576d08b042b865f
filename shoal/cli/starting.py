"""Reads the options of `shoal export` about initial weights, and prints what a model took."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fleet_protocol.errors import ConfigError
from shoal.cli.console import error_console, print_rows
from shoal.extras import needs
from shoal.store_folder import is_store
from trainer_export.coverage import LEAST_SHARE, Coverage, Group
from trainer_export.start import InitialWeights
from trainer_export.start_files import read_start


def read_start_option(
    path: Path | None,
    pairs: Sequence[str],
    *,
    partial: bool,
    least_share: float | None,
    as_json: bool,
) -> InitialWeights | None:
    """Return what the model starts from; None if it is drawn.

    Args:
        path: path of a file, of the folder of a checkpoint, or of a store.
        pairs: names there and in the model, as THEIRS=OURS.
        partial: whether the model may take only what fits.
        least_share: smallest share of tensors that it must take; None for the default.
        as_json: whether standard output is for JSON, and the table goes to standard error.
    """
    if path is None:
        return None
    if least_share is not None and not partial:
        raise ConfigError("--start-share applies only to --start-partial; give both, or neither")
    return InitialWeights(
        _tensors(path),
        str(path),
        [_pair(text) for text in pairs],
        partial,
        LEAST_SHARE if least_share is None else least_share,
        lambda coverage: _print_coverage(coverage, as_json=as_json),
    )


def _tensors(path: Path) -> Mapping[str, Any]:
    """Read the tensors of a store, a checkpoint or a file."""
    if not is_store(path):
        return read_start(path)
    # An export from other files needs no packages of a server.
    with needs("server"):
        from broker_server.store import Store  # noqa: PLC0415  (an extra)
        from broker_server.store.export import load_version  # noqa: PLC0415
    with closing(Store(path, read_only=True)) as opened:
        return load_version(opened).weights


def _pair(text: str) -> tuple[str, str]:
    theirs, equals, ours = text.partition("=")
    if not equals or not theirs:
        raise ConfigError(
            "--start-name: give THEIRS=OURS, for example 'model.*=*', or 'head.*=' to leave tensors"
            " out"
        )
    return theirs, ours


def _print_coverage(coverage: Coverage, *, as_json: bool) -> None:
    """Print which tensors were taken, which were left, and which stayed random."""
    rows: list[dict[str, str]] = []
    # Names that differ only in numbers form one group, so that a large model prints few rows.
    for outcome, groups in coverage.groups().items():
        for group in groups:
            rows.append(_row(outcome, group))
    if as_json:
        for row in rows:
            line = f"{row['outcome']}: {row['tensor']} ({row['count']}) {row['why']}".rstrip()
            error_console().print(line, markup=False, highlight=False, soft_wrap=True)
        return
    title = (
        f"{coverage.source}: {len(coverage.taken)} tensors taken, {len(coverage.left)} left,"
        f" {len(coverage.random)} random"
    )
    print_rows(title, rows, empty="")


_OUTCOMES = {"taken": "taken", "left": "left", "random": "stayed random"}


def _row(outcome: str, group: Group) -> dict[str, str]:
    return {
        "outcome": _OUTCOMES[outcome],
        "tensor": group.name,
        "count": str(group.tensors),
        "why": group.reason,
    }
