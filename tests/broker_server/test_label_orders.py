"""Boards that say different labels for themselves do not train one model."""

from contextlib import closing

import pytest

from broker_server.rounds.fleet import Fleet
from broker_server.rounds.reporting import Reporter
from broker_server.service.data_findings import EVENT
from broker_server.service.label_orders import LabelOrders
from broker_server.store import Store
from fleet_protocol.data.facts import SourceFacts
from fleet_protocol.messages import DeviceProfile, DeviceStatus
from tests.broker_server.peer import profile


@pytest.fixture
def store(tmp_path):
    with closing(Store(tmp_path)) as opened:
        yield opened


def say(fleet, device, *labels, orders=None, examples=10):
    """A device comes, or says other labels of its own."""
    facts = SourceFacts(labels=labels, labels_said=bool(labels))
    said = profile(labels_digest=facts.labels_digest, examples=examples)
    fleet.receive(DeviceStatus(fleet="lab", device=device, online=True, state="idle"))
    fleet.receive(DeviceProfile(fleet="lab", device=device, profile=said))
    if orders is not None:
        orders.check(device)


def test_a_board_with_other_labels_than_the_first_is_declined_by_name(store):
    """Another order or other names; the same, or none of its own, is asked; each is noted once."""
    fleet = Fleet()
    say(fleet, "attic", "ant", "bee")
    orders = LabelOrders(fleet, Reporter("run", store), compared=True)
    say(fleet, "barn", "bee", "ant", orders=orders)
    say(fleet, "cellar", "ant", "bee", orders=orders)
    say(fleet, "den", orders=orders)
    assert [*fleet.profiles()] == ["attic", "cellar", "den"]
    assert "are not those of attic, or are in another order" in fleet.why_away("barn")
    say(
        fleet, "barn", "bee", "ant", orders=orders, examples=11
    )  # other data, and still other labels
    assert "barn" not in fleet.profiles()
    assert [line.device for line in store.events() if line.kind == EVENT] == ["barn"]
    say(fleet, "barn", "ant", "bee", orders=orders)
    assert "barn" in fleet.profiles()


def test_the_first_board_may_mend_its_labels(store):
    """Its order holds, whatever it is; who agrees with the new one is asked again, who does not no
    longer.
    """
    fleet = Fleet()
    for device, labels in (
        ("attic", ("ant", "bee")),
        ("barn", ("bee", "ant")),
        ("cellar", ("ant", "bee")),
    ):
        say(fleet, device, *labels)
    orders = LabelOrders(fleet, Reporter("run", store), compared=True)
    assert [*fleet.profiles()] == ["attic", "cellar"]
    say(fleet, "attic", "bee", "ant", orders=orders)
    assert [*fleet.profiles()] == ["attic", "barn"]
    say(fleet, "attic", orders=orders)  # without any of its own the next one's hold
    say(fleet, "cellar", "ant", "bee", orders=orders)
    assert [*fleet.profiles()] == ["attic", "cellar"]


def test_labels_may_differ_where_a_contract_names_them(store):
    """Boards are matched by name then."""
    fleet = Fleet()
    orders = LabelOrders(fleet, Reporter("run", store), compared=False)
    say(fleet, "attic", "ant", "bee", orders=orders)
    say(fleet, "barn", "bee", "ant", orders=orders)
    assert [*fleet.profiles()] == ["attic", "barn"]


def test_a_profile_without_labels_has_the_bytes_as_before():
    """Most boards name none."""
    assert b"labels_digest" not in profile().to_bytes()
