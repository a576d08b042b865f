"""Addresses of brokers: read as RFC 3986 has them, never connected to another host than they name,
and never printed with their password.
"""

import queue
import random
import string
import traceback
from urllib.parse import quote

import numpy as np
import pytest

from broker_server.settings.broker import BrokerConfig
from device_runtime.doctor import examine
from device_runtime.main import run_device
from fleet_protocol.errors import ConfigError, ShoalError
from fleet_protocol.frozen import problems
from fleet_protocol.link import Link
from fleet_protocol.spelling import without_login
from fleet_protocol.transport import BrokerAddress
from tests.brokers import free_port
from tests.refusing_brokers import scripted_broker

SECRET = "GoSungrow"
PLACE = "127.0.0.1:21106"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (f"mqtt://shoal:1#{SECRET}@{PLACE}", "write # as %23"),
        (f"mqtt://shoal:1234#{SECRET}@{PLACE}", "write # as %23"),
        (f"mqtt://shoal:4711?{SECRET}@{PLACE}", r"write \? as %3F"),
        (f"mqtt://shoal:{SECRET}/7@{PLACE}", "write / as %2F"),
        (f"mqtt://shoal:12/{SECRET}@{PLACE}", "write / as %2F"),
        (f"mqtt://shoal:{SECRET} b@{PLACE}", "write a space as %20"),
        (f"mqtt://shoal:se[{SECRET}@{PLACE}", r"write \[ as %5B"),
        (f"mqtt://shoal:#/{SECRET}?@{PLACE}", r"write # as %23, / as %2F, \? as %3F"),
        (f"mqtt://shoal:5%{SECRET}@{PLACE}", "write % as %25"),
        (f"mqtt://{PLACE}/mqtt", "a path, a query or a fragment has no meaning"),
        (f"mqtt://{PLACE}?clean=true", "a path, a query or a fragment has no meaning"),
        (f"mqtt://{PLACE}#x", "a path, a query or a fragment has no meaning"),
        (f"ws://{PLACE}", "scheme 'ws' is unknown.*mqtt and mqtts"),
        (f"tcp://u:{SECRET}@{PLACE}", "scheme 'tcp' is unknown"),
        (f"mqt://{PLACE}", "did you mean 'mqtt'"),
        (PLACE, "it has no scheme"),
        (f"shoal:{SECRET}@{PLACE}", "it has no scheme"),
        ("mqtt://::1:21106", r"IPv6 address must be in brackets, as in mqtt://\[::1\]:1883"),
        ("mqtt://127.0.0.1:99999", "port 99999 is not between 1 and 65535"),
        ("mqtt://127.0.0.1:0", "port 0 is not between"),
        ("mqtt://127.0.0.1:1883 ", "it contains a space"),
        ("mqtt://127.0.0.1:one", "no number for a port"),
        ("mqtt://a\x1bb:1883", "its host has invisible characters"),
        ("mqtt://a\u202eb", "its host has invisible characters"),
        ("mqtt://", "no host"),
        ("", "it has no scheme"),
    ],
)
def test_what_is_wrong_with_an_address_is_named(address, why):
    """One form connected to another host, one printed the password."""
    with pytest.raises(ConfigError, match=why) as refused:
        BrokerAddress.parse(address)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("mqtt://lab", ("lab", 1883, None, None)),
        ("MQTTS://Lab.Example/", ("lab.example", 8883, None, None)),
        ("mqtt://[::1]:21106", ("::1", 21106, None, None)),
        ("mqtt://u@h", ("h", 1883, "u", None)),
        ("mqtt://u:@h", ("h", 1883, "u", "")),
        ("mqtt://u:p:q@h:1", ("h", 1, "u", "p:q")),
        ("mqtt://u:p@ss@h:1", ("h", 1, "u", "p@ss")),
        ("mqtt://u%40x:%23%3F%2F%5B%20@h:1", ("h", 1, "u@x", "#?/[ ")),
    ],
)
def test_the_parts_of_an_address(address, parts):
    """User and password are decoded."""
    read = BrokerAddress.parse(address)
    assert (read.host, read.port, read.username, read.password) == parts


def passwords():
    """Many passwords of letters that mean something in addresses, each with a secret in it."""
    random_source = random.Random(3)
    letters = string.punctuation + " \t" + string.digits + "aäß"
    for _ in range(2000):
        before = "".join(random_source.choices(letters, k=random_source.randrange(6)))
        after = "".join(random_source.choices(letters, k=random_source.randrange(6)))
        yield f"{before}{SECRET}{after}"


def parsed(address):
    """The address, or None with the traceback of its error."""
    try:
        return BrokerAddress.parse(address), ""
    except ConfigError as error:
        return None, "".join(traceback.format_exception(error))


def test_no_password_leads_to_another_host_or_is_printed():
    """Percent-encoded, every one is read; as it is, it is read as it is meant, or refused."""
    refused = 0
    for password in passwords():
        encoded = BrokerAddress.parse(f"mqtt://u:{quote(password, safe='')}@{PLACE}")
        assert (encoded.host, encoded.port, encoded.password) == ("127.0.0.1", 21106, password)
        assert SECRET not in f"{encoded} {encoded!r}"
        plain, error = parsed(f"mqtt://u:{password}@{PLACE}")
        assert SECRET not in error
        if plain is None:
            refused += 1
        else:
            assert (plain.host, plain.port) == ("127.0.0.1", 21106)
            assert plain.password == password or "%" in password
        shown = "".join(password.split())
        assert SECRET not in without_login(f"at mqtt://u:{shown}@{PLACE}: no")
    assert 500 < refused < 2000


def device_file(tmp_path, broker, more=""):
    """A configuration of a board."""
    x = np.zeros((20, 4), np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.zeros(20, np.int64))
    path = tmp_path / "device.toml"
    path.write_text(
        f'fleet = "lab"\ndevice = "pi"\nbroker = "{broker}"\nconnect_timeout_seconds = 0.3\n'
        f'state_dir = "state"\n{more}\n[data]\nkind = "npz"\npath = "data.npz"\n'
    )
    return path


@pytest.mark.parametrize(
    ("address", "more"),
    [
        (f"mqtt://u:{SECRET}@127.0.0.1:{{port}}", ""),
        (f"mqtt://u:{SECRET}@lab.example:{{port}}", ""),
        (f"mqtt://u:{SECRET}@nowhere.invalid:{{port}}", "insecure = true"),
        (f"mqtt://u:{SECRET}@127.0.0.1:{{port}}", "[tls]\nca_file = 'none.pem'"),
        (f"mqtts://u:{SECRET}@127.0.0.1:{{port}}", "[tls]\nca_file = 'none.pem'"),
        (f"mqtt://u:{SECRET}@127.0.0.1:{{port}}", "unknown_key = 1"),
        (f"mqtt://u:{SECRET}@127.0.0.1:{{port}}", "identity = {file = 'none'}"),
        (f"mqtt://u:a/{SECRET}@127.0.0.1:{{port}}", ""),
    ],
)
def test_no_error_of_a_board_prints_its_password(tmp_path, capfd, caplog, address, more):
    """Whatever is wrong: the address, the files, the network, the broker."""
    path = device_file(tmp_path, address.format(port=free_port()), more)
    assert run_device(path) != 0
    findings = [f"{finding.check} {finding.detail}" for finding in examine(path)]
    printed = capfd.readouterr()
    everything = "\n".join([printed.out, printed.err, caplog.text, *findings])
    assert "error:" in everything
    assert SECRET not in everything


def test_no_refusal_of_a_broker_prints_a_password(tmp_path, capfd, caplog):
    """The line names the broker and the reason."""
    with scripted_broker({0x10: b"\x20\3\0\x86\0"}) as url:
        path = device_file(tmp_path, url.replace("//", f"//u:{SECRET}@"))
        assert run_device(path) == 5
    printed = capfd.readouterr()
    assert "Bad user name or password" in printed.err
    assert SECRET not in printed.out + printed.err + caplog.text


def test_no_setting_of_a_server_prints_a_password():
    """Its validation, and the link to its broker."""
    with pytest.raises(ValueError, match="receiver_hosts names") as refused:
        BrokerConfig(url=f"mqtt://u:{SECRET}@h", receivers=0, receiver_hosts=("a",))
    assert SECRET not in problems(refused.value, "[broker]")
    address = BrokerAddress.parse(f"mqtt://u:{SECRET}@127.0.0.1:{free_port()}")
    with pytest.raises(ShoalError) as lost:
        Link(address, "a", queue.SimpleQueue()).connect(0.2)
    assert SECRET not in str(lost.value)
