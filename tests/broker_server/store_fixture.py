"""Makes the fixture of a store: two runs of a real server, one finished and one killed in
mid-round, as SQL text.

python -m tests.broker_server.store_fixture <out.sql> [strategy]

Run it in a checkout of the version that the fixture is of; see ``fixtures/README.md``.
"""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import RefusalReason
from fleet_protocol.weights import encode_weights
from tests.broker_server.artifacts import ARCH, CLASSES, INPUTS, export_tiny
from tests.broker_server.peer import Peer, Work, honest, profile, silent
from tests.brokers import embedded_broker

FIXTURES = Path(__file__).parent / "fixtures"
SHOWN_FOLDER = "/srv/shoal"  # stands for the folder that the runs were made in


def declines(peer: Peer, work: Work) -> None:
    """A device without space for any task."""
    peer.refuse(work, RefusalReason.NO_SPACE)


def infinite(peer: Peer, work: Work) -> None:
    """A device whose updates are refused."""
    tensors = {name: np.full_like(value, np.inf) for name, value in work.weights.items()}
    peer.send(work, encode_weights(tensors, work.metadata()))


def make(folder: Path, strategy: str) -> None:
    """Make a store with a finished run and one that was killed once its first update was on the
    disk.

    Args:
        folder: for everything that is made, ``store`` among it.
        strategy: name of the strategy.
    """
    export_tiny(folder / "artifacts")
    rng = np.random.default_rng(5)
    test_set = folder / "test.npz"
    np.savez(
        test_set, x=rng.standard_normal((40, INPUTS), np.float32), y=rng.integers(0, CLASSES, 40)
    )
    with embedded_broker(folder) as broker, contextlib.ExitStack() as devices:
        config = FleetConfig.model_validate(
            {
                "fleet": "lab",
                "store": folder / "store",
                "broker": {"url": broker.url},
                "model": {"artifacts": folder / "artifacts", "arch": ARCH},
                "round": {
                    "rounds": 2,
                    "min_devices": 4,
                    "deadline_seconds": 8,
                    "chunk_bytes": 1024,
                },
                "strategy": {"name": strategy},
                "evaluation": {"data": {"kind": "npz", "path": test_set}, "threads": 1},
            }
        )
        narrow = profile(max_width=0.5)
        wide = Peer("lab", "wide", broker.url, honest(1.0))
        full = Peer("lab", "full", broker.url, declines)
        for peer in (
            wide,
            Peer("lab", "narrow", broker.url, honest(3.0), profile=narrow),
            full,
            Peer("lab", "broken", broker.url, infinite, profile=narrow),
        ):
            devices.enter_context(peer)
        with Server(config.fleet, config.store, config.broker) as server:
            server.run(config)
        # So that the killed server was waiting for both.
        wide.script = silent
        full.script = silent
        again = config.model_copy(update={"seed": 2})
        (folder / "again.json").write_text(again.model_dump_json())
        dying = [
            sys.executable,
            "-m",
            "tests.broker_server.dying_server",
            str(folder / "again.json"),
            broker.url,
        ]
        if subprocess.run([*dying, "receive", "1"], check=False).returncode != -signal.SIGKILL:
            raise RuntimeError("the second run was not killed")


def dump(database: Path, folder: Path) -> str:
    """A database as SQL text, with the folder it was made in replaced.

    Args:
        database: the file.
        folder: as it stands in the configurations of the runs.
    """
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return "\n".join(connection.iterdump()).replace(str(folder), SHOWN_FOLDER) + "\n"


def restore(version: int, folder: Path) -> Path:
    """Write the database of an earlier version, as a server that was stopped leaves it.

    Args:
        version: of the schema.
        folder: of the store; it is made.

    Returns:
        The database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "shoal.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript((FIXTURES / f"store-v{version}.sql").read_text())
    return path


def main() -> None:
    """Make a fixture."""
    out = Path(sys.argv[1])
    strategy = sys.argv[2] if len(sys.argv) > 2 else "heterofl"
    with tempfile.TemporaryDirectory() as made:
        make(Path(made), strategy)
        out.write_text(dump(Path(made) / "store" / "shoal.db", Path(made)))


if __name__ == "__main__":
    main()
