"""Option values and texts: what a user types becomes values, or an error that shows the form."""

import re

import pytest

from fleet_protocol.errors import ConfigError
from shoal.cli.console import bytes_text, count_text, seconds_text
from shoal.cli.options import parse_floats, parse_ints, parse_seconds, parse_settings, parse_shares
from tests.gallery.two_inputs import two_inputs


def test_widths_may_be_fractions():
    """1/16 is easier to read than 0.0625."""
    assert parse_floats("--widths", "1, 0.5,1/16") == (1.0, 0.5, 0.0625)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1/0", "1/x"])
def test_other_widths_are_errors(text):
    """The error names the option and shows an example."""
    with pytest.raises(ConfigError, match=r"--widths: .*1,0\.5,1/16"):
        parse_floats("--widths", text)


def test_depths_are_whole_numbers():
    """A depth of 2.5 blocks does not exist."""
    assert parse_ints("--depths", "2,4") == (2, 4)
    with pytest.raises(ConfigError, match="--depths"):
        parse_ints("--depths", "2.5")


def test_durations_have_a_unit():
    """Seconds, minutes or hours; anything else is an error that shows the form."""
    assert [parse_seconds("--budget", text) for text in ("5s", "90m", "1.5h")] == [5, 5400, 5400]
    for text in ("8", "8x", "h", "-1h"):
        with pytest.raises(ConfigError, match=r"--budget: .* for example, write 90m or 8h"):
            parse_seconds("--budget", text)


def test_settings_become_values():
    """Numbers, lists, truth and text each become what the builder expects."""
    given = ["channels=32,64", "scaler=false", "norm=sbn", "classes=10", "rate=0.5", "one=7,"]
    assert parse_settings("--set", given) == {
        "channels": (32, 64),
        "scaler": False,
        "norm": "sbn",
        "classes": 10,
        "rate": 0.5,
        "one": (7,),
    }


def test_a_list_may_have_brackets():
    """As Python and JSON write one; the shape of a sample is often copied from there."""
    given = [
        "input_shape=[3, 64, 64]",
        "one=[7]",
        "none=[]",
        "names=[sbn, none]",
        "pairs=[[1, 2], [3]]",
    ]
    assert parse_settings("--set", given) == {
        "input_shape": (3, 64, 64),
        "one": (7,),
        "none": (),
        "names": ("sbn", "none"),
        "pairs": ((1, 2), (3,)),
    }


def test_a_setting_may_be_a_table():
    """As the shapes of several inputs are; for what is none the model shows one, which is taken."""

    def chosen(table):
        return two_inputs.row(parse_settings("--set", [f"input_shape={table}"])).shapes

    assert chosen('{"crossed": [2], "pixels": [1, 8, 8]}') == {"crossed": (2,), "pixels": (1, 8, 8)}
    for wrong in ("{crossed: 2, pixels: 1x8x8}", "1,8,8"):
        with pytest.raises(
            ConfigError, match=r"two_inputs: input_shape = .* does not name the inputs"
        ) as refused:
            chosen(wrong)
        assert chosen(str(refused.value).partition("for example, ")[2]) == two_inputs.row().shapes


@pytest.mark.parametrize("text", ["channels", "=3", ""])
def test_settings_without_a_name_are_errors(text):
    """The error shows the form."""
    with pytest.raises(ConfigError, match="name=value"):
        parse_settings("--set", [text])


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (bytes_text(999), "999 B"),
        (bytes_text(1_234_567), "1.23 MB"),
        (bytes_text(5e12), "5000.00 GB"),
        (count_text(9_999), "9999"),
        (count_text(80_500_000), "80.50 M"),
        (count_text(12_345), "12.35 k"),
        (seconds_text(None), "-"),
        (seconds_text(0.5), "0.50 s"),
        (seconds_text(75), "1 min 15 s"),
    ],
)
def test_figures_for_people(shown, text):
    """Units grow with the value."""
    assert shown == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5,x", "--trained: 'x' is not a number; for example, write 1,0.5,head"),
        ("1.5", "--trained: 1.5 is not a share in (0, 1]; for example, write 1,0.5,head"),
        ("0", "--trained: 0 is not a share in (0, 1]; for example, write 1,0.5,head"),
        ("", "--trained: '' is not a number; for example, write 1,0.5,head"),
    ],
)
def test_a_wrong_share_is_answered_with_an_example_of_shares(text, message):
    """Which has the name of the head, too."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_shares("--trained", text)
    assert parse_shares("--trained", "1, 1/2,head") == (1.0, 0.5, 0.0)
