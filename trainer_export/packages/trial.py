"""Finds out whether a package's model can be exported, by writing its graphs with few blocks."""

from collections.abc import Mapping

import torch

from fleet_protocol.graphs.check import check_structure
from fleet_protocol.graphs.exposure import exposed_outputs, is_sample_input
from models.cut import Cut
from models.zoo.builds import ModelBuilder
from models.zoo.conversion_plan import converted
from trainer_export.formats.onnx import write_forward_graphs, write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.packages.axis_forms import classes_form
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.survey import ShapeProber
from trainer_export.recipe import Recipe

_FEW_BLOCKS = 2  # some constructors divide by the number of further blocks


def can_export(model: PackageModel) -> bool:
    """Return whether the graphs of a model with labels can be written, and boards would run them.

    Args:
        model: the model; it is tried with two blocks in each stack, if its constructor takes that.
    """
    few: dict[str, int] = {}
    for place in model.sizes:
        if place.endswith("layers") or place == "n_layer":
            few[place] = min(model.sizes[place], _FEW_BLOCKS)
    if not ShapeProber.for_model(model).can_build(few):
        few = {}
    return _exports(model, few)


def _exports(model: PackageModel, few: Mapping[str, int]) -> bool:
    classes = model.sizes.get(model.labels)
    if classes is None or model.input_shape is None:
        return False
    plain = architecture_of(model, [classes_form(model.labels, classes)], few)
    # The whole conversion that an export may need.
    arch = converted(plain, drops_by_functions=True)
    try:
        with torch.random.fork_rng(devices=[]):
            module = ModelBuilder(arch).build(Cut())
        signature = Signature(model.input_shape, model.input_dtype, classes).with_places_of(module)
        recipe = Recipe()
        written = write_train_graph(
            module,
            signature,
            recipe,
        )
        graph = check_structure(memoryview(written.data))
        write_forward_graphs(
            module,
            signature,
            recipe,
        )
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return False
    samples = [port.name for port in graph.inputs if is_sample_input(port.name)]
    return not exposed_outputs(graph, samples)
