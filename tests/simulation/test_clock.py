"""Emulated clocks: the worked example of the specification, the shape of every dependence, and
tables of one's own.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError
from simulation.clock import DeviceClock, Load, load_clock
from simulation.clock_settings import ClockConfig

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "vectors.json"
WIDTHS = (0.0625, 0.125, 0.25, 0.5, 1.0)
TYPES = ("MacBookPro2018", "Xavier", "TX2", "Nano", "RaspberryPi4")
CLOCK = load_clock(ClockConfig())

OWN = """
[types.board.seconds_per_sample]
"1" = 0.4
"0.25" = 0.1
[links]
cable = 100
"""


def own(tmp_path: Path, text: str = OWN, **options):
    (tmp_path / "mine.toml").write_text(text)
    return load_clock(ClockConfig(table="mine.toml", **options).resolved(tmp_path))


def test_w3_through_the_clock():
    """Vector W3: full models take 5.507808 s and 33.988665 s; the Pi at a quarter 4.489196 s: the
    laptop is slowest.
    """
    laptop = CLOCK.device("MacBookPro2018", "wifi")
    pi = CLOCK.device("RaspberryPi4", "bluetooth")
    full = [CLOCK.device_seconds(device, Load(1.0, 64, 10)) for device in (laptop, pi)]
    assert full == pytest.approx([5.507808, 33.9886653867], abs=1e-6)
    quarter = CLOCK.device_seconds(pi, Load(0.25, 64, 10))
    assert quarter == pytest.approx(4.489196, abs=1e-6)


def test_the_shipped_table_is_the_released_one():
    """The two types of the worked example have its step times; their links give its times for the
    whole model.
    """
    if not VECTORS.is_file():
        pytest.skip("worked examples are not beside this checkout")
    entry = next(
        item for item in json.loads(VECTORS.read_text())["vectors"] if item["id"].startswith("W3")
    )
    for name, times in entry["inputs"]["step_time"].items():
        assert CLOCK.table.types[name].seconds_per_sample == {
            float(width): time for width, time in times.items()
        }
    for name, link in (("MacBookPro2018", "wifi"), ("RaspberryPi4", "bluetooth")):
        whole = CLOCK.upload_seconds(CLOCK.device(name, link), Load(1.0))
        assert whole == pytest.approx(entry["inputs"]["full_comm_time"][name], rel=1e-6)
    assert tuple(CLOCK.table.types) == TYPES
    assert {
        kind: tuple(sorted(entry.seconds_per_sample)) for kind, entry in CLOCK.table.types.items()
    } == dict.fromkeys(TYPES, WIDTHS)


@given(st.sampled_from(TYPES), st.floats(0.0625, 1.0), st.floats(0.0625, 1.0))
def test_a_wider_model_never_takes_less_time(kind, one, other):
    """Between the table's widths times keep their order; at the table's widths they are the
    table's.
    """
    device = CLOCK.device(kind, 20)
    times = {
        width: CLOCK.compute_seconds(device, Load(width, 1, 1)) for width in (one, other, *WIDTHS)
    }
    # Rounding in the logarithms is worth some 1e-15 where two widths lie next to each other.
    ordered = [times[width] for width in sorted(times)]
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(ordered))
    assert {width: times[width] for width in WIDTHS} == CLOCK.table.types[kind].seconds_per_sample


def test_a_power_law_is_interpolated_exactly(tmp_path):
    """Times of 0.4 * width stay so in between: half the width takes half the time."""
    clock = own(tmp_path)
    device = clock.device("board", "cable")
    assert clock.compute_seconds(device, Load(0.5, 1, 1)) == pytest.approx(0.2, rel=1e-12)
    assert clock.compute_seconds(device, Load(0.75, 10, 2)) == pytest.approx(6.0, rel=1e-12)


def test_nothing_is_extrapolated(tmp_path):
    """A width beyond the table is an error that says what to add."""
    clock = own(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r'board has no time for width 0\.125.*0\.25 to 1; add "0\.125" = <seconds>',
    ):
        clock.compute_seconds(clock.device("board", 1), Load(0.125, 1, 1))


def test_what_an_upload_costs(tmp_path):
    """Bits of the whole model by the squared width, or the bytes there really are; depth counts
    only for the first.
    """
    assumed = own(tmp_path, full_bits=1_000_000)
    real = own(tmp_path, upload="bytes")
    device = DeviceClock("board", 2.0)
    assert assumed.upload_seconds(device, Load(0.5, upload_bytes=999)) == 0.125
    assert assumed.upload_seconds(device, Load(0.5, depth_share=0.5)) == 0.0625
    assert real.upload_seconds(device, Load(0.5, upload_bytes=125_000, depth_share=0.5)) == 0.5
    with pytest.raises(ConfigError, match="size of the update"):
        real.upload_seconds(device, Load(0.5))


def test_downloads_count_where_they_are_to(tmp_path):
    """A device's time is download, computing and upload; the first only on request."""
    device = DeviceClock("board", 1.0)
    sizes = {"upload_bytes": 125_000, "download_bytes": 250_000}
    free = own(tmp_path, upload="bytes").device_seconds(device, Load(1.0, 5, 2, **sizes))
    paid = own(tmp_path, upload="bytes", download=True).device_seconds(
        device, Load(1.0, 5, 2, depth_share=0.5, **sizes)
    )
    assert free == pytest.approx(4.0 + 1.0)
    assert paid == pytest.approx(2.0 + 2.0 + 1.0)
    assumed = own(tmp_path, full_bits=1_000_000, download=True)
    assert (
        assumed.download_seconds(device, Load(0.5))
        == assumed.upload_seconds(device, Load(0.5))
        == 0.25
    )


def test_the_fleet_of_methods():
    """Specification 4.4: five types and four links, so that 20 devices have each type once on each
    link.
    """
    assert tuple(CLOCK.table.types) == TYPES
    assert tuple(CLOCK.table.links.values()) == (80, 40, 20, 15)


def test_names_are_looked_up():
    """A link is a name or a rate; what the table lacks is an error with a suggestion."""
    assert CLOCK.device("Nano", "lte") == CLOCK.device("Nano", 20) == DeviceClock("Nano", 20.0)
    with pytest.raises(ConfigError, match=r"no device type 'Nanno'; did you mean 'Nano'\?"):
        CLOCK.device("Nanno", 20)
    with pytest.raises(
        ConfigError, match=r"no link 'zigbee'; it has wifi, unnamed, lte, bluetooth .*\[links\]"
    ):
        CLOCK.device("Nano", "zigbee")
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="positive rate"):
            CLOCK.device("Nano", rate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[types.b]\nseconds_per_sampel = {"1" = 1}',
            r"types\.b\.seconds_per_sampel'; did you mean 'seconds_per_sample'",
        ),
        (
            '[types.b]\nseconds_per_sample = {"1" = 1}\n[link]\na = 1',
            r"unknown key 'link'; did you mean 'links'",
        ),
        ('[types.b]\nseconds_per_sample = {"2" = 1}', r"less than or equal to 1"),
        ('[types.b]\nseconds_per_sample = {"1" = 0}', r"greater than 0"),
        ("[types.b]\nseconds_per_sample = {}", r"at least 1 item"),
        ("[links]\nx = 1", r"types: Field required"),
    ],
)
def test_a_wrong_table_is_explained(tmp_path, text, message):
    """Mistakes in a table are found when it is read, and named."""
    with pytest.raises(ConfigError, match=message):
        own(tmp_path, text)


def test_a_table_that_is_not_there():
    """A misspelt name and a missing file are different mistakes."""
    with pytest.raises(ConfigError, match="unknown clock table 'baords'; use 'boards'"):
        load_clock(ClockConfig(table="baords"))
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_clock(ClockConfig(table="nowhere.toml"))
    assert ClockConfig().resolved(Path("/x")).table == "boards"
