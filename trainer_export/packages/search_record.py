"""The record of a search for axes: what was found for each argument, and the axes so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from models.layout import Layout
from trainer_export.packages.axis_forms import CUTS, AxisForm
from trainer_export.packages.survey import Surveyed


@dataclass(frozen=True)
class Finding:
    """The finding for some arguments that one axis would cut."""

    places: tuple[str, ...]
    form: AxisForm | None  # None if they stay whole
    reason: str = ""  # why they stay whole


@dataclass(frozen=True)
class Discovery:
    """The axes of a model, and what was found for each argument."""

    forms: tuple[AxisForm, ...]
    findings: tuple[Finding, ...]
    seconds: float  # of processor time
    share_at_half: float = 0.5  # of the parameters that half of the width leaves
    layout: Layout | None = None  # of the whole model, if discovery has proved it


class SearchRecord:
    """The findings of a search so far."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._forms: list[AxisForm] = []
        self._pinned: list[AxisForm] = []  # those that a user decided
        self._proof: tuple[tuple[AxisForm, ...], Layout] | None = None  # the last of all blocks

    def _decided(self) -> set[str]:
        places: set[str] = set()
        for finding in self._findings:
            places.update(finding.places)
        return places

    def _note(
        self,
        places: Iterable[str],
        form: AxisForm | None,
        reason: str = "",
    ) -> None:
        self._findings.append(Finding(tuple(places), form, reason))
        if form is not None:
            self._forms.append(form)

    def _note_proof(self, forms: Sequence[AxisForm], layout: Layout) -> None:
        """Note the layout of some axes of a model with all its blocks."""
        self._proof = (tuple(forms), layout)

    def _known_layout(self) -> Layout | None:
        """Return the layout of the axes that were found, if it is proved already."""
        if self._proof is None:
            return None
        forms, layout = self._proof
        return layout if forms == tuple(self._forms) else None

    def _note_others(
        self,
        surveyed: Sequence[Surveyed],
        refused: Sequence[Surveyed],
    ) -> None:
        """Note why the others stay whole."""
        reasons = {entry.place: entry.reason for entry in refused}
        for entry in surveyed:
            if entry.place not in self._decided():
                reason = reasons.get(entry.place) or entry.reason
                text = f"{entry.effect.value}: {reason}" if reason else entry.effect.value
                self._note((entry.place,), None, text)

    def _labels(self) -> list[AxisForm]:
        labels: list[AxisForm] = []
        for form in self._forms:
            if form.kind == "classes":
                labels.append(form)
        return labels

    def _cuts(self) -> list[AxisForm]:
        return [form for form in self._forms if form.kind in CUTS]

    def _without(self, form: AxisForm) -> list[AxisForm]:
        return [candidate for candidate in self._forms if candidate != form]

    def _leave_out(self, form: AxisForm, reason: str) -> None:
        self._forms.remove(form)
        for number, finding in enumerate(self._findings):
            if finding.form == form:
                self._findings[number] = Finding(finding.places, None, reason)
