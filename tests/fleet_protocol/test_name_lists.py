"""Names of labels and columns in messages, in the form in which somebody copies them."""

from fleet_protocol.configuration import read_toml
from fleet_protocol.data.name_lists import toml_list


def test_a_list_of_any_names_reads_back_from_a_configuration(tmp_path):
    """Quotes, backslashes and control characters are escaped, other characters stay."""
    names = ["plain", 'with "quotes"', "C:\\data", "two\nlines", "\x7f", "Größe"]
    path = tmp_path / "device.toml"
    path.write_text(f"columns = {toml_list(names)}\n", encoding="utf-8")
    assert read_toml(path) == {"columns": names}
