"""Tries axes of a package's model: on few blocks and small samples, within a bound of time.

Short texts and small pictures are cheaper, and as good to tell which units a parameter has. So is a
screening, which leaves out what rarely refutes an axis (`models.zoo.inference`). The axes that were
found are proved at last, on all blocks and on samples of their own size.
"""

import math
import time
from collections.abc import Sequence

from fleet_protocol.errors import ConfigError, PlanError
from models.cut import Cut
from models.layout import Layout
from models.user_lines import first_line
from models.zoo.builds import ModelBuilder
from models.zoo.growth import Shapes
from models.zoo.inference import judge_layout
from models.zoo.randomized_model import RandomizedModel
from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.builder import PackageBuilder, exportable
from trainer_export.packages.narrow_run import WIDTHS, refusal_of_narrow, require_run, runs_on
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.scaled_layers import LAYER_PARTS
from trainer_export.packages.search_record import SearchRecord
from trainer_export.packages.survey import LATE, ShapeProber

SECONDS = 14.0
"""Processor time for discovery and proof; what is not tried by then stays whole.

A proof that takes longer than expected has one second more.
"""

_PROOF_RUNS = 7  # a proof takes as long as this many builds and runs of the whole model
_PROOF_TRIALS = 2.0  # or as long as this many trials that found no fault
_TRIAL_RUNS = 3  # a trial of an axis that is not refused at once takes as long as this many runs
_LEAST_SECONDS = 5.0  # for the search, however long the proof takes


class AxisTrials(SearchRecord):
    """A search that can find out whether axes hold."""

    def __init__(self, model: PackageModel) -> None:
        """Run the model, and build it for its shapes.

        Raises:
            ConfigError: if the model does not run on samples of its shape.
        """
        super().__init__()
        self._begun = time.process_time()
        self._model = model
        first_run = require_run(exportable(model, ()))
        run_seconds = time.process_time() - self._begun
        self._outputs = first_run.outputs
        self._tried_on = _for_trials(model, first_run.model)
        self._prober = ShapeProber.for_model(model, converts=True)
        self._few: dict[str, int] = {}  # sizes of the model that axes are tried on
        self._longest = 0.0  # processor time that a trial took
        self._expected = _TRIAL_RUNS * run_seconds  # that one takes
        self._proof_seconds = _PROOF_RUNS * run_seconds  # processor time that the proof needs

    @property
    def _until(self) -> float:
        """Processor time after which no further axis is tried, so that the proof has its time."""
        return self._begun + max(SECONDS - self._proof_seconds, _LEAST_SECONDS)

    def _refusal_together(self, forms: Sequence[AxisForm], share: float = 1.0) -> str:
        """Return why all axes of a model do not hold; "" if they do.

        Args:
            forms: the axes.
            share: how much of the time that is left to take for them.
        """
        return self._refusal(forms, share, are_all=True)

    def _refusal(
        self, forms: Sequence[AxisForm], share: float = 1.0, *, are_all: bool = False
    ) -> str:
        """Return why some axes do not hold on the model with few blocks; "" if they do.

        Args:
            forms: the axes.
            share: how much of the time that is left to take for them.
            are_all: whether no further axes may change which sizes are equal in a narrow model.
        """
        if self._is_late():
            return LATE
        begun = time.process_time()
        until = begun + share * (self._until - begun)
        few = self._few_for(forms)
        builder = self._builder(self._tried_on, forms, few, until)
        # Only where nothing else is left for the proof does a trial prove.
        proves = are_all and not few and self._tried_on is self._model
        try:
            layout = judge_layout(builder, screens=not proves)
        except (ConfigError, PlanError) as error:
            return LATE if time.process_time() > until else self._brief(error)
        finally:
            self._longest = max(self._longest, time.process_time() - begun)
        trial_seconds = time.process_time() - begun
        self._proof_seconds = max(self._proof_seconds, _PROOF_TRIALS * trial_seconds)
        refusal = self._refusal_of_narrow(builder, layout if are_all else None)
        if not refusal and proves:
            self._note_proof(forms, layout)
        return refusal

    def _refusal_of_layer_parts(self, form: AxisForm, share: float) -> str:
        """Return why the layers cannot be cut together; "" if they can.

        Args:
            form: the axis that cuts them.
            share: how much of the time that is left to take for it.
        """
        if self._is_late():
            return LATE
        # Much cheaper than a proof, and most models that cannot be cut so fail here.
        arch = exportable(self._tried_on, [form], self._few_for([form]))
        return refusal_of_narrow(arch) or self._refusal_together([*self._labels(), form], share)

    def _is_late(self) -> bool:
        """Return whether the time for trials is over."""
        return time.process_time() > self._until

    def _has_little_time(self) -> bool:
        """Return whether a trial of all axes together would leave too little time for the proof."""
        return 2 * self._longest > self._until - time.process_time()

    def _runs_with(self, few: dict[str, int]) -> bool:
        """Return whether the model runs with fewer blocks; it may take the output of a later one.

        Args:
            few: numbers of blocks.
        """
        try:
            require_run(exportable(self._tried_on, (), few))
        except (ConfigError, PlanError):
            return False
        return True

    def _must_cut_layers(self, trials: int) -> bool:
        """Return whether some more trials would leave no time for the cut of all layers."""
        if LAYER_PARTS not in self._model.sizes or LAYER_PARTS in self._decided():
            return False
        seconds = self._longest
        # A single form is tried whatever it takes, because the usual ones hold most often.
        if trials > 1:
            seconds = max(seconds, self._expected)
        return (trials + 1) * seconds > self._until - time.process_time()

    def _refusal_of_narrow(self, builder: ModelBuilder, layout: Layout | None) -> str:
        """Return why a narrow model does not work; "" if it does.

        Args:
            builder: builds it.
            layout: the layout that it must have; None if any will do.
        """
        if layout is not None:
            for width in WIDTHS:
                tier = layout.tier(width)
                expected = {**layout.shapes(tier), **layout.base_of(tier)}
                try:
                    shapes = builder.shapes(Cut(width))
                except (ConfigError, PlanError) as error:
                    return f"the model fails at width {width}: {first_line(error)}"
                if shapes != expected:
                    return f"other layers are built at width {width}"
        return refusal_of_narrow(builder.arch)

    def _builder(
        self, model: PackageModel, forms: Sequence[AxisForm], few: dict[str, int], until: float
    ) -> ModelBuilder:
        """Return what builds a model that is cut along some axes.

        Args:
            model: the model, on samples of some size.
            forms: the axes.
            few: sizes that differ in the whole model, too.
            until: processor time after which it builds nothing more.
        """
        sized = PackageBuilder(model, forms, few)
        arch = exportable(model, forms, few)
        classes: int = arch.defaults.get("classes", 0)

        def shapes(cut: Cut) -> Shapes:
            return self._prober.shapes(sized.sizes(cut, classes))

        return ModelBuilder(arch, until=until, known_shapes=shapes)

    def _prove(self, forms: Sequence[AxisForm]) -> Layout:
        """Prove axes on all blocks, and on samples of their own size.

        Raises:
            ConfigError: if they do not hold.
        """
        return judge_layout(self._builder(self._model, forms, {}, math.inf))

    def _keeps_layers(self, form: AxisForm) -> bool:
        """Return whether one more unit of an axis keeps the set of parameters, as it must."""
        try:
            shapes = self._prober.shapes(form.sizes(Cut(enlarge={form.name: 1})))
        except Exception:  # noqa: BLE001 - a constructor may take two more units only
            return True
        whole = self._prober.whole
        if shapes.keys() != whole.keys():
            return False
        return all(len(shapes[name]) == len(shape) for name, shape in whole.items())

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


def _for_trials(model: PackageModel, randomized: RandomizedModel) -> PackageModel:
    """Return the model on which axes are tried: on small samples, if it runs on them."""
    for small in model.with_small_samples():
        if runs_on(randomized, exportable(small, ())):
            return small
    return model
