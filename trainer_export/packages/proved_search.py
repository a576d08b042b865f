"""Proves the axes that a search for axes has found, and leaves out those that do not hold.

The search tries axes on few blocks and small samples, and screens them only
(`trainer_export.packages.axis_trials`). The proof is on all blocks, on samples of their own size,
in training, and on rare values.
"""

import time

from fleet_protocol.errors import ConfigError, PlanError
from models.layout import Layout
from models.zoo.inference import RefutedAxisError
from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.axis_trials import SECONDS, AxisTrials

NOT_WITH_OTHERS = "holds by itself, but not with the others: "
_UNPROVED = "was not proved, because the time for discovery ran out; pin it with --axis"


class ProvedSearch(AxisTrials):
    """A search that proves what it has found."""

    def _without_depth(self) -> list[AxisForm]:
        """Return the axes without the number of blocks, so that they are tried on few of them."""
        return [form for form in self._forms if form.kind != "depth"]

    def _prove_all(self) -> Layout | None:
        """Prove the axes that were found, and leave out those that hold in trials only.

        Returns:
            The layout; None if the export has to say what is wrong.
        """
        while True:
            try:
                return self._prove(self._forms)
            except RefutedAxisError as error:
                refuted = [form for form in self._cuts() if form.name == error.axis]
                reason = f"holds in trials, but not in the proof: {error.problem}"
            except (ConfigError, PlanError) as error:
                refuted = [form for form in self._forms if form.kind == "depth"]
                reason = NOT_WITH_OTHERS + self._brief(error)
            if not refuted or refuted[0] in self._pinned:
                return None
            self._leave_out(refuted[0], reason)
            self._leave_out_if_late()

    def _leave_out_if_late(self) -> None:
        """Leave out the axes that there is no time to prove."""
        if time.process_time() < self._begun + SECONDS:
            return
        for form in self._cuts():
            if form not in self._pinned:
                self._leave_out(form, _UNPROVED)
