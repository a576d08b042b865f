"""``python -m device_runtime --config device.toml``, for boards without typer and rich."""

import sys

from device_runtime.main import main

if __name__ == "__main__":
    sys.exit(main())
