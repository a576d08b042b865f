"""The files of one tier: traced, compared with PyTorch and written, or taken from an earlier export
that has them.
"""

import gc
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fleet_protocol.errors import ExportError, ShoalError
from fleet_protocol.manifest import digest_of
from fleet_protocol.weights import encode_weights
from models.cut import CLASSES
from models.own_class import OWN_CLASS
from models.tier import Tier
from models.user_lines import at_line_of, first_line
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, count_flops, peak_memory
from trainer_export.formats import executorch, ort_training
from trainer_export.formats import onnx as portable
from trainer_export.formats.files import SetFile, UnavailableError
from trainer_export.loss import Answer
from trainer_export.manifests import Facts, manifest_of
from trainer_export.model_inputs import (
    check_output,
    heads_of,
    model_noise,
    prepared,
    require_one_output,
)
from trainer_export.own_class import own_class
from trainer_export.parallel import Job, Tell
from trainer_export.provenance import MADE_FROM, facts_of, record_of, unchanged
from trainer_export.publishing import write_file
from trainer_export.recipe import Recipe
from trainer_export.traced_program import advice_on

Format = Literal["onnx", "ort-training", "executorch"]

_BASE_BYTES, _COPIES = (
    100_000_000,
    8,
)  # what a process exports a tier in: beside what it shares, and of its parameters


@dataclass(frozen=True)
class TierSets:
    """The tiers of one export.

    `bases` are files of frozen parameters by width, `folder` is of the set being made.
    """

    export: Export
    formats: tuple[Format, ...]
    bases: Mapping[float, SetFile]
    folder: Path

    def take(self, tier: Tier, old: Path) -> bool:
        """Take a tier's files from an earlier export's folder, if they would come out the same.

        Whether they would.
        """
        if not (old / MADE_FROM).is_file():
            return False
        if not unchanged(old, self._facts(tier, self.export.module(tier))):
            return False
        shutil.copytree(old, self.folder / tier.id)
        return True

    def job(self, tier: Tier) -> Job:
        """What exports a tier.

        It raises what `trainer_export.artifact_set.export_architecture` says.
        """
        nbytes = _BASE_BYTES + 4 * _COPIES * self.export.layout.parameter_count(tier)
        return Job(tier.id, nbytes, lambda tell: self._told(tier, tell))

    def _told(self, tier: Tier, tell: Tell) -> None:
        try:
            self._write(tier, tell)
        except (ShoalError, OSError, MemoryError):
            raise
        except Exception as error:
            raise ExportError(
                f"{self.export.arch.name}: {tier.id}: the model fails{at_line_of(error)}: {first_line(error)};"
                f" it must run on any samples of its shape, in training, too, and {advice_on(error)}"
            ) from error

    def _facts(self, tier: Tier, module: nn.Module) -> dict[str, Any]:
        base = self.bases.get(tier.width)
        return facts_of(self.export, tier, module, self.formats) | {
            "base": base and digest_of(base.data)
        }

    def _write(self, tier: Tier, tell: Tell) -> None:
        export = self.export
        folder = self.folder / tier.id
        head = export.head(tier)
        module = export.module(tier)
        recipe = export.recipe
        made_from = self._facts(tier, module)
        base = self.bases.get(tier.width)
        signature = export.signature_of(tier, module)
        signature = replace(signature, noise=model_noise(module, signature))
        flops = count_flops(module, signature)
        batches = SizedBatches(
            signature, vocabulary_of(module), seed=export.seed, loss=recipe.loss
        ).sized_for(flops[1])
        _try_out(module, recipe, batches)
        parts = [
            (item.name, part)
            for item in export.layout.parameters
            for dim in item.dims
            for part in dim.segments
        ]
        _refuse_idle(
            module,
            recipe,
            batches,
            {parameter for parameter, part in parts if part.axis == CLASSES},
        )
        tell("tracing")
        with _uncollected():
            graphs = portable.write_graphs(module, signature, recipe)
        tell("checking against PyTorch")
        checks = list(portable.check_graphs(graphs, module, recipe, batches))
        files: list[SetFile] = [*graphs, *([] if base is None else [base])]
        skipped: dict[str, str] = {}
        if "ort-training" in self.formats:
            tell("writing onnxruntime-training artifacts")
            try:
                training = ort_training.write_artifacts(module, signature, recipe)
            except UnavailableError as error:
                training, skipped["ort-training"] = (), str(error)
            tell("checking onnxruntime-training artifacts")
            if training:
                checks += ort_training.check_artifacts(training, module, recipe, batches)
            files += training
        if "executorch" in self.formats:
            tell("writing ExecuTorch programs")
            try:
                programs = executorch.write_programs(module, signature, recipe)
            except UnavailableError as error:
                programs, skipped["executorch"] = (), str(error)
            tell("checking ExecuTorch programs")
            checks += executorch.check_programs(programs, module, recipe, batches)
            files += programs
        tell("writing")
        footprint = Footprint(
            export.layout.parameter_count(tier), *flops, peak_memory(graphs[0].model)
        )
        for file in files:
            write_file(folder / file.path, file.data)
        if head:
            write_file(folder / "head.safetensors", encode_weights(head))
        facts = Facts(signature, signature.noise or {}, tuple(checks), footprint, skipped)
        write_file(folder / OWN_CLASS, own_class(export, tier, module))
        write_file(folder / "manifest.json", manifest_of(export, tier, files, facts).to_bytes())
        write_file(folder / MADE_FROM, record_of(folder, made_from))


@contextmanager
def _uncollected() -> Iterator[None]:
    """While this holds, cycles of objects are not looked for: a trace makes millions of them, which
    go at the end.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before is not looked through at the end
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect()
        gc.unfreeze()


def _try_out(module: nn.Module, recipe: Recipe, batches: SizedBatches) -> None:
    require_one_output(batches.signature, recipe.loss)
    if not recipe.has_own:
        return
    with torch.no_grad():
        for x, y in batches.take(len(batches.sizes)):
            output = prepared(module, "statistics")(x)
            with torch.enable_grad():
                recipe.try_out(output, Answer(y, batches.mask()))


def _refuse_idle(
    module: nn.Module, recipe: Recipe, batches: SizedBatches, heads: Container[str]
) -> None:
    """See that the loss depends on all that a model returns, and on `heads`, parameters with rows
    for labels.
    """
    model, (x, y) = prepared(module, "train"), next(batches.take(1))
    with torch.random.fork_rng(devices=[]):
        output = model(x)
    check_output(output, batches.signature)
    loss = recipe.loss.pytorch(output, Answer(y, batches.mask()))
    read = set[Any]()
    todo = list[Any]([get_gradient_edge(loss)[:2]] if loss.requires_grad else ())
    while todo:
        edge = todo.pop()
        if edge[0] is not None and edge not in read:
            read.add(edge)
            todo += edge[0].next_functions
    own = {name: value for name, value in model.named_parameters() if name in heads}
    for name, value in {**heads_of(output), **own}.items():
        if value.requires_grad and get_gradient_edge(value)[:2] not in read:
            raise ExportError(
                f"the loss {recipe.loss.name} does not depend on {name}, which would never be trained; let it depend on"
                " it, or leave that head out of the model"
            )
