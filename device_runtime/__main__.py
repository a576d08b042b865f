"""``python -m device_runtime --config device.toml``, for boards without typer and rich."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  (no bundle lets it come so far; a copied folder does)
    version = sys.version.split()[0]
    sys.exit(f"error: this is Python {version}, and Shoal needs 3.10 or newer: install one")

from device_runtime.main import main

if __name__ == "__main__":
    sys.exit(main())
