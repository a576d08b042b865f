"""The number of a store, by which two servers of a fleet detect each other."""

import os

import pytest

from broker_server.service.other_servers import describe_store, read_store_number


def make_pipe(path):
    os.mkfifo(path)


def make_link(path):
    path.with_name("elsewhere").write_text("0" * 16)
    path.symlink_to("elsewhere")


FOREIGN = {
    "pipe": make_pipe,
    "link": make_link,
    "bytes": lambda path: path.write_bytes(b"\xff" * 16),
    "escapes": lambda path: path.write_text("\x1b[2J"),
    "long": lambda path: path.write_text("a" * 99_999),
    "empty": lambda path: path.write_text(""),
}


@pytest.mark.attack(
    "file",
    "A store from somebody else has a pipe, a link or invalid bytes in place of its number file",
    "a new number is drawn; no command hangs, and nothing from the link's target is published",
    "2026-11-29",
)
@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_number_is_replaced(make, tmp_path):
    """A server had waited for ever for the other end of the pipe."""
    make(tmp_path / "server-number")
    assert read_store_number(tmp_path) == ""
    described = describe_store(tmp_path)
    assert described.startswith(read_store_number(tmp_path))
    assert len(read_store_number(tmp_path)) == 16
    assert describe_store(tmp_path) == described
