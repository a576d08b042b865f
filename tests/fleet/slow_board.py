"""A board whose processor is slow: an agent that waits before every step of its training.

python -m tests.fleet.slow_board <seconds> -m device_runtime --config device.toml
"""

import runpy
import sys
import time

from device_runtime.training.hooks import Hooks


def main() -> None:
    """Slow the steps down, and run the agent with the arguments that follow the seconds."""
    seconds = float(sys.argv[1])
    go_on = Hooks.go_on

    def wait_and_go_on(hooks: Hooks) -> None:
        time.sleep(seconds)
        go_on(hooks)

    Hooks.go_on = wait_and_go_on  # type: ignore[method-assign]
    module = sys.argv[3]
    sys.argv = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
