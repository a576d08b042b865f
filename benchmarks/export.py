"""What it takes to export a text encoder of 33 million parameters in three tiers, and recurrent layers of 50 steps.

The encoder is MiniLM's with 12 layers (384 units, 30,522 tokens) at widths 1, 0.5 and 0.25, one tier after the other in
one process: its CPU time and its peak of resident memory. The recurrent layers are one of 64 units each, one tier.
Each export is a process of its own; what is measured is all of it, the start of Python and PyTorch included.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.row import Row

ENCODER_CPU_BUDGET_SECONDS, ENCODER_BUDGET_MB, RECURRENT_CPU_BUDGET_SECONDS = 45.0, 1500.0, 20.0
REPOSITORY = Path(__file__).resolve().parents[1]

_EXPORT = """
import json, resource, sys, tempfile
from pathlib import Path
from torch import nn
from models.architecture import architecture
from models.registry import Registry
from models.tier import Tier
from trainer_export.artifact_set import export_architecture
from trainer_export.recipe import Recipe

class Recurrent(nn.Module):
    def __init__(self, kind, cut):
        super().__init__()
        self.layer = kind(12, cut.width("hidden", 64), batch_first=True)
        self.head = nn.Linear(cut.width("hidden", 64), cut.classes(6))

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])

@architecture()
def lstm(cut, *, input_shape=(50, 12), classes=6):
    return Recurrent(nn.LSTM, cut)

@architecture()
def gru(cut, *, input_shape=(50, 12), classes=6):
    return Recurrent(nn.GRU, cut)

name = sys.argv[1]
own = {"lstm": lstm, "gru": gru}
arch = own.get(name) or Registry.zoo().get("minilm_encoder")
settings = {} if name in own else {"pretrained": False, "blocks": 12}
widths = (1.0,) if name in own else (1.0, 0.5, 0.25)
tiers = [Tier(width, settings.get("blocks", 1)) for width in widths]
with tempfile.TemporaryDirectory() as folder:
    export_architecture(arch, settings, tiers, Recipe(), Path(folder), formats=("onnx",))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
"""


def _export(name: str) -> tuple[float, float]:
    """CPU seconds and peak resident megabytes of one export."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "export.py"
        script.write_text(_EXPORT)
        done = subprocess.run(
            [sys.executable, str(script), name],
            env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    cpu, memory = json.loads(done.stdout)
    return float(cpu), float(memory)


def rows() -> list[Row]:
    """CPU time and memory of the exports."""
    cpu, memory = _export("encoder")
    recurrent = {name: _export(name)[0] for name in ("lstm", "gru")}
    return [
        Row("export 33 M parameters, 3 tiers", cpu, "s CPU", ENCODER_CPU_BUDGET_SECONDS),
        Row("export 33 M parameters, resident", memory, "MB", ENCODER_BUDGET_MB),
        *(
            Row(f"export {name.upper()} of 50 steps, a tier", value, "s CPU", RECURRENT_CPU_BUDGET_SECONDS)
            for name, value in recurrent.items()
        ),
    ]
