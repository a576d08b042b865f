"""`make fuzz-api`: schemathesis asks the API of a store, as an operator, for what its document
allows and much else.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from broker_server.settings.fleet import ViewConfig
from shoal.view.serving import serving
from tests.shoal.view.stores import made

ENDLESS = "/api/v1/events"


def main(command: str) -> int:
    """Run it; 1 where an answer is no answer, or not one that the document allows."""
    with tempfile.TemporaryDirectory() as folder:
        store = made(Path(folder), hostile=True)
        with serving(store, ViewConfig(port=0, actions=True), steer=lambda *_: "") as address:
            token = (store / "operator.token").read_text().strip()
            asked = [command, "run", f"{address}api/v1/openapi.json", "--exclude-path", ENDLESS]
            bounds = [
                "--phases",
                "coverage,fuzzing",
                "--max-examples",
                "40",
                "--max-time",
                "120",
                "--seed",
                "1",
            ]
            given = ["--header", f"Authorization: Bearer {token}", "--suppress-health-check", "all"]
            return subprocess.run(
                [*asked, *bounds, *given], cwd=folder, timeout=600, check=False
            ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
