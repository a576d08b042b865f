"""The report: every number on the page is in the JSON, and the page needs nothing but itself."""

import json

import pytest

from shoal.cli.report import Arm, DevicePoint, Report, RoundPoint, write_report


def arm(key, accuracies, devices=("a", "b")):
    points = tuple(
        RoundPoint(
            number=number,
            accuracy=accuracy,
            loss=0.5,
            seconds=2.0,
            devices=tuple(DevicePoint(name, "w1.00-d1", 10, 0.3, None, 0.5) for name in devices),
        )
        for number, accuracy in enumerate(accuracies, 1)
    )
    return Arm(key, key.title(), "about <it>", points, 2_000_000, 1_990_000, 9.0, {"not-finite": 2})


@pytest.fixture
def report():
    return Report(
        title="A & B",
        data="digits",
        arch="conv",
        devices={"a": "w1.00-d1", "b": "w0.50-d1"},
        seed=3,
        seconds=20.0,
        settings={"rounds": "2"},
        arms=(arm("global", [0.5, 0.75]), arm("all_small", [0.4, None]), arm("exclusive", [])),
    )


def test_json_has_what_programs_read(report, tmp_path):
    """The keys a script relies on, with the main run's figures."""
    _, numbers = write_report(report, tmp_path)
    found = json.loads(numbers.read_text())
    assert found["accuracy"] == {"global": 0.75, "all_small": 0.4, "exclusive": None}
    assert {
        key: found[key]
        for key in ("rounds", "devices", "wire_bytes", "payload_bytes", "seconds", "seed")
    } == {
        "rounds": 2,
        "devices": 2,
        "wire_bytes": 2_000_000,
        "payload_bytes": 1_990_000,
        "seconds": 20.0,
        "seed": 3,
    }


def test_page_stands_alone_and_escapes(report, tmp_path):
    """Plots are inside, nothing is loaded from elsewhere, and names cannot become markup."""
    page, _ = write_report(report, tmp_path)
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "A &amp; B" in text
    assert "about &lt;it&gt;" in text
    assert 'src="http' not in text
    assert "0.7500" in text
    assert "2 not-finite" in text
