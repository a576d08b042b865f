"""Samples a map at computed places, as a product with each pixel's weight at each place.

Spatial transformers need this.

The weight decreases linearly in each direction: ``max(0, 1 - |place - pixel|)``; outside the map it
is zero, which is PyTorch's zero padding. A product of all places with all pixels is slow for large
maps, but standard operators offer nothing better.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet_protocol.errors import ExportError

_SPATIAL = 4  # dimensions of maps [batch, channels, height, width]


def _grid_sample(
    x: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    if mode != "bilinear" or padding_mode != "zeros" or x.dim() != _SPATIAL:
        raise ExportError(
            f"grid_sample of {x.dim() - 2} dimensions with mode={mode!r} and "
            f"padding_mode={padding_mode!r} cannot be exported; use mode='bilinear' and "
            "padding_mode='zeros' on maps [batch, channels, height, width]"
        )
    shares = []
    # A grid gives the horizontal place first, a map its height.
    for axis, size in enumerate((x.shape[3], x.shape[2])):
        # -1 and 1 are the centres of the corner pixels, or the outer edges of the map.
        scale = (size - 1) / 2 if align_corners else size / 2
        place = (grid[..., axis] + 1) * scale
        if not align_corners:
            place = place - 0.5
        place = place.flatten(1).unsqueeze(-1)
        low = torch.floor(place)
        pixels = torch.arange(size)
        # Exactly on a pixel, the slope is the one towards the next pixel.
        share_of_low = (low == pixels) * (low + 1 - place)
        share_of_next = (low + 1 == pixels) * (place - low)
        shares.append(share_of_low + share_of_next)
    # The weight of a pixel is the product of its weights in both directions.
    weights = (shares[1].unsqueeze(-1) * shares[0].unsqueeze(-2)).flatten(2)
    return torch.unflatten(
        x.flatten(2) @ weights.transpose(1, 2),
        2,
        tuple(grid.shape[1:3]),
    )


def _affine_grid(
    theta: Tensor,
    size: Sequence[int],
    align_corners: bool | None = None,
) -> Tensor:
    if len(size) != _SPATIAL:
        raise ExportError(
            "affine_grid of volumes cannot be exported; use maps [batch, channels, height, width]"
        )
    lines = []
    for count in size[2:]:
        # Centres of the pixels, if -1 and 1 are the edges of the map.
        line = (2 * torch.arange(count) + 1) / count - 1
        lines.append(torch.linspace(-1, 1, count) if align_corners else line)
    rows, columns = torch.meshgrid(*lines, indexing="ij")
    places = torch.stack(
        [
            columns,
            rows,
            torch.ones_like(rows),
        ],
        -1,
    ).flatten(0, 1)
    return torch.unflatten(
        places @ theta.transpose(1, 2),
        1,
        (size[2], size[3]),
    )


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {functional.grid_sample: _grid_sample, functional.affine_grid: _affine_grid}
)
