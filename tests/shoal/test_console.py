"""What devices and the store say is text, never markup."""

import io

import pytest
from rich.console import Console

from fleet_protocol import control
from fleet_protocol.errors import RefusalReason
from shoal.cli.console import print_rows
from shoal.cli.progress import RunDisplay

DETAIL = "name its set in [own_model] of this board [/bold]"


def test_what_a_device_says_is_shown_as_it_is():
    """A word in brackets is neither swallowed nor an error."""
    file = io.StringIO()
    display = RunDisplay(Console(file=file, width=200), "run")
    refused = control.UpdateRefused(
        run="r", seconds=1.0, round=1, device="d", by="device", reason=RefusalReason.UNSUPPORTED, detail=DETAIL
    )
    display.show(refused)
    display.show(control.RoundAbandoned(run="r", seconds=1.0, round=1, reason=DETAIL, again=True))
    assert file.getvalue().count(DETAIL) == 2


def test_cells_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]):
    """So are the notes of a round in a table."""
    print_rows("rounds", [{"note": DETAIL}], empty="none")
    assert DETAIL in capsys.readouterr().out
