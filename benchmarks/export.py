"""Costs of exporting a text encoder of 33 million parameters, and recurrent layers of 50 steps.

The encoder is MiniLM's with 12 layers (384 units, 30,522 tokens) at widths 1, 0.5 and 0.25, one
tier after the other in one process: its CPU time and its peak of resident memory. The recurrent
layers are one of 64 units each, one tier. Each export runs in its own process, and the measurement
includes the start of Python and PyTorch.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path

from torch import Tensor, nn

from benchmarks.child import printed
from benchmarks.row import Row
from models.architecture import architecture
from models.cut import Cut
from models.registry import Registry
from models.tier import Tier
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

ENCODER_CPU_BUDGET_SECONDS = 45.0
ENCODER_BUDGET_MB = 1500.0
RECURRENT_CPU_BUDGET_SECONDS = 20.0


class Recurrent(nn.Module):
    """A recurrent layer, and logits of its last step."""

    def __init__(
        self,
        kind: type[nn.RNNBase],
        cut: Cut,
        inputs: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.layer = kind(inputs, cut.width("hidden", 64), batch_first=True)
        self.head = nn.Linear(cut.width("hidden", 64), cut.classes(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [batch, classes], of float32 [batch, steps, inputs]."""
        return self.head(self.layer(x)[0][:, -1])


@architecture()
def lstm(
    cut: Cut,
    *,
    input_shape: tuple[int, int] = (50, 12),
    classes: int = 6,
) -> Recurrent:
    """Build an LSTM."""
    return Recurrent(nn.LSTM, cut, input_shape[1], classes)


@architecture()
def gru(
    cut: Cut,
    *,
    input_shape: tuple[int, int] = (50, 12),
    classes: int = 6,
) -> Recurrent:
    """Build a GRU."""
    return Recurrent(nn.GRU, cut, input_shape[1], classes)


def measured(name: str) -> tuple[float, float]:
    """CPU seconds and peak resident megabytes of this process, which exports one of them."""
    if name == "encoder":
        arch = Registry.zoo().get("minilm_encoder")
        settings = {"pretrained": False, "blocks": 12}
        tiers = [Tier(width, 12) for width in (1.0, 0.5, 0.25)]
    else:
        arch = {"lstm": lstm, "gru": gru}[name]
        settings = {}
        tiers = [Tier(1.0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        export_architecture(
            ExportRequest(arch, settings, tiers, Recipe()),
            Path(folder),
            ExportOptions(formats=("onnx",)),
        )
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def _measured_apart(name: str) -> tuple[float, float]:
    """Measure an export in a separate process, whose peak memory is that of the export."""
    seconds, megabytes = json.loads(printed("-m", "benchmarks.export", name, timeout=1800))
    return seconds, megabytes


def rows() -> list[Row]:
    """CPU time and memory of the exports."""
    cpu, memory = _measured_apart("encoder")
    recurrent = []
    for name in ("lstm", "gru"):
        seconds, _ = _measured_apart(name)
        title = f"export {name.upper()} of 50 steps, a tier"
        recurrent.append(Row(title, seconds, "s CPU", RECURRENT_CPU_BUDGET_SECONDS))
    return [
        Row("export 33 M parameters, 3 tiers", cpu, "s CPU", ENCODER_CPU_BUDGET_SECONDS),
        Row("export 33 M parameters, resident", memory, "MB", ENCODER_BUDGET_MB),
        *recurrent,
    ]


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
