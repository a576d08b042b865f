"""A broker that takes smaller packets than Shoal sends: refused before the run, in words, and what
fits is used.
"""

import pytest

from fleet_protocol.errors import ConfigError
from tests.brokers import mosquitto_broker
from tests.fleet.conftest import Watcher, run


def test_chunks_beyond_the_largest_packet_are_refused_before_the_run(ground, tmp_path):
    """Mosquitto says what it takes, and drops larger packets without a word: devices would wait for
    them in vain.
    """
    with mosquitto_broker(tmp_path, more="max_packet_size 40000") as broker:
        with pytest.raises(
            ConfigError,
            match=r"40,000 bytes.*chunks of 98,304; set round\.chunk_bytes.*max_packet_size",
        ):
            run(ground.config(broker.url, rounds=1), Watcher())
        with ground.fleet(broker.url):
            assert (
                run(ground.config(broker.url, rounds=1, chunk_bytes=32_768), Watcher()).status
                == "finished"
            )
