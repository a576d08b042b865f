"""A server in a process of its own that is killed, as by the kernel, right after a chosen commit of
its store.

python -m tests.broker_server.dying_server <config.json> <broker url> <method of Store> <which call>
[stuck]

`stuck` lets no judgement end, so that it is still being made when the server dies.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import broker_server.service.server
from broker_server.rounds.evaluation import Evaluator
from broker_server.settings.fleet import FleetConfig
from broker_server.store import Store


def dying_store(method: str, call: int) -> type[Store]:
    """A store whose process dies after the given call of a method, or update received, has been
    committed.
    """
    if not hasattr(Store, method):
        raise SystemExit(f"the store has no method {method}")
    calls = 0

    def die_after(self: Store, *args: Any, **settings: Any) -> Any:
        nonlocal calls
        result = getattr(Store, method)(self, *args, **settings)
        calls += len(args[0]) if method == "receive" else 1  # it takes all that came at once
        if calls >= call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return type("DyingStore", (Store,), {method: die_after})


def main() -> None:
    path, url, method, call, *stuck = sys.argv[1:]
    if stuck:
        Evaluator.evaluate = lambda *_: threading.Event().wait(600)  # type: ignore[method-assign,assignment,return-value]
    config = FleetConfig.model_validate_json(Path(path).read_text())
    broker = config.broker.model_copy(update={"url": url})
    broker_server.service.server.Store = dying_store(method, int(call))
    with broker_server.service.server.Server(config.fleet, config.store, broker) as server:
        server.run(config.model_copy(update={"broker": broker}))


if __name__ == "__main__":
    main()
