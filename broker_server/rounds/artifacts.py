"""The exported folder of one architecture: layout, manifests, initial weights, and the blobs to serve."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from fleet_protocol.blobs import blob_ref
from fleet_protocol.errors import BlobError, ConfigError, PlanError
from fleet_protocol.manifest import BASE, Manifest, parse_manifest
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

    @property
    def head(self) -> Path:
        """File with the initial weights of a head of its own, where it has one."""
        return self.folder / "head.safetensors"

    def base(self) -> Tensors:
        """The frozen tensors beside the weights, read-only float32 views; a BlobError where their file is damaged."""
        if not self.manifest.base:
            return {}
        found = open_tensors(self.folder / self.manifest.files[BASE].path)
        return {spec.name: found[spec.name] for spec in self.manifest.base}


@dataclass(frozen=True)
class Artifacts:
    """One exported architecture."""

    arch: str
    layout: Layout  # the global model
    tiers: Mapping[str, TierArtifacts]  # artifact sets by tier id, largest first
    initial: Path  # file with the initial global weights
    files: Mapping[str, Path]  # every blob a device may ask for, by digest

    @property
    def full(self) -> TierArtifacts:
        """The set of the whole model; a ConfigError where it was not exported."""
        tier = self.layout.tier(1.0)
        if tier.id not in self.tiers:
            raise ConfigError(f"{self.arch}: the full tier {tier.id} is not exported; export it with --widths 1,...")
        return self.tiers[tier.id]

    def initial_weights(self) -> Tensors:
        """The weights a run starts from: read-only float32 views, in layout order.

        Raises:
            BlobError: the file is damaged.
            ConfigError: it does not fit the layout.
        """
        return self._tensors(self.initial, {item.name: item.shape for item in self.layout.parameters})

    def initial_heads(self, tiers: Iterable[Tier]) -> dict[Tier, Tensors]:
        """The weights that heads of tiers' own start from, by tier, as views; errors as of `initial_weights`."""
        shapes = {tier: self.layout.shapes(tier) for tier in tiers}
        own = {tier: {item.name: of[item.name] for item in self.layout.own_head(tier)} for tier, of in shapes.items()}
        return {tier: self._tensors(self.tiers[tier.id].head, wanted) for tier, wanted in own.items() if wanted}

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


def _read(path: Path, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. {hint}") from error


def _load_tier(folder: Path, layout: Layout, chunk_bytes: int) -> tuple[TierArtifacts, dict[str, Path]]:
    data = _read(folder / "manifest.json", "Export the architecture again.")
    try:
        manifest = parse_manifest(data)
        tier = Tier.parse(manifest.tier)
        shapes = layout.shapes(tier)
    except (BlobError, PlanError) as error:
        raise ConfigError(f"{folder / 'manifest.json'}: {error}") from error
    if {spec.name: spec.shape for spec in manifest.parameters} != shapes:
        raise ConfigError(
            f"{folder}: the manifest's parameters are not those of layout.json; export the architecture again"
        )
    ref = blob_ref(data, chunk_bytes)
    files = {ref.digest: folder / "manifest.json"}
    for spec in (*manifest.graphs.values(), *manifest.files.values()):
        path = folder / spec.path
        if not path.is_file() or path.stat().st_size != spec.size:
            raise ConfigError(f"{path} is missing or does not have {spec.size} bytes; export the architecture again")
        files[spec.digest] = path
    return TierArtifacts(tier, manifest, ref, folder), files


def load_artifacts(root: Path, arch: str, *, chunk_bytes: int, weights: Path | None = None) -> Artifacts:
    """Read an architecture that `shoal export` wrote to a folder, to be sent in chunks of so many payload bytes.

    A safetensors file of weights takes the place of the exported ones.

    Raises:
        ConfigError: nothing of that name was exported there, or what lies there is incomplete.
    """
    folder = root / arch
    if not folder.is_dir():
        there = sorted(path.parent.name for path in root.glob("*/layout.json")) if root.is_dir() else []
        known = f"it holds {', '.join(there)}" if there else "nothing is exported there"
        raise ConfigError(
            f"no architecture {arch!r} in {root} ({known}); run `shoal export --arch {arch} --out {root}`"
        )
    layout = Layout.from_json(_read(folder / "layout.json", "Export the architecture again."))
    loaded = [_load_tier(path.parent, layout, chunk_bytes) for path in sorted(folder.glob("*/manifest.json"))]
    if not loaded:
        raise ConfigError(f"{folder} holds no tier; export the architecture again")
    tiers = sorted((tier for tier, _ in loaded), key=lambda item: (-item.manifest.parameter_count, item.tier.id))
    return Artifacts(
        arch=arch,
        layout=layout,
        tiers=MappingProxyType({item.tier.id: item for item in tiers}),
        initial=weights or folder / "init.safetensors",
        files=MappingProxyType({name: path for _, files in loaded for name, path in files.items()}),
    )
