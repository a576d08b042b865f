"""FedRolex' ablation: devices that hold an entry weigh by the width of their layer, which differs
from layer to layer.

Alam et al., NeurIPS 2022 (see `broker_server.strategies.fedrolex`); specification 2.3. It weights
the devices that hold an entry by the width of their layer (``width``), by how often the entry was
updated before (``updates``), or by the product. The count of past updates is the same for every
device that holds the entry, so it cancels: ``updates`` is the plain average and ``updates_width``
is ``width``. (The released code counts while it adds, which makes later devices heavier; that is
not copied.)
"""

from typing import Literal

from broker_server.strategies.accumulator import Factor
from models.layout import Layout
from models.slicing import CompiledPlan

Weighting = Literal["avg", "width", "updates", "updates_width"]


def layer_factor(layout: Layout, weighting: Weighting) -> Factor:
    """What the tensors of an update weigh."""
    items = {item.name: item for item in layout.parameters}

    def factor(plan: CompiledPlan, name: str) -> float:
        """n_out of the device's layer: its rows, or the columns of a table whose rows are no
        labels.
        """
        item = items[name]
        shape = plan.tensors[name].local_shape
        if weighting not in {"width", "updates_width"} or not shape:
            return 1.0
        cut = [layout.is_cut(dim) for dim in item.dims]
        table = not cut[0] and item.dims[0].axis not in layout.label_axes
        return float(shape[cut.index(True)] if table and True in cut else shape[0])

    return factor
