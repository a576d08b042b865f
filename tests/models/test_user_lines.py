"""The first line of an error says the reason."""

import pytest

from models.user_lines import first_line


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("sizes differ\n4 and 5", "ValueError: sizes differ"),
        (
            "Validation error for 'sizes':\n    ValueError: 64 is not a multiple of 5\nmore",
            "ValueError: Validation error for 'sizes': ValueError: 64 is not a multiple of 5",
        ),
        ("Error:\n", "ValueError: Error:"),
        ("", "ValueError: "),
    ],
)
def test_a_line_that_announces_the_reason_has_it_beside(message: str, shown: str) -> None:
    """As the errors of configurations do, whose first line names only a validator."""
    assert first_line(ValueError(message)) == shown
