"""The exported folder of one architecture: layout, manifests, initial weights, and the blobs to
serve.

The folder may come from somebody else. So every file must be within the folder, and the server
serves a file only under its own digest. Reading a set that names another file of this machine
fails.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import MappingProxyType

import numpy as np

from fleet_protocol.blobs import blob_ref
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import BlobError, ConfigError, PlanError
from fleet_protocol.foreign_files import name_problem, path_within, quoted, read_within
from fleet_protocol.manifest import BASE, FileSpec, Manifest, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef
from models.layout import Layout
from models.slicing import Tensors
from models.tier import Tier


@dataclass(frozen=True)
class TierArtifacts:
    """One tier's artifact set; `ref` is its manifest as a blob, which names the set."""

    tier: Tier
    manifest: Manifest
    ref: BlobRef
    folder: Path

    def path(self, spec: FileSpec) -> Path:
        """Return the path of a file of the set; raise a ConfigError if it is outside the folder."""
        return _path(self.folder, spec.path)

    @property
    def head(self) -> Path:
        """Return the file with the initial weights of the tier's own head, if any.

        Errors are those of `path`.
        """
        return _path(self.folder, "head.safetensors")

    def base(self) -> Tensors:
        """The frozen tensors beside the weights, read-only float32 views.

        A BlobError where their file is damaged.
        """
        if not self.manifest.base:
            return {}
        found = open_tensors(self.path(self.manifest.files[BASE]))
        return {spec.name: found[spec.name] for spec in self.manifest.base}


@dataclass(frozen=True)
class Artifacts:
    """One exported architecture."""

    arch: str
    layout: Layout  # the global model
    tiers: Mapping[str, TierArtifacts]  # artifact sets by tier id, largest first
    initial: Path  # file with the initial global weights
    files: Mapping[
        str, Path
    ]  # every blob that a device may request, by the digest that it had when it was read

    @property
    def full(self) -> TierArtifacts:
        """The set of the whole model; a ConfigError where it was not exported."""
        tier = self.layout.tier(1.0)
        if tier.id not in self.tiers:
            raise ConfigError(
                f"{self.arch}: the full tier {tier.id} is not exported; export it with --widths 1,..."
            )
        return self.tiers[tier.id]

    def initial_weights(self) -> Tensors:
        """The weights a run starts from: read-only float32 views, in layout order.

        Raises:
            BlobError: the file is damaged.
            ConfigError: it does not fit the layout.
        """
        return self._tensors(
            self.initial, {item.name: item.shape for item in self.layout.parameters}
        )

    def initial_heads(self, tiers: Iterable[Tier]) -> dict[Tier, Tensors]:
        """The weights that heads of tiers' own start from, by tier, as views.

        Errors as of `initial_weights`.
        """
        shapes = {tier: self.layout.shapes(tier) for tier in tiers}
        own = {
            tier: {item.name: of[item.name] for item in self.layout.own_head(tier)}
            for tier, of in shapes.items()
        }
        return {
            tier: self._tensors(self.tiers[tier.id].head, wanted)
            for tier, wanted in own.items()
            if wanted
        }

    def _tensors(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        given = open_tensors(path)
        for name, shape in shapes.items():
            value = given.get(name)
            if value is None or value.shape != shape or value.dtype != np.float32:
                found = "missing" if value is None else f"{value.dtype} {value.shape}"
                raise ConfigError(
                    f"{path}: tensor {name} should be float32 {shape} but is {found}; "
                    f"these weights do not belong to {self.arch} as exported"
                )
        return {name: given[name] for name in shapes}


_AGAIN = "export the architecture again"


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_within(folder, name)
    except BlobError as error:
        raise ConfigError(f"{error}; {_AGAIN}") from error


def _path(folder: Path, name: str) -> Path:
    try:
        return path_within(folder, name)
    except BlobError as error:
        raise ConfigError(f"{error}; {_AGAIN}") from error


def _initial(folder: Path) -> Path:
    """Return the path of the exported weights; a resumed run does not need the file."""
    path = folder / "init.safetensors"
    return _path(folder, path.name) if path.is_symlink() or path.exists() else path


@functools.lru_cache(maxsize=4096)
def _has_digest(path: Path, digest: str, state: tuple[int, ...]) -> bool:
    """Return whether a file has a digest.

    The process caches the result while `state` stays the same.
    """
    del state
    return file_matches(path, digest)


def _check_content(path: Path, spec: FileSpec) -> None:
    """Check a file against its manifest; raise a ConfigError if they differ.

    Hashing a set of 100 MB takes 0.1 s of processor time.
    """
    try:
        about = path.stat()
        if about.st_size != spec.size:
            raise ConfigError(f"{path} has {about.st_size} bytes instead of {spec.size}; {_AGAIN}")
        state = (
            about.st_dev,
            about.st_ino,
            about.st_mtime_ns,
            about.st_ctime_ns,
            about.st_size,
        )
        right = _has_digest(path, spec.digest, state)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not right:
        raise ConfigError(f"{path} does not have the digest in the manifest beside it; {_AGAIN}")


def _load_tier(
    root: Path, name: str, layout: Layout, chunk_bytes: int
) -> tuple[TierArtifacts, dict[str, Path]]:
    """Read the set in a folder with that name, and the path of each of its files by digest."""
    place = _path(root, f"{name}/manifest.json")
    folder = place.parent
    data = _read(folder, place.name)
    try:
        manifest = parse_manifest(data)
        tier = Tier.parse(manifest.tier)
        shapes = layout.shapes(tier)
    except (BlobError, PlanError) as error:
        raise ConfigError(f"{place}: {error}") from error
    if {spec.name: spec.shape for spec in manifest.parameters} != shapes:
        raise ConfigError(
            f"{folder}: the parameters of the manifest and of layout.json differ; {_AGAIN}"
        )
    ref = blob_ref(data, chunk_bytes)
    found = TierArtifacts(tier, manifest, ref, folder)
    files = {ref.digest: place}
    for spec in manifest.all_files:
        path = found.path(spec)
        _check_content(path, spec)
        files[spec.digest] = path
    return found, files


def load_artifacts(
    root: Path, arch: str, *, chunk_bytes: int, weights: Path | None = None
) -> Artifacts:
    """Read an architecture that `shoal export` wrote to a folder, to be sent in chunks of so many
    payload bytes.

    A safetensors file of weights takes the place of the exported ones.

    Raises:
        ConfigError: no set with that name was exported there, the set is incomplete or differs from
            its manifests, or one of its files is elsewhere.
    """
    problem = name_problem(arch)
    if problem is not None:
        raise ConfigError(f"{quoted(arch)} does not name an architecture: {problem}")
    folder = root / arch
    if not folder.is_dir():
        there = (
            sorted(path.parent.name for path in root.glob("*/layout.json")) if root.is_dir() else []
        )
        known = f"it holds {', '.join(there)}" if there else "nothing is exported there"
        exporting = f"`shoal export --arch {quote(arch)} --out {quote(str(root))}`"
        raise ConfigError(f"no architecture {arch!r} in {root} ({known}); run {exporting}")
    layout = Layout.from_json(_read(folder, "layout.json"))
    names = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
    loaded = [_load_tier(folder, name, layout, chunk_bytes) for name in names]
    if not loaded:
        raise ConfigError(f"{folder} holds no tier; export the architecture again")
    tiers = sorted(
        (tier for tier, _ in loaded),
        key=lambda item: (-item.manifest.parameter_count, item.tier.id),
    )
    return Artifacts(
        arch=arch,
        layout=layout,
        tiers=MappingProxyType({item.tier.id: item for item in tiers}),
        initial=weights.resolve()
        if weights
        else _initial(folder),  # the user may have linked to weights elsewhere
        files=MappingProxyType({name: path for _, files in loaded for name, path in files.items()}),
    )
