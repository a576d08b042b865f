"""Reads the exported folder of an architecture: layout, manifests, initial weights, served blobs.

The folder may come from an untrusted source. So every file must be within the folder, and the
server serves a file only under its own digest. Reading a set that names a file outside the folder
fails.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from types import MappingProxyType

import numpy as np

from fleet_protocol.blobs import blob_ref
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import BlobError, ConfigError, PlanError, RefusedError
from fleet_protocol.foreign_files import name_problem, open_real, path_within, quoted, read_within
from fleet_protocol.graphs.vocabulary import read_vocabulary
from fleet_protocol.manifest import BASE, FileSpec, Manifest, parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.memory_plans import PLAN_FILES, fastest_within, plan_difference
from fleet_protocol.messages import BlobRef
from models.layout import Layout
from models.shares import frozen_parameters, largest_first
from models.slicing import Tensors
from models.tier import Tier


@dataclass(frozen=True)
class TierArtifacts:
    """The artifact set of one tier."""

    tier: Tier
    manifest: Manifest
    ref: BlobRef  # of the manifest, which identifies the set
    folder: Path
    # the same set with less memory and slower steps, the fastest first
    plans: "tuple[TierArtifacts, ...]" = field(default=(), compare=False)
    # if plans move what the tier trains: the sets at its other places
    places: "tuple[TierArtifacts, ...]" = field(default=(), compare=False)

    @property
    def variants(self) -> "tuple[TierArtifacts, ...]":
        """Return this set and its plans, the fastest first."""
        return (self, *self.plans)

    @property
    def memory_bytes(self) -> int:
        """Return the estimated peak memory of training by the plan that needs least.

        It is that at the place that needs most.
        """
        peaks = [variant.manifest.peak_memory_bytes for variant in self.variants]
        places = [min(peaks)]
        for place in self.places:
            places.append(place.memory_bytes)
        return max(places)

    def within(self, memory: float) -> "TierArtifacts":
        """Return the fastest plan within some bytes of memory; if none is, the smallest."""
        return fastest_within(self.variants, memory)

    def path(self, spec: FileSpec) -> Path:
        """Return the path of a file of the set; raise ConfigError if it is outside the folder."""
        return _path(self.folder, spec.path)

    @property
    def head(self) -> Path:
        """Return the file with the initial weights of the tier's own head, if any.

        The errors are those of `path`.
        """
        return _path(self.folder, "head.safetensors")

    def vocabulary(self) -> int | None:
        """Return the vocabulary size of the model, if it looks its input tokens up in a table.

        Raises:
            ConfigError: a graph's file cannot be read.
        """
        graphs = self.manifest.graphs
        graph = graphs.get("onnx/eval") or graphs.get("onnx/train")
        if self.manifest.input_dtype != "int64" or graph is None:
            return None
        path = self.path(graph)
        try:
            return read_vocabulary(path)
        except (OSError, RefusedError) as error:
            raise ConfigError(
                f"cannot read {path}: {error}; export the architecture again"
            ) from error

    def base(self) -> Tensors:
        """Return the frozen tensors beside the weights, as read-only float32 views.

        Raises:
            BlobError: their file is damaged.
        """
        if not self.manifest.base:
            return {}
        tensors = open_tensors(self.path(self.manifest.files[BASE]))
        return {spec.name: tensors[spec.name] for spec in self.manifest.base}


@dataclass(frozen=True)
class Artifacts:
    """One exported architecture.

    Attributes:
        layout: layout of the global model.
        tiers: artifact sets by tier id, largest first.
        initial: file with the initial global weights.
        files: every blob that a device may request, by its digest at the time it was read.
    """

    arch: str
    layout: Layout
    tiers: Mapping[str, TierArtifacts]
    initial: Path
    files: Mapping[str, Path]

    @property
    def full(self) -> TierArtifacts:
        """Return the set of the whole model; raise a ConfigError if it was not exported."""
        tier = self.layout.tier(1.0)
        if tier.id not in self.tiers:
            raise ConfigError(
                f"{self.arch}: the full tier {tier.id} is not exported; export it with"
                " --widths 1,..."
            )
        return self.tiers[tier.id]

    def initial_weights(self) -> Tensors:
        """Return the weights that a run starts from: read-only float32 views, in layout order.

        Raises:
            BlobError: the file is damaged.
            ConfigError: it does not fit the layout.
        """
        shapes = {spec.name: spec.shape for spec in self.layout.parameters}
        return self._tensors(self.initial, shapes)

    def initial_heads(self, tiers: Iterable[Tier]) -> dict[Tier, Tensors]:
        """Return the initial weights of tiers with separate heads, as views.

        Raises:
            BlobError: a file is damaged.
            ConfigError: it does not fit the layout.
        """
        heads = {}
        for tier in tiers:
            own_head = self.layout.own_head(tier)
            if own_head:
                shapes = self.layout.shapes(tier)
                head_shapes = {}
                for spec in own_head:
                    head_shapes[spec.name] = shapes[spec.name]
                heads[tier] = self._tensors(self.tiers[tier.id].head, head_shapes)
        return heads

    def _tensors(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        # Its path had no link when the set was read.
        tensors = open_tensors(path, open_real)
        for name, shape in shapes.items():
            value = tensors.get(name)
            if value is None or value.shape != shape or value.dtype != np.float32:
                actual = "missing" if value is None else f"{value.dtype} {value.shape}"
                raise ConfigError(
                    f"{path}: tensor {name} should be float32 {shape} but is {actual}; these "
                    f"weights do not belong to {self.arch} as exported"
                )
        # The order is that of the shapes, whatever order the file has.
        return {name: tensors[name] for name in shapes}


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
    path = folder.resolve() / "init.safetensors"
    return _path(folder, path.name) if path.is_symlink() or path.exists() else path


@functools.lru_cache(maxsize=4096)
def _has_digest(path: Path, digest: str, state: tuple[int, ...]) -> bool:
    """Return whether a file has a digest.

    The process caches the result while `state` stays the same.
    """
    # Only the cache looks at it: another state is another entry.
    del state
    return file_matches(path, digest)


def _check_content(path: Path, spec: FileSpec) -> None:
    """Check a file against its manifest; raise a ConfigError if they differ.

    Hashing a set of 100 MB takes 0.1 s of processor time.
    """
    try:
        status = path.stat()
        if status.st_size != spec.size:
            raise ConfigError(f"{path} has {status.st_size} bytes instead of {spec.size}; {_AGAIN}")
        # Any change of the file's bytes changes one of these.
        state = (
            status.st_dev,
            status.st_ino,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_size,
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
    manifest_path = _path(root, f"{name}/manifest.json")
    folder = manifest_path.parent
    data = _read(folder, manifest_path.name)
    try:
        manifest = parse_manifest(data)
        tier = Tier.parse(manifest.tier)
        shapes = layout.shapes(tier)
        frozen = frozen_parameters(layout, tier)
    except (BlobError, PlanError) as error:
        raise ConfigError(f"{manifest_path}: {error}") from error
    # Layout and manifest were written together; a mixture of two exports would merge wrong rows.
    manifest_shapes = {spec.name: spec.shape for spec in manifest.parameters}
    if manifest_shapes != shapes or manifest.frozen != frozen:
        raise ConfigError(
            f"{folder}: the parameters of the manifest and of layout.json differ; {_AGAIN}"
        )
    ref = blob_ref(data, chunk_bytes)
    plans = _load_plans(folder, manifest, tier, chunk_bytes)
    artifacts = TierArtifacts(tier, manifest, ref, folder, tuple(plans.values()))
    # Manifests are served like any other file, by their digest: the digest of a manifest names its
    # set.
    files = {ref.digest: manifest_path}
    for path, plan in plans.items():
        files[plan.ref.digest] = path
    for variant in artifacts.variants:
        for spec in variant.manifest.all_files:
            path = variant.path(spec)
            _check_content(path, spec)
            files[spec.digest] = path
    return artifacts, files


def _load_plans(
    folder: Path, manifest: Manifest, tier: Tier, chunk_bytes: int
) -> dict[Path, TierArtifacts]:
    """Read the plans of a set, the fastest first, by the paths of their manifests."""
    plans: dict[Path, TierArtifacts] = {}
    for name in sorted(path.name for path in folder.glob(PLAN_FILES)):
        path = _path(folder, name)
        data = _read(folder, name)
        try:
            plan = parse_manifest(data)
        except BlobError as error:
            raise ConfigError(f"{path}: {error}") from error
        difference = plan_difference(manifest, plan)
        if difference:
            raise ConfigError(f"{path}: {difference} differs from manifest.json; {_AGAIN}")
        plans[path] = TierArtifacts(tier, plan, blob_ref(data, chunk_bytes), folder)

    def work(entry: tuple[Path, TierArtifacts]) -> tuple[float, int]:
        plan_manifest = entry[1].manifest
        return plan_manifest.recomputed_share or 0.0, plan_manifest.peak_memory_bytes

    return dict(sorted(plans.items(), key=work))


def load_artifacts(
    root: Path, arch: str, *, chunk_bytes: int, weights: Path | None = None
) -> Artifacts:
    """Read an architecture that `shoal export` wrote.

    Args:
        root: the folder given to `shoal export`.
        arch: name of the architecture.
        chunk_bytes: payload bytes of a chunk, in which devices fetch the files.
        weights: safetensors file that replaces the exported weights.

    Raises:
        ConfigError: no set with that name was exported there, the set is incomplete or differs from
            its manifests, or one of its files is outside the folder.
    """
    folder = _architecture_folder(root, arch)
    layout = Layout.from_json(_read(folder, "layout.json"))
    tiers: list[TierArtifacts] = []
    files: dict[str, Path] = {}
    for name in _folders_with(folder, "manifest.json"):
        tier, tier_files = _load_tier(folder, name, layout, chunk_bytes)
        tiers.append(tier)
        files.update(tier_files)
    if not tiers:
        raise ConfigError(f"{folder} contains no tier; export the architecture again")
    sets = {tier.tier: tier for tier in tiers}
    ordered = [sets[tier] for tier in largest_first(layout, list(sets))]
    # The user's weights may be a link to a file elsewhere.
    initial = weights.resolve() if weights else _initial(folder)
    return Artifacts(
        arch=arch,
        layout=layout,
        tiers=MappingProxyType({tier.tier.id: tier for tier in ordered}),
        initial=initial,
        files=MappingProxyType(files),
    )


def _folders_with(root: Path, file_name: str) -> list[str]:
    """Return the sorted names of the subfolders that contain a given file."""
    return sorted(path.parent.name for path in root.glob(f"*/{file_name}"))


def _architecture_folder(root: Path, arch: str) -> Path:
    problem = name_problem(arch)
    if problem is not None:
        raise ConfigError(f"{quoted(arch)} is not a valid name of an architecture: {problem}")
    folder = root / arch
    if folder.is_dir():
        return folder
    exported = _folders_with(root, "layout.json") if root.is_dir() else []
    content = f"it contains {', '.join(exported)}" if exported else "nothing is exported there"
    command = f"`shoal export --arch {quote(arch)} --out {quote(str(root))}`"
    raise ConfigError(f"no architecture {arch!r} in {root} ({content}); run {command}")
