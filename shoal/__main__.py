"""The command ``shoal``, also as ``python -m shoal`` where scripts are not on the path."""

import signal
import sys

from shoal.packages import hidden_package, leave_working_folder


def main() -> None:
    """Run the command line if it can be imported."""
    problem = hidden_package()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # the command stops what it started and removes temporary files
    try:
        from shoal.cli.main import main as run  # noqa: PLC0415  (what may be hidden)

        run()
    except KeyboardInterrupt:  # interrupted while the modules load
        sys.exit(130)


if __name__ == "__main__":
    leave_working_folder()
    main()
