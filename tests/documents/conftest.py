"""Fixtures of other folders that the scenes of the documents need: a small fleet, empty wheels, a
card's image.
"""

from tests.broker_server.conftest import artifacts, config, fleet, test_set, url
from tests.shoal.flash.conftest import hollow
from tests.shoal.flash.test_seed import boot, card

__all__ = ["artifacts", "boot", "card", "config", "fleet", "hollow", "test_set", "url"]
