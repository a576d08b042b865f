"""What the store keeps as tensors, as mapped arrays: a merge reads each update once, straight from the page cache."""

from typing import Any

from numpy.typing import NDArray

from fleet_protocol.blob_store import BlobStore
from fleet_protocol.mapped_tensors import open_tensors

__all__ = ["open_state", "open_tensors"]


def open_state(blobs: BlobStore, digest: str | None) -> dict[str, NDArray[Any]]:
    """Map what a strategy carries from round to round.

    Args:
        blobs: where it is kept.
        digest: of the state of a version; None if it has none.

    Raises:
        BlobError: it cannot be read.
    """
    return {} if digest is None else open_tensors(blobs.path(digest))
