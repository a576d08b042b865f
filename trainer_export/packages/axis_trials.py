"""Tries axes of a package's model: on few blocks and small samples, within a bound of time.

Short texts and small pictures are cheaper, and as good to tell which units a parameter has. The
export proves the axes that were found on all blocks and on samples of their own size.
"""

import time
from collections.abc import Sequence

from fleet_protocol.errors import ConfigError, PlanError
from models.user_lines import first_line
from models.zoo.inference import judge_layout
from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.builder import exportable
from trainer_export.packages.narrow_run import refusal_of_narrow, runs
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.search_record import SearchRecord
from trainer_export.packages.survey import LATE, ShapeProber

SECONDS = 12.0
"""Processor time for discovery; what is not tried by then stays whole."""


class AxisTrials(SearchRecord):
    """A search that can find out whether axes hold."""

    def __init__(self, model: PackageModel) -> None:
        super().__init__()
        self._begun = time.process_time()
        self._model = model
        self._tried_on = _for_trials(model)
        self._prober = ShapeProber.for_model(model)
        self._few: dict[str, int] = {}  # sizes of the model that axes are tried on

    def _refusal_together(self, forms: Sequence[AxisForm], seconds: float = SECONDS) -> str:
        """Return why all axes of a model do not hold; "" if they do."""
        return self._refusal(forms, seconds, are_all=True)

    def _refusal(
        self, forms: Sequence[AxisForm], seconds: float = SECONDS, *, are_all: bool = False
    ) -> str:
        """Return why some axes do not hold on the model with few blocks; "" if they do."""
        until = self._begun + seconds
        if time.process_time() > until:
            return LATE
        few = self._few_for(forms)
        arch = exportable(self._tried_on, forms, few)
        try:
            layout = judge_layout(arch, until=until)
        except (ConfigError, PlanError) as error:
            return LATE if time.process_time() > until else self._brief(error)
        refusal = refusal_of_narrow(arch, layout if are_all else None)
        if not refusal and not few:
            self._note_proof(forms, layout)
        return refusal

    def _few_for(self, forms: Sequence[AxisForm]) -> dict[str, int]:
        """Return the sizes of the model with few blocks, without those that some axes set."""
        few = dict(self._few)
        for form in forms:
            for place in form.factors:
                few.pop(place, None)
        return few

    def _brief(self, error: Exception) -> str:
        """Return the first line of a refusal without the names of error and model."""
        message = first_line(error).partition(": ")[2]
        return message.removeprefix(f"{self._model.name}: ")


def _for_trials(model: PackageModel) -> PackageModel:
    """Return the model on which axes are tried: on small samples, if it runs on them."""
    small = model.with_small_samples()
    return small if runs(exportable(small, ())) else model
