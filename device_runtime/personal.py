"""The personal model of mutual learning: it is trained beside the model of an offer and never leaves this board.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; METHODS 5.3 and 5.4.

The operator puts a mutual set on the board (`trainer_export.mutual_set`): the step of both models, and what the
personal model starts from. If the fleet shares only a trunk, the rest of the meme (the adaptor) stays here too; a set
that brings an adaptor of its own gives it any shape, so that the board may have other labels than the fleet's model.
What the board keeps from round to round, `PersonalFiles` holds: the personal model, its momentum, and the adaptor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends import ForwardSession
from device_runtime.backends.mutual import MutualSession
from device_runtime.data import DataSet
from device_runtime.mutual_training import train_mutual
from device_runtime.personal_files import KEPT_RUNS, Kept, PersonalFiles
from device_runtime.training import EpochReport, counted_labels, evaluate, measure
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.manifest import FileSpec, Manifest, ParameterSpec, digest_of
from fleet_protocol.messages import Evaluation, MutualSettings, Offer
from fleet_protocol.mutual_manifest import MutualManifest, parse_mutual_manifest
from fleet_protocol.weights import decode_weights

__all__ = ["Personal", "PersonalResult", "train_personal"]

Tensors = dict[str, NDArray[Any]]
Shapes = dict[str, tuple[int, ...]]
_MODEL, _MOMENTUM, _ADAPTOR = "model/", "momentum/", "adaptor/"
_EVAL, _STATS = "onnx/eval", "onnx/stats"


@dataclass(frozen=True)
class Personal:
    """Where a board's personal model is.

    Attributes:
        folder: the mutual set.
        state_dir: where the model is kept between rounds.
        kept_runs: of so many runs.
    """

    folder: Path
    state_dir: Path
    kept_runs: int = KEPT_RUNS

    @property
    def files(self) -> PersonalFiles:
        """What is kept between rounds."""
        return PersonalFiles(self.state_dir, self.kept_runs)

    def manifest(self) -> MutualManifest:
        """The set's manifest.

        Raises:
            ConfigError: it cannot be read.
            BlobError: it is no manifest of a mutual set.
        """
        return parse_mutual_manifest(self._read("manifest.json"))

    def check(self) -> None:
        """See that every file of the set that this board uses is there, with the content it was exported with.

        Raises:
            ConfigError: one is not; the message names it.
            BlobError: the manifest is none of a mutual set.
        """
        pair = self.manifest()
        graphs = (pair.personal.graphs.get(key) for key in (_EVAL, _STATS))
        for file in (pair.graph, pair.personal_init, pair.adaptor, *graphs):
            if file is not None:
                self.read(file)

    def read(self, file: FileSpec) -> bytes:
        """The content of a file of the set.

        Raises:
            ConfigError: it cannot be read, or is not what was exported.
        """
        data = self._read(file.path)
        if digest_of(data) != file.digest:
            raise ConfigError(
                f"[personal] set: {self.folder / file.path} is damaged, or of another export than the manifest beside"
                " it; copy the whole set to this board again"
            )
        return data

    def path(self, file: FileSpec) -> Path:
        """Where a graph of the set is.

        Raises:
            ConfigError: it is not there.
        """
        path = self.folder / file.path
        if not path.is_file():
            raise ConfigError(f"[personal] set: {path} is missing; copy the whole set to this board again")
        return path

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"[personal] set: cannot read {self.folder / name}: {error.strerror}; name the folder that"
                " `shoal export-mutual` printed, and copy all of it"
            ) from error


@dataclass(frozen=True)
class PersonalResult:
    """What mutual training ended with.

    Attributes:
        update: the meme's parameters to send; those that stay here are not among them.
        steps: training steps.
        loss: mean loss of the personal model in the last epoch.
        seconds: time of the training alone.
        evaluation: of the personal model on the board's held-out samples, when it keeps any.
    """

    update: Tensors
    steps: int
    loss: float
    seconds: float
    evaluation: Evaluation | None


def train_personal(
    personal: Personal | None,
    manifest: Manifest,
    sent: Mapping[str, NDArray[Any]],
    offer: Offer,
    data: DataSet,
    chosen: NDArray[np.int64],
    held_out: NDArray[np.int64],
    *,
    threads: int,
    report: Callable[[EpochReport], None],
    stopped: Callable[[], bool],
) -> PersonalResult:
    """Train the meme and the personal model on each other, and keep the personal one.

    Args:
        personal: where it is; None if this board has none.
        manifest: of the tier offered, which the meme shares its parameters with.
        sent: its weights.
        offer: with the settings of mutual learning.
        data: the board's samples.
        chosen: indices of the training samples.
        held_out: indices of the held-out ones.
        threads: threads of one operator.
        report: called after every epoch.
        stopped: asked before every step.

    Raises:
        RefusedError: this board has no personal model, or one that goes with another meme, or the file of the last
            round is of another set; or a loss is not finite.
        ConfigError: a file of the set is missing or damaged.
        DataError: the data does not fit the models.
        TaskStopped: ``stopped`` said so.
        StorageError: the personal model cannot be kept.
    """
    if personal is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            "mutual learning needs a personal model; name its set in [personal] of this board",
        )
    pair, meme = personal.manifest(), personal.manifest().meme
    stays = _adaptor(personal, pair, manifest, (offer.train.mutual or MutualSettings()).stays)
    data.check(meme.input_shape, meme.input_dtype, meme.classes, meme.label_shape)
    session = MutualSession(pair, personal.path(pair.graph), threads=threads)
    kept = personal.files.load(offer.run, offer.round)
    _load_personal(session, personal, pair, kept)
    _load_meme(session, personal, pair, sent, stays, kept)
    result = train_mutual(session, pair, data, chosen, offer.train, offer.round, report=report, stopped=stopped)
    own, after = session.parameters("personal"), session.parameters("meme")
    evaluation = _evaluate(personal, pair, own, offer, data, chosen, held_out, threads=threads, stopped=stopped)
    personal.files.save(
        offer.run,
        offer.round,
        {
            **{_MODEL + name: value for name, value in own.items()},
            **{_MOMENTUM + name: value for name, value in session.states("personal").items()},
            **{_ADAPTOR + name: after[name] for name in stays},
        },
    )
    update = {name: np.array(value) for name, value in after.items() if name not in stays}
    return PersonalResult(update, result.steps, result.personal_loss, result.seconds, evaluation)


def _adaptor(personal: Personal, pair: MutualManifest, manifest: Manifest, stays: Collection[str]) -> frozenset[str]:
    """Parameters of the meme that stay here; all others must be those that the offer shares."""
    own = frozenset(stays if pair.adaptor is None else pair.adaptor.parameters)
    # Without an adaptor of its own the meme starts wholly from what is sent, so all of it must fit.
    offered, mine = (
        {spec.name: spec for spec in side.parameters if pair.adaptor is None or spec.name not in out}
        for side, out in ((manifest, frozenset(stays)), (pair.meme, own))
    )
    for name in {**offered, **mine}:
        theirs, ours = offered.get(name), mine.get(name)
        if _facts(theirs) != _facts(ours):
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"the set {personal.folder} does not go with this run: {name} is {_words(theirs, ours)} in the run's"
                f" {manifest.arch} {manifest.tier} and {_words(ours, theirs)} in the set's meme {pair.meme.arch}"
                f" {pair.meme.tier}; export the pair for the fleet's model, with --adaptor for what the run does not"
                " share",
            )
    return own


def _facts(spec: ParameterSpec | None) -> tuple[Any, ...]:
    return () if spec is None else (spec.shape, spec.dtype, spec.axes)


def _words(spec: ParameterSpec | None, other: ParameterSpec | None) -> str:
    """What a parameter is, as far as the other one differs."""
    if spec is None:
        return "not shared"
    shape = f"{spec.dtype} {list(spec.shape)}"
    return shape if other is None or spec.shape != other.shape else f"{shape} over {', '.join(spec.axes)}"


def _load_personal(session: MutualSession, personal: Personal, pair: MutualManifest, kept: Kept | None) -> None:
    """The personal model as the last round left it, with its momentum, or as the set starts it."""
    if kept is None:
        session.load("personal", decode_weights(personal.read(pair.personal_init)))
        return
    model: Shapes = {spec.name: spec.shape for spec in pair.personal.parameters}
    momentum: Shapes = {spec.name: spec.shape for spec in pair.personal.states}
    session.load("personal", kept.under(_MODEL, model), kept.under(_MOMENTUM, momentum))


def _load_meme(
    session: MutualSession,
    personal: Personal,
    pair: MutualManifest,
    sent: Mapping[str, NDArray[Any]],
    stays: Collection[str],
    kept: Kept | None,
) -> None:
    """The meme as it was sent, but for its adaptor; its optimizer starts afresh."""
    weights = dict(sent)
    if kept is not None:
        shapes: Shapes = {spec.name: spec.shape for spec in pair.meme.parameters if spec.name in stays}
        weights |= kept.under(_ADAPTOR, shapes)
    elif pair.adaptor is not None:
        weights |= decode_weights(personal.read(pair.adaptor))
    session.load("meme", weights)


def _evaluate(
    personal: Personal,
    pair: MutualManifest,
    own: Tensors,
    offer: Offer,
    data: DataSet,
    chosen: NDArray[np.int64],
    held_out: NDArray[np.int64],
    *,
    threads: int,
    stopped: Callable[[], bool],
) -> Evaluation | None:
    """Loss and accuracy of the personal model on held-out samples, its norms fed with this board's own statistics."""
    settings, manifest = offer.train, pair.personal
    if not counted_labels(data.y[held_out]):
        return None

    def session(key: str) -> ForwardSession:
        return ForwardSession(manifest, personal.path(manifest.graphs[key]), own, threads=threads)

    statistics: dict[str, NDArray[np.float32]] = {}
    if manifest.statistics:
        if len(chosen) < 2 or settings.batch_size < 2:
            return None
        statistics, _ = measure(session(_STATS), manifest, data, chosen, settings, offer.round, stopped=stopped)
    mask = np.ones(manifest.classes, np.float32)
    forward = session(_EVAL)
    return evaluate(forward, manifest, data, held_out, settings.batch_size, mask, statistics, stopped=stopped)
