"""FedRolex' ablation: weight the devices that hold an entry by the width of their layer.

Alam et al., NeurIPS 2022 (see `broker_server.strategies.fedrolex`); specification 2.3. The weight
is the width of the layer (``width``), how often the entry was updated before (``updates``), or the
product. The count of past updates is the same for every device that holds the entry, so it cancels:
``updates`` is the plain average and ``updates_width`` is ``width``. (The released code counts while
it adds, which makes later devices heavier; Shoal does not copy that.)
"""

from typing import Literal

from broker_server.strategies.accumulator import Factor
from models.layout import Layout
from models.slicing import CompiledPlan

LayerWeighting = Literal["avg", "width", "updates", "updates_width"]


def layer_factor(layout: Layout, weighting: LayerWeighting) -> Factor:
    """Return the factor of an update's weight for each of its tensors."""
    by_width = weighting in {"width", "updates_width"}
    parameters = {parameter.name: parameter for parameter in layout.parameters}

    def factor(plan: CompiledPlan, name: str) -> float:
        """Return n_out of the device's layer.

        These are its rows. A table whose rows are not cut, and belong to no labels, has its units
        in its columns.
        """
        local_shape = plan.tensors[name].local_shape
        if not by_width or not local_shape:
            return 1.0
        dims = parameters[name].dims
        is_cut = [layout.is_cut(dim) for dim in dims]
        is_table = not is_cut[0] and dims[0].axis not in layout.label_axes
        if is_table and True in is_cut:
            return float(local_shape[is_cut.index(True)])
        return float(local_shape[0])

    return factor
