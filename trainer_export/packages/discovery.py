"""Find the axes of a package's model: every whole number of its constructor is tried as one.

The judge is the proof of layouts (`models.zoo.inference`), and that narrow models work. All
arguments are tried at once in their usual forms. If these do not hold, each is tried apart, on the
model with few blocks, and then those that may have to follow one another as one axis
(`trainer_export.packages.candidates`); what holds is tried together. All of this is a screening on
short texts and small pictures, which is cheaper (`trainer_export.packages.axis_trials`). At last
the axes are proved on all blocks, and on samples of their own size.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fleet_protocol.errors import ConfigError, ModelError, PlanError
from models.cut import Cut
from models.zoo.inference import blocks_by_depth
from trainer_export.packages.axis_forms import (
    AxisDecision,
    AxisForm,
    classes_form,
    depth_form,
    groups_form,
)
from trainer_export.packages.candidates import (
    alike_sets,
    forms_of,
    head_sets,
    hides_sizes,
    joint_forms,
    named_heads,
    shared_head_sets,
    sizes_by_place,
    usual_assignments,
)
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.proved_search import NOT_WITH_OTHERS, ProvedSearch
from trainer_export.packages.scaled_layers import LAYER_PARTS, PARTS, layer_parts_forms
from trainer_export.packages.search_record import Discovery
from trainer_export.packages.size_at_half import (
    MOST_OF_IT,
    arguments_leave_most_whole,
    layers_become_smaller,
    share_at_half,
    share_of_layers_at_half,
    share_without,
)
from trainer_export.packages.survey import LATE, Effect, Surveyed, survey, with_effects

_FEW_BLOCKS = 2
_SHARES_OF_TIME = (2 / 3, 1.0)  # that is left, for each number of parts of the layers
_OTHER_LAYERS = "other layers are built with one more"
_SLOW = f"holds in no usual form, and others would leave no time for {LAYER_PARTS}"
_SMALL = f"leaves most of the model whole, unlike {LAYER_PARTS}"


def discover_axes(model: PackageModel, pins: Sequence[AxisDecision] = ()) -> Discovery:
    """Find the axes of a package's model.

    Args:
        model: the model.
        pins: what a user decided; these arguments are not tried.

    Raises:
        ConfigError: if the model does not run on samples of its shape, or a pin does not hold.
        ModelError: if it has several outputs, and no labels that tell which one a loss is for.
    """
    return _Search(model, tuple(pins)).run()


class _Search(ProvedSearch):
    """One search, with what was found so far."""

    def __init__(self, model: PackageModel, pins: tuple[AxisDecision, ...]) -> None:
        super().__init__(model)
        self._pinned += [pin.form for pin in pins if pin.form is not None]
        # First, so that nothing below tries what the user has decided.
        for pin in pins:
            reason = "" if pin.form else "stays whole, as --axis says"
            self._note(pin.places, pin.form, reason)

    def run(self) -> Discovery:
        """Find labels, then depth, then widths."""
        self._find_labels()
        # Labels tell which output a loss is for, or that all of them are exits.
        if self._outputs > 1 and not self._labels():
            raise ModelError(
                f"{self._model.name} has {self._outputs} outputs, none of which has labels, and a"
                " loss of numbers is for one of them; select it with --set output_name=NAME"
            )
        surveyed = self._survey(self._shows_too_much)
        self._find_depth(with_effects(surveyed, Effect.BLOCKS))
        self._require_pins()
        if not self._cuts_layers_of_many(surveyed):
            # The arguments that were left out because of the layers, too.
            self._find_cuts(self._survey(lambda _: False))
        layout = self._known_layout() or self._prove_all()
        seconds = time.process_time() - self._begun
        share = share_at_half(self._prober, self._cuts())
        return Discovery(tuple(self._forms), tuple(self._findings), seconds, share, layout)

    def _survey(self, is_enough: Callable[[Sequence[Surveyed]], bool]) -> tuple[Surveyed, ...]:
        return survey(self._prober, {*self._decided(), *PARTS}, self._until, is_enough)

    def _shows_too_much(self, surveyed: Sequence[Surveyed]) -> bool:
        """Return whether the layers are to be cut together, if they can be."""
        movable = with_effects(surveyed, Effect.WIDTH, Effect.ROUNDED)
        return LAYER_PARTS in self._model.sizes and hides_sizes(movable)

    def _cuts_layers_of_many(self, surveyed: Sequence[Surveyed]) -> bool:
        """Cut all layers together where arguments hardly show their sizes, or are too many."""
        if not self._shows_too_much(surveyed) or not self._cut_layers_instead(_SMALL):
            return False
        self._note_others(surveyed, ())
        return True

    def _find_cuts(self, surveyed: Sequence[Surveyed]) -> None:
        """Find the axes that a width cuts: arguments, or all layers together."""
        movable = with_effects(surveyed, Effect.WIDTH, Effect.ROUNDED)
        still = with_effects(surveyed, Effect.NONE, Effect.REFUSED)
        heads = [*named_heads(movable), *named_heads(still)]
        refused = with_effects(surveyed, Effect.REFUSED)
        usual = self._likely_assignments(movable, heads)
        is_small = arguments_leave_most_whole(self._prober, usual, movable, refused, heads)
        if is_small and self._cut_layers_instead(_SMALL):
            self._note_others(surveyed, [replace(entry, reason=_SMALL) for entry in movable])
        elif self._take_first(usual):
            self._find_refused_heads(still)
            self._note_others(surveyed, ())
            self._prefer_layer_parts()
        elif self._must_cut_layers(len(movable)) and self._cut_layers_instead(_SLOW):
            self._note_others(surveyed, [replace(entry, reason=_SLOW) for entry in movable])
        else:
            self._find_heads(shared_head_sets([*movable, *still]))
            unproved = self._find_widths(movable, heads)
            self._find_joint_axes(unproved, still, heads)
            self._note_others(surveyed, unproved)
            self._drop_what_does_not_hold_together()
            self._prefer_layer_parts()

    # ------------------------------------------------------------------ labels and depth

    def _find_labels(self) -> None:
        """Take the argument that is the number of labels, if any parameter has a row for each."""
        labels = self._model.labels
        if not labels or labels in self._decided():
            return
        size = self._model.sizes.get(labels)
        if size is None:
            self._note((labels,), None, "is below 2: the model's outputs are numbers, not labels")
        elif self._prober.changes({labels: size + 1}):
            self._note((labels,), classes_form(labels, size))
        else:
            self._note((labels,), None, "moves no parameter: the model's outputs are not labels")

    def _find_depth(self, candidates: Sequence[Surveyed]) -> None:
        """Take the argument with the most blocks whose blocks are alike; a model has one depth."""
        # The main stack has the most blocks; a short one, such as a stem's, is rarely worth
        # cutting.
        by_size = sorted(candidates, key=lambda entry: -entry.size)
        has_depth = any(form.kind == "depth" for form in self._forms)
        for entry in by_size:
            form = depth_form(entry.place, entry.size)
            if has_depth:
                self._note((entry.place,), None, "is a depth as well, and a model has only one")
            else:
                refusal = self._depth_refusal(form)
                self._note((entry.place,), None if refusal else form, refusal)
                has_depth = not refusal
        for entry in by_size:
            self._make_few(entry.place, entry.size)

    def _depth_refusal(self, form: AxisForm) -> str:
        """Return why blocks are not alike, by the shapes of every depth; "" if they are."""
        builder = self._builder(self._model, [*self._labels(), form], {}, self._until)
        try:
            blocks_by_depth(builder, builder.shapes(Cut()), form.size)
        except (ConfigError, PlanError) as error:
            return self._brief(error)
        return ""

    def _make_few(self, place: str, size: int) -> None:
        """Let axes be tried on fewer blocks, if the model can do with them."""
        for blocks in (1, _FEW_BLOCKS):
            sizes = {**self._few, place: min(size, blocks)}
            if self._prober.can_build(sizes) and self._runs_with(sizes):
                self._few = sizes
                return

    # ------------------------------------------------------------------ widths

    def _require_pins(self) -> None:
        """Prove the axes that the user decided by themselves.

        Raises:
            ConfigError: if they do not hold.
        """
        cuts = self._cuts()  # no others were tried so far
        tried = [(cuts, self._refusal([*self._labels(), *cuts]) if cuts else "")]
        for form in self._forms:
            if form.kind == "depth" and form in self._pinned:
                tried.append(([form], self._depth_refusal(form)))
        for forms, refusal in tried:
            if refusal and refusal != LATE:
                names = ", ".join(form.name for form in forms)
                raise ConfigError(
                    f"{self._model.name}: what --axis decides about {names} does not hold:"
                    f" {refusal}; choose another form, or leave the option out, so that Shoal tries"
                    " all forms"
                )

    def _take_first(self, assignments: Iterable[Sequence[AxisForm]]) -> bool:
        """Take the first forms of all arguments that hold; usual ones are most often enough."""
        for forms in assignments:
            if self._must_cut_layers(1):
                return False
            if not self._refusal_together([*self._without_depth(), *forms]):
                for form in forms:
                    self._note(form.factors, form)
                return True
        return False

    def _likely_assignments(
        self, movable: Sequence[Surveyed], heads: Sequence[Surveyed]
    ) -> list[list[AxisForm]]:
        """Return usual forms of all arguments, without those that change which layers there are.

        Complete ones come first, then those that leave the smallest model.
        """
        complete: list[list[AxisForm]] = []
        partial: list[list[AxisForm]] = []
        for forms in usual_assignments(movable, heads):
            kept = [form for form in forms if self._keeps_layers(form)]
            if len(kept) == len(forms):
                complete.append(forms)
            elif kept and kept not in partial:
                partial.append(kept)
        partial.sort(key=lambda forms: share_at_half(self._prober, forms))
        return [*complete, *partial]

    def _prefer_layer_parts(self) -> None:
        """Cut the layers instead of arguments that leave most of the model whole."""
        share = share_at_half(self._prober, self._cuts())
        if share >= MOST_OF_IT and share_of_layers_at_half(self._prober) < share:
            self._cut_layers_instead(_SMALL)

    def _cut_layers_instead(self, reason: str) -> bool:
        """Cut the layers instead of arguments, unless a user decided about one of these.

        Args:
            reason: why the arguments then stay whole.

        Returns:
            Whether the layers are cut.
        """
        if LAYER_PARTS not in self._model.sizes or LAYER_PARTS in self._decided():
            return False
        cuts = self._cuts()
        if any(form in self._pinned for form in cuts):
            return False
        for form, share in zip(layer_parts_forms(), _SHARES_OF_TIME, strict=True):
            refusal = self._refusal_of_layer_parts(form, share)
            self._note(form.factors, None if refusal else form, refusal)
            if not refusal:
                for cut in cuts:
                    self._leave_out(cut, reason)
                return True
        return False

    def _find_widths(
        self, movable: Sequence[Surveyed], heads: Sequence[Surveyed]
    ) -> list[Surveyed]:
        """Try each argument separately; return those that hold in no form, with the reason."""
        decided = self._decided()
        waiting: dict[str, Iterator[AxisForm]] = {}
        for entry in movable:
            if entry.place not in decided:
                waiting[entry.place] = forms_of(entry, heads)
        found: dict[str, AxisForm] = {}
        reasons: dict[str, str] = {}
        # The first form of each argument, then the second of each: the first are the cheapest to
        # prove, and the likely ones.
        while waiting:
            for place, forms in [*waiting.items()]:
                form = next(forms, None)
                if form is None:
                    del waiting[place]
                    continue
                refusal = self._refusal_apart(form)
                reasons.setdefault(place, refusal)
                if not refusal:
                    found[place] = form
                    del waiting[place]
        refused: list[Surveyed] = []
        for entry in movable:
            if entry.place in found:
                self._note((entry.place,), found[entry.place])
            elif entry.place not in decided:
                refused.append(replace(entry, reason=reasons.get(entry.place, "")))
        return refused

    def _refusal_apart(self, form: AxisForm) -> str:
        """Return why an axis does not hold by itself; "" if it does."""
        # To cut the layers may take two trials, and is worth more than one further argument.
        if self._is_late() or self._must_cut_layers(2):
            return LATE
        if not self._keeps_layers(form):
            return _OTHER_LAYERS
        return self._refusal([*self._labels(), form])

    def _find_joint_axes(
        self, refused: Sequence[Surveyed], still: Sequence[Surveyed], heads: Sequence[Surveyed]
    ) -> None:
        """Try as one axis what does not hold apart: whole heads, equal sizes, entries of a list."""
        self._find_heads(head_sets([*refused, *still]))
        # The constructor may refuse another number of each size by itself.
        for entries in alike_sets([*refused, *with_effects(still, Effect.REFUSED)]):
            places = sizes_by_place(entries)
            self._try_joint(places, joint_forms(entries, heads))

    def _find_heads(self, sets: Iterable[Sequence[Surveyed]]) -> None:
        """Try as one axis, which is cut by whole heads, each of some sets of arguments."""
        for entries in sets:
            places = sizes_by_place(entries)
            self._try_joint(places, [groups_form(places, min(places.values()))])

    def _find_refused_heads(self, still: Sequence[Surveyed]) -> None:
        """Try numbers that are refused apart, if the axes so far leave most of the model whole."""
        axes = self._cuts()
        # All layers are cut together if they can be.
        if LAYER_PARTS in self._model.sizes or share_at_half(self._prober, axes) < MOST_OF_IT:
            return
        self._find_heads([*shared_head_sets(still), *head_sets(still)])
        if self._cuts() != axes:
            self._drop_what_does_not_hold_together()

    def _try_joint(
        self,
        places: Iterable[str],
        forms: Iterable[AxisForm],
    ) -> None:
        """Take the first form that holds, unless one of the arguments has an axis already."""
        if self._decided().intersection(places):
            return
        for form in forms:
            if not self._refusal_apart(form):
                self._note(places, form)
                return

    # ------------------------------------------------------------------ all together

    def _drop_what_does_not_hold_together(self) -> None:
        """Prove all axes together, and leave out one after the other until they hold."""
        # A single one is tried already, and the proof is of all together.
        if len(self._cuts()) < 2 or self._has_little_time():
            return
        refusal = self._refusal_together(self._without_depth())
        if refusal in {"", LATE}:
            return
        # One axis for all layers is worth more than some of the arguments, if it cuts more.
        layers_cut_more = layers_become_smaller(self._prober, self._cuts())
        if layers_cut_more and self._cut_layers_instead(NOT_WITH_OTHERS + refusal):
            return
        undecided = [form for form in self._forms if form not in self._pinned]
        depths = [form for form in undecided if form.kind == "depth"]
        if depths and not self._refusal_together(self._without(depths[0])):
            self._leave_out(depths[0], NOT_WITH_OTHERS + refusal)
            return
        self._leave_out_until_the_others_hold(refusal)

    def _leave_out_until_the_others_hold(self, refusal: str) -> None:
        """Leave out one width after the other.

        Args:
            refusal: why all of them together do not hold.
        """
        while refusal and refusal != LATE:
            # The export refuses a pinned axis, and says why.
            widths = [form for form in self._cuts() if form not in self._pinned]
            if not widths:
                return
            self._leave_out(self._culprit(widths), NOT_WITH_OTHERS + refusal)
            refusal = self._refusal_together(self._without_depth())

    def _culprit(self, widths: Sequence[AxisForm]) -> AxisForm:
        """Return an axis without which the others hold, else the last."""
        # Those come first without which the others leave the smallest model. The newest of equals
        # comes first, because earlier axes were found beside more of the others.
        newest_first = widths[::-1]
        share = partial(share_without, self._prober, self._cuts())
        for form in sorted(newest_first, key=share):
            if not self._refusal_together(self._without(form)):
                return form
        return widths[-1]
