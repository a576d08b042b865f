"""Exporting again: what would come out the same is taken, nothing is dropped unasked, and nothing
is left over.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError
from models.architecture import architecture
from models.cut import Cut
from models.registry import Registry
from models.tier import Tier
from tests.trainer_export.helpers import TINY
from tests.trainer_export.test_artifact_set import files_under
from trainer_export.artifact_set import (
    ExportOptions,
    ExportRequest,
    export_architecture,
)
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.tier_report import TierReport
from trainer_export.tier_selection import UnaskedTiers

WIDTHS = (1.0, 0.5, 0.25)


class Body(nn.Module):
    def __init__(self, cut: Cut, scale: float) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, cut.width("hidden", 8))
        self.head = nn.Linear(cut.width("hidden", 8), cut.classes(3))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x) * self.scale
        return self.head(
            hidden.lgamma() if self.scale == 0 and len(self.head.weight[0]) == 4 else hidden.relu()
        )


@architecture()
def small(
    cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3, scale: float = 1.0
) -> nn.Module:
    """A model that is quick to export; with scale 0 its tier of width 0.5 is one that cannot be."""
    del input_shape, classes
    return Body(cut, scale)


def export(
    out: Path,
    *widths: float,
    scale: float = 1.0,
    recipe: Recipe | None = None,
    others: UnaskedTiers = "refuse",
    jobs: int = 1,
) -> dict[str, TierReport]:
    tiers = [Tier(width, 1) for width in widths]
    settings = {"scale": scale}
    reports = export_architecture(
        ExportRequest(small, settings, tiers, recipe or Recipe()),
        out,
        ExportOptions(formats=("onnx",), others=others, jobs=jobs),
    )
    return {report.tier.id: report for report in reports}


def taken(reports: dict[str, TierReport]) -> list[str]:
    return [tier for tier, report in reports.items() if report.taken]


def test_a_new_width_is_exported_alone(tmp_path: Path) -> None:
    """The other tiers are taken as they are, and the set is that of an export of all of them at
    once.
    """
    first = export(tmp_path / "a", 1.0, 0.5)
    second = export(tmp_path / "a", *WIDTHS)
    assert taken(first) == []
    assert taken(second) == ["w1.00-d1", "w0.50-d1"]
    assert second["w0.50-d1"].worst_deviation == first["w0.50-d1"].worst_deviation > 0
    export(tmp_path / "b", *WIDTHS)
    assert files_under(tmp_path / "a") == files_under(tmp_path / "b")
    assert taken(export(tmp_path / "a", *WIDTHS)) == ["w1.00-d1", "w0.50-d1", "w0.25-d1"]


@pytest.mark.slow
def test_what_depends_on_a_change_is_exported(tmp_path: Path) -> None:
    """A number of the model, the recipe, or a file that is not what was written."""
    export(tmp_path, 1.0, 0.5)
    assert taken(export(tmp_path, 1.0, 0.5, scale=2.0)) == []
    recipe = Recipe(Sgd(momentum=0.5))
    assert taken(export(tmp_path, 1.0, 0.5, scale=2.0, recipe=recipe)) == []
    path = tmp_path / "small" / "w0.50-d1" / "eval.onnx"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1])
    assert taken(export(tmp_path, 1.0, 0.5, scale=2.0, recipe=recipe)) == ["w1.00-d1"]
    assert path.read_bytes() == whole


def test_another_file_of_the_user_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the models' file imports belongs to what a tier is made from; who imports
    nothing else does not.
    """
    layers = tmp_path / "user_layers_of_a_test.py"
    layers.write_text("import torch\n\n\ndef half(x):\n    return x * 0.5\n")
    (tmp_path / "models.py").write_text(
        "from torch import nn\nfrom models import architecture\nfrom user_layers_of_a_test import "
        "half\n\n\n"
        "class Net(nn.Module):\n    def __init__(self, cut):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, cut.width('h', 4)), nn.Linear(cut.width('h', 4), "
        "cut.classes(2))\n\n"
        "    def forward(self, x):\n        return self.b(half(self.a(x)))\n\n\n"
        "@architecture()\ndef net(cut, *, input_shape=(4,), classes=2):\n    return Net(cut)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def again() -> bool:
        arch = Registry.from_architectures([]).with_file(tmp_path / "models.py").get("net")
        (report,) = export_architecture(
            ExportRequest(arch, None, [Tier(1.0, 1)], Recipe()),
            tmp_path / "out",
            ExportOptions(formats=("onnx",)),
        )
        return report.taken

    try:
        assert [again(), again()] == [False, True]
        layers.write_text(layers.read_text() + "# a change\n")
        assert not again()
    finally:
        sys.modules.pop("user_layers_of_a_test", None)


@pytest.mark.slow
def test_tiers_in_processes_of_their_own_are_the_same(tmp_path: Path) -> None:
    """Bit for bit, in the same order, and with the same figures."""
    one = export(tmp_path / "a", *WIDTHS)
    other = export(tmp_path / "b", *WIDTHS, jobs=2)
    assert files_under(tmp_path / "a") == files_under(tmp_path / "b")
    assert [*one.values()] == [*other.values()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_leaves_nothing(tmp_path: Path, jobs: int) -> None:
    """The error of one tier is that of the export, whichever process it came from, and no file of
    the others stays.
    """
    with pytest.raises(ExportError, match="lgamma"):
        export(tmp_path, *WIDTHS, scale=0.0, jobs=jobs)
    assert not [*tmp_path.iterdir()]


def test_tiers_are_not_dropped_unasked(tmp_path: Path) -> None:
    """A fleet may be using them. Both ways that the message names work; what no set has any more is
    gone.
    """
    export(tmp_path, 1.0, 0.5)
    before = files_under(tmp_path)
    with pytest.raises(
        ConfigError, match=r"also has w0.50-d1, w1.00-d1.*--add keeps .*--replace removes"
    ):
        export(tmp_path, 0.25)
    assert files_under(tmp_path) == before
    assert taken(export(tmp_path, 0.25, others="add")) == ["w0.50-d1", "w1.00-d1"]
    assert before.items() <= files_under(tmp_path).items()
    export(tmp_path, 0.25, others="replace")
    assert sorted(path.name for path in (tmp_path / "small").iterdir() if path.is_dir()) == [
        "w0.25-d1"
    ]
    assert all(path.stat().st_nlink > 1 for path in tmp_path.rglob("objects/??/*"))


@pytest.mark.slow
def test_tiers_that_stay_are_brought_up_to_date(tmp_path: Path) -> None:
    """A set whose tiers have different recipes would be of no use to any fleet. Heads of their own
    stay theirs.
    """
    tiers = [Tier(1.0, 2), Tier(1.0, 1)]
    recipe = Recipe(Sgd(momentum=0.5))
    arch = Registry.zoo().get("text_encoder")
    settings = TINY["text_encoder"]
    kept = {"formats": ("onnx",), "others": "add"}
    export_architecture(
        ExportRequest(arch, settings, tiers, Recipe(), heads={tiers[1]: 5}),
        tmp_path,
        ExportOptions(**kept),
    )  # type: ignore[arg-type]
    reports = export_architecture(
        ExportRequest(arch, settings, tiers[:1], recipe), tmp_path, ExportOptions(**kept)
    )  # type: ignore[arg-type]
    assert [(report.tier.id, report.taken) for report in reports] == [
        ("w1.00-d2", False),
        ("w1.00-d1", False),
    ]
    assert (tmp_path / "text_encoder" / "w1.00-d1" / "head.safetensors").is_file()


SCRIPT = """
import signal
import sys
from pathlib import Path
from tests.trainer_export.test_build import WIDTHS, export, small
from models.tier import Tier
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # coverage has a handler of its own, to which an export would leave it
tiers = [Tier(width, 1) for width in WIDTHS]
progress = lambda state: print(state.stage, flush=True)
export_architecture(
    ExportRequest(small, {}, tiers, Recipe()),
    Path(sys.argv[1]),
    ExportOptions(("onnx",), jobs=int(sys.argv[2]), progress=progress),
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "jobs"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 1), (signal.SIGKILL, 2)],
)
def test_what_is_interrupted_leaves_nothing(
    tmp_path: Path, number: signal.Signals, jobs: int
) -> None:
    """In the middle of a tier: an interrupt or an end takes everything away, after a kill the next
    export does.
    """
    export(tmp_path, 1.0)
    before = files_under(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(jobs)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 300)[0]
        assert process.stdout.readline() == "tracing\n"
        assert [*tmp_path.glob(".small.new-*")]
        process.send_signal(number)
        for _ in process.stdout:  # to the end, so every process that could write is gone
            if (
                number == signal.SIGINT
            ):  # Python drops one that comes in a finalizer; whoever sees it go on repeats it
                process.send_signal(number)
        assert process.wait(60) != 0
    if number == signal.SIGKILL:
        assert [*tmp_path.glob(".small.new-*")]
        export(tmp_path, 1.0)
    assert files_under(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["objects", "small"]


def test_an_export_leaves_the_folder_of_a_living_one(tmp_path: Path) -> None:
    """What is unfinished but held by a process is not taken for a dead one's."""
    import fcntl  # noqa: PLC0415

    living = tmp_path / ".small.new-x"
    living.mkdir()
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    export(tmp_path, 0.5)
    assert living.is_dir()
    os.close(held)
    export(tmp_path, 0.5)
    assert not living.exists()
