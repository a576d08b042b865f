"""The check of `make dist` sees what is missing from a distribution, and what is too much."""

from tests.packaging.contents import DATA, expected_modules, problems, problems_of_names


def test_a_complete_distribution_has_no_problems():
    names = expected_modules() | {f"{start}x" if start.endswith("/") else start for start in DATA}
    assert len(names) > 400
    assert problems_of_names(names, source=False) == []
    assert problems_of_names(names, source=True) == []


def test_a_faulty_distribution_is_found(tmp_path):
    """A module and a folder of data that are missing, a test, and a key."""
    names = expected_modules() | set(DATA[1:])
    names = (names - {"shoal/client.py"}) | {"tests/test_site.py", "shoal/operator.pem"}
    assert problems_of_names(names, source=False) == [
        "shoal/client.py is missing",
        f"{DATA[0]} is missing",
        "shoal/operator.pem should not be published",
        "tests/test_site.py is not part of the product",
    ]
    assert problems(tmp_path) == [f"{tmp_path} has 0 wheels and 0 source distributions"]
