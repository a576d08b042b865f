"""One runtime at a time: two distributions of one import package are found before either is
used.
"""

import os
import subprocess
import sys

import pytest

USES = {
    "a board": "from device_runtime.training.backends import load_runtime; load_runtime()",
    "the server": "from pathlib import Path; from broker_server.rounds.onnx_runtime import "
    "open_graph; "
    "open_graph(Path('eval.onnx'))",
    "the exporter": "from trainer_export.check import open_session; open_session(b'')",
}
CODE = """
from fleet_protocol.errors import ConfigError
try:
    {use}
except ConfigError as error:
    print(error)
"""


def installed(folder, *names):
    """What pip leaves of a distribution: the folder that metadata is read from."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_both_runtimes_together_are_refused_with_the_remedy(tmp_path, use):
    """Whoever needs the runtime says which two there are, and how one of them is got rid of."""
    installed(tmp_path, "onnxruntime", "onnxruntime-training-cpu")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(use=use)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("onnxruntime-training-cpu and onnxruntime are installed together")
    assert (
        "pip uninstall onnxruntime-training-cpu onnxruntime, then install one of them"
        in done.stdout
    )
