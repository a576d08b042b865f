"""Writes the files of one tier after comparing them with PyTorch, or copies unchanged ones."""

import gc
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fleet_protocol.errors import ExportError, ShoalError
from fleet_protocol.graph_parts import BELOW
from fleet_protocol.manifest import CheckSpec, digest_of
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
from trainer_export.in_place import overwritten
from trainer_export.loss import Answer
from trainer_export.manifests import SubModelFacts, manifest_of
from trainer_export.memory_bound import NO_BOUND, within_memory
from trainer_export.model_inputs import (
    Signature,
    check_output,
    heads_of,
    model_noise,
    prepared,
)
from trainer_export.own_class import own_class
from trainer_export.parallel import Job, ReportStage
from trainer_export.provenance import MADE_FROM, facts_of, record_of, unchanged
from trainer_export.publishing import write_file
from trainer_export.recipe import Recipe
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
    """

    graphs: tuple[GraphFile, ...]
    others: list[SetFile]
    checks: list[CheckSpec]
    skipped: dict[str, str] = field(default_factory=dict)

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
        memory: largest peak memory of a training step in bytes.
    """

    export: Export
    formats: tuple[Format, ...]
    bases: Mapping[float, SetFile]
    folder: Path
    memory: float = NO_BOUND

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
            "memory": str(self.memory),
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

        report("writing")
        folder = self.folder / tier.id
        for file in written.files:
            write_file(folder / file.path, file.data)
        if head:
            write_file(folder / "head.safetensors", encode_weights(head))
        parameters = self.export.layout.parameter_count(tier)
        facts = SubModelFacts(
            model.signature,
            model.signature.noise or {},
            tuple(written.checks),
            Footprint(parameters, *model.flops, written.peak_memory_bytes),
            written.skipped,
        )
        manifest = manifest_of(self.export, tier, written.files, facts)
        write_file(folder / OWN_CLASS, own_class(self.export, tier, module))
        write_file(folder / "manifest.json", manifest.to_bytes())
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
        _try_own_functions(model.module, self.export.recipe, model.batches)
        class_rows = set()
        for parameter in self.export.layout.parameters:
            for dim in parameter.dims:
                # Rows of labels are the model's head: without a gradient it would never learn.
                if any(segment.axis == CLASSES for segment in dim.segments):
                    class_rows.add(parameter.name)
        _refuse_idle(model.module, self.export.recipe, model.batches, class_rows)

    def _write_portable(
        self,
        tier: Tier,
        model: _SubModel,
        report: ReportStage,
    ) -> _Written:
        """Return the graphs with the file of frozen tensors."""
        recipe = self.export.recipe
        report("tracing")
        with _collection_paused():
            graphs = portable.write_graphs(model.module, model.signature, recipe)
            graphs = within_memory(graphs, self.memory, tier.id)
        report("comparing with PyTorch")
        # The bytes that boards run are checked, after all rewrites.
        checks = list(portable.check_graphs(graphs, model.module, recipe, model.batches))
        skipped: dict[str, str] = {}
        try:
            checks += check_parts(graphs, model.module, recipe, model.batches)
        except NotKeptError as error:
            skipped[BELOW] = str(error)
            graphs = without_parts(graphs)
        base = self.bases.get(tier.width)
        others = [] if base is None else [base]
        return _Written(graphs, others, checks, skipped)

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


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the garbage collector: a trace creates millions of objects that end together."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that the collection at the end skips older objects
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect()
        gc.unfreeze()


def _try_own_functions(
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
) -> None:
    """Call the user's loss and metrics once on every size of a batch."""
    recipe.loss.require_outputs(batches.signature.heads)
    # Shoal's own losses and metrics have tests, and need no try.
    if not recipe.has_own:
        return
    with torch.no_grad():
        for x, y in batches.draw(len(batches.sizes)):
            output = prepared(module, "statistics")(x)
            # The trial also differentiates the loss, which `no_grad` would prevent.
            with torch.enable_grad():
                recipe.try_out(output, Answer(y, batches.mask()))


def _refuse_idle(
    module: nn.Module,
    recipe: Recipe,
    batches: SizedBatches,
    class_rows: Container[str],
) -> None:
    """Refuse a model with a head that would never be trained.

    Args:
        module: the sub-model.
        recipe: its loss must depend on every head.
        batches: the batches to try.
        class_rows: names of parameters that have rows for labels.

    Raises:
        ExportError: the loss does not depend on a head, or on one of these parameters.
    """
    model = prepared(module, "train")
    x, y = next(batches.draw(1))
    # Dropout draws here, and a set must not depend on whether this check ran.
    with torch.random.fork_rng(devices=[]):
        output = model(x)
    check_output(output, batches.signature)
    loss = recipe.loss.pytorch(output, Answer(y, batches.mask()))
    edges = _edges_below(loss)
    parameters = dict(model.named_parameters())
    rows = {}
    for name, parameter in parameters.items():
        if name in class_rows:
            rows[name] = parameter
    for name, value in {**heads_of(output), **rows}.items():
        if value.requires_grad and get_gradient_edge(value)[:2] not in edges:
            raise ExportError(
                f"the loss {recipe.loss.name} does not depend on {name}, which would never be"
                " trained; use that head in the loss, or remove it from the model"
            )


def _edges_below(loss: torch.Tensor) -> set[Any]:
    """Return every edge of the graph of gradients that a backward pass from a loss follows."""
    edges = set[Any]()
    if not loss.requires_grad:
        return edges
    waiting: list[Any] = [get_gradient_edge(loss)[:2]]
    while waiting:
        edge = waiting.pop()
        # None marks a value without a gradient.
        if edge[0] is not None and edge not in edges:
            edges.add(edge)
            waiting += edge[0].next_functions
    return edges
