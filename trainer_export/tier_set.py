"""Writes the files of one tier after comparing them with PyTorch, or copies unchanged ones."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fleet_protocol.allocator import passing_objects
from fleet_protocol.errors import ExportError, ShoalError
from fleet_protocol.graph_parts import BELOW
from fleet_protocol.manifest import CheckSpec, Manifest, digest_of
from fleet_protocol.memory_plans import plan_file
from fleet_protocol.weights import encode_weights
from models.cut import CLASSES
from models.own_class import OWN_CLASS
from models.tier import Tier
from models.user_lines import at_line_of, first_line
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.check import DeviationError
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats import executorch, ort_training
from trainer_export.formats import onnx as portable
from trainer_export.formats.files import GraphFile, SetFile, UnavailableError
from trainer_export.formats.ort_step import STEP
from trainer_export.in_place import overwritten
from trainer_export.manifests import SubModelFacts, manifest_of
from trainer_export.memory_plans import MemoryPlan, plans_within
from trainer_export.model_inputs import (
    Signature,
    model_noise,
)
from trainer_export.model_trial import refuse_idle, try_own_functions
from trainer_export.own_class import own_class
from trainer_export.parallel import Job, ReportStage
from trainer_export.provenance import MADE_FROM, facts_of, record_of, unchanged
from trainer_export.publishing import write_file
from trainer_export.step_parts_check import NotKeptError, check_parts, without_parts
from trainer_export.traced_program import advice_on

Format = Literal["onnx", "ort-training", "executorch"]

_BASE_BYTES = 100_000_000  # memory of a process that exports a tier, in addition to shared memory
_COPIES = 8  # copies of the tier's parameters in such a process


@dataclass(frozen=True)
class _SubModel:
    """A tier that is built and ready to be exported.

    Attributes:
        flops: FLOPs per sample of a forward pass and of a training step.
    """

    module: nn.Module
    signature: Signature
    batches: SizedBatches
    flops: tuple[int, int]


@dataclass(frozen=True)
class _Written:
    """The results of the formats for one tier; each format adds to it in turn.

    Attributes:
        graphs: the portable graphs, the training step first.
        others: all other files.
        recomputed_share: share of the step's work that is repeated; None for the tier itself.
    """

    graphs: tuple[GraphFile, ...]
    others: list[SetFile]
    checks: list[CheckSpec]
    skipped: dict[str, str] = field(default_factory=dict)
    recomputed_share: float | None = None

    @property
    def files(self) -> tuple[SetFile, ...]:
        """Every file except the manifest."""
        return (*self.graphs, *self.others)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the training step, which overwrites what all formats may overwrite."""
        return peak_memory(self.graphs[0].model, in_place=overwritten(self.files))


@dataclass(frozen=True)
class TierSets:
    """The tiers of one export.

    Attributes:
        bases: files of frozen parameters by width.
        folder: folder of the new set.
        memory: bounds of the peak memory of a training step in bytes.
    """

    export: Export
    formats: tuple[Format, ...]
    bases: Mapping[float, SetFile]
    folder: Path
    memory: tuple[float, ...] = ()

    def reuse(self, tier: Tier, earlier: Path) -> bool:
        """Copy a tier's files from an earlier export if they are up to date.

        Returns:
            Whether they were copied.
        """
        if not (earlier / MADE_FROM).is_file():
            return False
        # Only a build, no trace: that takes the time of an export.
        if not unchanged(earlier, self._facts(tier, self.export.module(tier))):
            return False
        shutil.copytree(earlier, self.folder / tier.id)
        return True

    def job(self, tier: Tier) -> Job:
        """Return the job that exports a tier.

        It raises the errors of `trainer_export.artifact_set.export_architecture`.
        """
        nbytes = _BASE_BYTES + 4 * _COPIES * self.export.layout.parameter_count(tier)
        return Job(tier.id, nbytes, lambda report: self._run(tier, report))

    def _run(self, tier: Tier, report: ReportStage) -> None:
        """Export a tier, and name the user's line if the model's own code fails."""
        try:
            self._write(tier, report)
        except DeviationError as error:
            raise ExportError(f"{self.export.arch.name}: {tier.id}: {error}") from error
        # These already say what to do; all others come from the model's own code.
        except (ShoalError, OSError, MemoryError):
            raise
        except Exception as error:
            raise ExportError(
                f"{self.export.arch.name}: {tier.id}: the model fails{at_line_of(error)}:"
                f" {first_line(error)}; it must run on any samples of its shape, also in"
                f" training, and {advice_on(error)}"
            ) from error

    def _facts(self, tier: Tier, module: nn.Module) -> dict[str, Any]:
        base = self.bases.get(tier.width)
        return facts_of(self.export, tier, module, self.formats) | {
            "base": base and digest_of(base.data),
            "memory": [str(bound) for bound in self.memory],
        }

    def _write(self, tier: Tier, report: ReportStage) -> None:
        """Trace, check and write a tier; first try out its model."""
        head = self.export.head(tier)
        module = self.export.module(tier)
        made_from = self._facts(tier, module)  # before a trace changes the module
        model = self._prepare(tier, module)
        # Before the trace, which takes minutes and whose errors name no line of the user.
        self._try_out(model)

        # First, because every board can run this format; other formats add files to it.
        written = self._write_portable(tier, model, report)
        if "ort-training" in self.formats:
            self._add_ort_training(written, model, report)
        if "executorch" in self.formats:
            self._add_executorch(written, model, report)

        sets = {"manifest.json": written}
        if self.memory:
            report("bounding memory")
            for plan in plans_within(written.graphs, self.memory, tier.id):
                sets[plan_file(plan.name)] = self._planned(plan, written, model)

        report("writing")
        folder = self.folder / tier.id
        for name, files in sets.items():
            for file in files.files:
                write_file(folder / file.path, file.data)
            manifest = self._manifest(tier, model, files)
            write_file(folder / name, manifest.to_bytes())
        if head:
            write_file(folder / "head.safetensors", encode_weights(head))
        write_file(folder / OWN_CLASS, own_class(self.export, tier, module))
        # Last, because it holds the digest of every other file.
        write_file(folder / MADE_FROM, record_of(folder, made_from))

    def _prepare(self, tier: Tier, module: nn.Module) -> _SubModel:
        """Measure a sub-model, and choose the batches for the checks of its graphs."""
        signature = self.export.signature_of(tier, module)
        signature = replace(signature, noise=model_noise(module, signature))
        flops = count_flops(module, signature)
        loss = self.export.recipe.loss
        # Fewer steps and smaller batches for large models, whose checks would take minutes.
        batches = SizedBatches(
            signature,
            vocabulary_of(module),
            seed=self.export.seed,
            loss=loss,
        ).sized_for(flops[1])
        return _SubModel(module, signature, batches, flops)

    def _try_out(self, model: _SubModel) -> None:
        """Refuse a model that does not fit the recipe, or that has a head without a gradient."""
        try_own_functions(model.module, self.export.recipe, model.batches)
        class_rows = set()
        for parameter in self.export.layout.parameters:
            for dim in parameter.dims:
                # Rows of labels are the model's head: without a gradient it would never learn.
                if any(segment.axis == CLASSES for segment in dim.segments):
                    class_rows.add(parameter.name)
        refuse_idle(model.module, self.export.recipe, model.batches, class_rows)

    def _write_portable(
        self,
        tier: Tier,
        model: _SubModel,
        report: ReportStage,
    ) -> _Written:
        """Return the graphs with the file of frozen tensors."""
        recipe = self.export.recipe
        report("tracing")
        with passing_objects():
            graphs = portable.write_graphs(model.module, model.signature, recipe)
        report("comparing with PyTorch")
        # The bytes that boards run are checked, after all rewrites.
        checks = list(portable.check_graphs(graphs, model.module, recipe, model.batches))
        skipped: dict[str, str] = {}
        try:
            checks += check_parts(graphs, checks, model.module, recipe, model.batches)
        except NotKeptError as error:
            skipped[BELOW] = str(error)
            graphs = without_parts(graphs)
        base = self.bases.get(tier.width)
        others = [] if base is None else [base]
        return _Written(graphs, others, checks, skipped)

    def _planned(self, plan: MemoryPlan, whole: _Written, model: _SubModel) -> _Written:
        """Return the files of a plan, whose changed graphs are compared with PyTorch, too."""
        recipe = self.export.recipe
        checks = list(portable.check_graphs(plan.changed, model.module, recipe, model.batches))
        checks += check_parts(plan.graphs, checks, model.module, recipe, model.batches)
        # A device would prefer onnxruntime-training's step, which has no bound.
        replaced = {STEP, *(graph.key for graph in plan.changed)}
        checks += [check for check in whole.checks if check.graph not in replaced]
        others = [file for file in whole.others if file.key not in replaced]
        return replace(
            whole,
            graphs=plan.graphs,
            others=others,
            checks=checks,
            recomputed_share=plan.recomputed_share,
        )

    def _manifest(self, tier: Tier, model: _SubModel, written: _Written) -> Manifest:
        """Return the manifest of the files of a tier, or of one of its plans."""
        parameters = self.export.layout.parameter_count(tier)
        footprint = Footprint(
            parameters,
            *model.flops,
            written.peak_memory_bytes,
            written.recomputed_share,
        )
        facts = SubModelFacts(
            model.signature,
            model.signature.noise or {},
            tuple(written.checks),
            footprint,
            written.skipped,
        )
        return manifest_of(self.export, tier, written.files, facts)

    def _add_ort_training(
        self,
        written: _Written,
        model: _SubModel,
        report: ReportStage,
    ) -> None:
        recipe = self.export.recipe
        report("writing onnxruntime-training artifacts")
        artifacts: Sequence[SetFile] = ()
        try:
            artifacts = ort_training.write_artifacts(model.module, model.signature, recipe)
        except UnavailableError as error:
            # A model that this format cannot hold is still exported in the others.
            written.skipped["ort-training"] = str(error)
        # Reported even without artifacts, because the progress counts two stages for each format.
        report("checking onnxruntime-training artifacts")
        if artifacts:
            written.checks.extend(
                ort_training.check_artifacts(artifacts, model.module, recipe, model.batches)
            )
        written.others.extend(artifacts)

    def _add_executorch(
        self,
        written: _Written,
        model: _SubModel,
        report: ReportStage,
    ) -> None:
        recipe = self.export.recipe
        report("writing ExecuTorch programs")
        programs: Sequence[SetFile] = ()
        try:
            programs = executorch.write_programs(model.module, model.signature, recipe)
        except UnavailableError as error:
            written.skipped["executorch"] = str(error)
        report("checking ExecuTorch programs")
        written.checks.extend(
            executorch.check_programs(programs, model.module, recipe, model.batches)
        )
        written.others.extend(programs)
