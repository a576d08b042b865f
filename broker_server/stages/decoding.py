"""Decodes an update that was sent as a change with fewer bits, or fewer entries."""

from collections.abc import Mapping

import numpy as np

from broker_server.stages.update import Tensors
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from fleet_protocol.encodings import decode
from fleet_protocol.messages.instructions import Upload

STAGES = stated(
    # The server decodes an update before it adds it.
    Stage(
        name="upload.encoding",
        remedy='set upload.encoding = "fp32"',
        setting="upload.encoding",
        wanted=lambda run: run.upload.encoding != "fp32",
        needs=frozenset({Trait.SINGLE}),
    ),
    # The part that an update leaves out is added to the device's next one, for the same units.
    Stage(
        name='upload.encoding = "topk"',
        remedy='set upload.encoding = "int8"',
        setting="upload.encoding",
        wanted=lambda run: run.upload.encoding == "topk",
        needs=frozenset({Trait.MEAN_OF_CHANGES, Trait.FIXED_PLANS}),
        breaks=frozenset({Trait.WHOLE}),
    ),
)


def decode_update(
    encoded: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    upload: Upload,
    sent: Tensors,
) -> Tensors:
    """Add the decoded change to the weights that were sent.

    Args:
        encoded: tensors as received.
        shapes: shapes of the update's tensors, by name.
        upload: the encoding that the device was asked for.
        sent: the weights that were sent to the device.

    Raises:
        RefusedError: the tensors are not the output of the encoding.
    """
    change = decode(encoded, shapes, upload.encoding, keep=upload.keep)
    with np.errstate(over="ignore"):  # sums that are not finite are refused with the others
        return {name: sent[name] + value for name, value in change.items()}
