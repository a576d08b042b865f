"""An artifact set of one model that a server can serve, without the comparisons of an export.

The graphs are those of an export. A check takes most of its time, and changes nothing in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.step_time import Case
from fleet_protocol.manifest import Manifest
from fleet_protocol.weights import encode_weights
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.initial_state import initial_weights
from models.zoo.randomized_model import vocabulary_of
from trainer_export.batches import SizedBatches
from trainer_export.exported import Export
from trainer_export.footprint import Footprint, peak_memory
from trainer_export.formats.files import GraphFile
from trainer_export.formats.model_bytes import model_bytes
from trainer_export.formats.onnx import write_graphs
from trainer_export.in_place import overwritten
from trainer_export.manifests import SubModelFacts, manifest_of
from trainer_export.memory_bound import smallest_step
from trainer_export.model_inputs import Signature, model_noise

_STEP = "onnx/train"


@dataclass(frozen=True)
class UncheckedSet:
    """The traced graphs of one tier, and what its manifest needs.

    Attributes:
        vocabulary: upper bound of the tokens that the model reads.
        noise: shapes of the random numbers of its layers.
    """

    case: Case
    export: Export
    tier: Tier
    signature: Signature
    vocabulary: int
    noise: dict[str, tuple[int, ...]]
    graphs: tuple[GraphFile, ...]

    @classmethod
    def of(cls, case: Case) -> "UncheckedSet":
        """Trace the model of a case at its width.

        Raises:
            ConfigError: the model needs a package that is not installed.
            ExportError: an operator cannot be exported.
        """
        settings = dict(case.settings) or None
        layout = infer_layout(case.architecture, settings)
        export = Export(case.architecture, layout, case.recipe)
        tier = layout.tier(case.width, None, case.trained)
        module = export.module(tier)
        signature = export.signature_of(tier, module)
        graphs = write_graphs(module, signature, case.recipe)
        noise = dict(model_noise(module, signature))
        return cls(
            case=case,
            export=export,
            tier=tier,
            signature=signature,
            vocabulary=vocabulary_of(module),
            noise=noise,
            graphs=graphs,
        )

    def with_smallest_step(self) -> "UncheckedSet":
        """Return the set with the step of the plan that needs the least memory."""
        graphs = []
        for graph in self.graphs:
            if graph.key == _STEP:
                model = smallest_step(graph.model)
                graphs.append(replace(graph, data=model_bytes(model), model=model))
            else:
                graphs.append(graph)
        return replace(self, graphs=tuple(graphs))

    def publish(self, folder: Path) -> Manifest:
        """Write the set below a folder of artifacts, and return its manifest."""
        arch = folder / self.case.arch
        tier = arch / self.tier.id
        for file in self.graphs:
            path = tier / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
        (arch / "layout.json").write_text(self.export.layout.to_json())
        weights = initial_weights(self.export.arch, dict(self.case.settings) or None)
        (arch / "init.safetensors").write_bytes(encode_weights(weights))
        manifest = self._manifest(self.graphs)
        (tier / "manifest.json").write_bytes(manifest.to_bytes())
        return manifest

    def _manifest(self, files: Sequence[GraphFile]) -> Manifest:
        step = next(file for file in files if file.key == _STEP)
        peak = peak_memory(step.model, in_place=overwritten(files))
        parameters = self.export.layout.parameter_count(self.tier)
        facts = SubModelFacts(self.signature, self.noise, (), Footprint(parameters, 0, 0, peak))
        return manifest_of(self.export, self.tier, files, facts)

    def write_samples(self, path: Path, batches: int) -> None:
        """Write made-up samples for some batches of the case to an npz file with x and y."""
        sized = SizedBatches(
            self.signature, self.vocabulary, (self.case.batch,), loss=self.case.recipe.loss
        )
        drawn = list(sized.draw(batches))
        x = np.concatenate([samples.numpy() for samples, _ in drawn])
        y = np.concatenate([targets.numpy() for _, targets in drawn])
        np.savez(path, x=x, y=y)
