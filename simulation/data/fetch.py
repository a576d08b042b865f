"""Downloads data sets, and keeps only files with the expected checksum.

Only MNIST can be downloaded: the checksums are those of its four uncompressed IDX files, not of a
mirror's archives. For other sets, an error names the source and the files that the loader
expects.
"""

import gzip
import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from fleet_protocol.blob_store import replacing
from fleet_protocol.errors import BlobError, ConfigError, TransportError

_BLOCK = 1 << 16


@dataclass(frozen=True)
class RemoteFile:
    """A gzipped file to download."""

    url: str
    size: int  # size of the unpacked content in bytes
    sha256: str  # digest of the unpacked content, in hexadecimal

    @property
    def name(self) -> str:
        """Return the last part of the URL, its name on the disk."""
        return self.url.rpartition("/")[2]


_MNIST = (
    (
        "train-images-idx3",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    (
        "train-labels-idx1",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    (
        "t10k-images-idx3",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    (
        "t10k-labels-idx1",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"

SOURCES: Mapping[str, tuple[RemoteFile, ...]] = MappingProxyType(
    {
        "mnist": tuple(
            RemoteFile(f"{_MIRROR}/{stem}-ubyte.gz", size, sha256) for stem, size, sha256 in _MNIST
        )
    }
)
"""The files that `fetch` can download, by data set."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "digits": "it is part of scikit-learn and needs no file",
        "cifar10": "get it from https://www.cs.toronto.edu/~kriz/cifar.html and store each split as"
        " cifar10/train.npz and test.npz with the arrays jpeg (the JPEG files end to end, uint8),"
        " offset (int64) and label (uint8)",
        "cifar100": "get the binary version from https://www.cs.toronto.edu/~kriz/cifar.html and"
        " put train.bin and test.bin into cifar100/",
        "cifar_tasks": "it is cifar10 and cifar100 together",
        "watch": "it is part of the seglearn package on PyPI (load_watch); store it as"
        " watch/watch.npz with the arrays signal (recordings end to end, float32 [time,"
        " 6]), length, label and subject",
        "wikitext2": "get the WikiText-2 token files from its authors and put wiki.train.tokens,"
        " wiki.valid.tokens and wiki.test.tokens into wikitext2/",
        "sst2": "get it from https://nlp.stanford.edu/sentiment and store sst2/train.tsv, dev.tsv"
        " and test.tsv with a sentence, a tab and 0 or 1 in each line",
        "cola": "get it from https://nyu-mll.github.io/CoLA and put in_domain_train.tsv,"
        " in_domain_dev.tsv and out_of_domain_dev.tsv into cola/",
    }
)
"""Where to get the other data sets, and what the loaders expect."""


def fetch(
    name: str,
    root: Path,
    *,
    sources: Mapping[str, tuple[RemoteFile, ...]] = SOURCES,
    timeout_seconds: float = 60.0,
) -> list[Path]:
    """Download a data set into its folder below the one for SHOAL_DATA.

    Existing correct files are kept.

    Raises:
        ConfigError: the set cannot be downloaded; the message names its source.
        TransportError: the server is unreachable or closes the connection.
        BlobError: a downloaded file has a wrong checksum; it is not kept.
        StorageError: the folder cannot be written.
    """
    if name not in sources:
        if name in ELSEWHERE:
            raise ConfigError(
                f"data set {name} cannot be downloaded automatically: {ELSEWHERE[name]}"
            )
        raise ConfigError(
            f"unknown data set {name!r}; choose from {', '.join([*sources, *ELSEWHERE])}"
        )
    folder = root / name
    paths = []
    for file in sources[name]:
        path = folder / file.name
        if not _is_right(path, file):
            _download(file, path, timeout_seconds)
        paths.append(path)
    return paths


def _is_right(path: Path, file: RemoteFile) -> bool:
    try:
        with path.open("rb") as stored:
            _verify(stored, file)
    except (OSError, BlobError):
        return False
    return True


def _download(file: RemoteFile, path: Path, timeout_seconds: float) -> None:
    if urllib.parse.urlsplit(file.url).scheme not in ("http", "https"):
        raise ConfigError(f"{file.url} is neither http nor https")
    # The file takes its name only after its digest was checked.
    with replacing(path) as target:
        _receive(file, target, timeout_seconds)
        target.seek(0)
        _verify(target, file)


def _receive(file: RemoteFile, target: IO[bytes], timeout_seconds: float) -> None:
    """Copy the response to a file, up to slightly more than the expected size."""
    # The expected size is that of the unpacked content, so this bounds a wrong file generously.
    left = file.size + (1 << 20)
    try:
        # The scheme was checked by the caller.
        with urllib.request.urlopen(file.url, timeout=timeout_seconds) as answer:  # noqa: S310
            while block := answer.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    raise BlobError(
                        f"{file.url} is larger than expected; the mirror serves another file"
                    )
                target.write(block)
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        raise TransportError(
            f"cannot download {file.url}: {error}; check the network and try again"
        ) from error


def _verify(stored: IO[bytes], file: RemoteFile) -> None:
    """Compare size and digest of the unpacked content; stop as soon as it is too long."""
    digest = hashlib.sha256()
    size = 0
    try:
        with gzip.GzipFile(fileobj=stored) as content:
            while block := content.read(_BLOCK):
                digest.update(block)
                size += len(block)
                # A small file may unpack into any size.
                if size > file.size:
                    break
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BlobError(
            f"{file.name} from {file.url} is not a complete gzip file: {error}; download it again"
        ) from error
    if size != file.size or digest.hexdigest() != file.sha256:
        raise BlobError(
            f"{file.name} from {file.url} has unexpected content (sha256 {digest.hexdigest()},"
            f" {size} bytes; expected {file.sha256}, {file.size}); it was not kept"
        )
