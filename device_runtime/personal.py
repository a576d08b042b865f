"""The personal model of mutual learning: it is trained beside the model of an offer and never leaves this board.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; METHODS 5.3 and 5.4.

The operator puts a mutual set on the board (`trainer_export.mutual_set`): the step of both models, and what the
personal model starts from. What the board keeps from round to round is one file per round in its state folder: the
personal model, its momentum, and the parameters of the meme that stay here (the adaptor). A round starts from the file
of the latest round before it, so a task that is computed twice after a power cut gives the same result, and a restart
loses nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends import ForwardSession
from device_runtime.backends.mutual import MutualSession
from device_runtime.data import DataSet
from device_runtime.mutual_training import train_mutual
from device_runtime.training import EpochReport, evaluate
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Evaluation, MutualSettings, Offer
from fleet_protocol.mutual_manifest import MutualManifest, parse_mutual_manifest
from fleet_protocol.weights import decode_weights, encode_weights

__all__ = ["Personal", "PersonalResult", "train_personal"]

Tensors = dict[str, NDArray[Any]]
_MODEL, _MOMENTUM, _ADAPTOR = "model/", "momentum/", "adaptor/"


@dataclass(frozen=True)
class Personal:
    """Where a board's personal model is.

    Attributes:
        folder: the mutual set.
        state_dir: where the model is kept between rounds.
    """

    folder: Path
    state_dir: Path

    def manifest(self) -> MutualManifest:
        """The set's manifest.

        Raises:
            ConfigError: it cannot be read.
            BlobError: it is no manifest of a mutual set.
        """
        try:
            return parse_mutual_manifest((self.folder / "manifest.json").read_bytes())
        except OSError as error:
            raise ConfigError(
                f"[personal] set: cannot read {self.folder / 'manifest.json'}: {error.strerror}"
            ) from error

    def _files(self, run: str) -> dict[int, Path]:
        prefix = f"personal-{run}-"
        found = {path.stem.removeprefix(prefix): path for path in self.state_dir.glob(f"{prefix}*.safetensors")}
        return {int(number): path for number, path in found.items() if number.isdigit()}

    def load(self, run: str, before: int) -> Tensors:
        """What the latest round before a round left; nothing if there was none.

        Args:
            run: id of the run.
            before: number of the round that starts.
        """
        rounds = {number: path for number, path in self._files(run).items() if number < before}
        return decode_weights(rounds[max(rounds)].read_bytes()) if rounds else {}

    def save(self, run: str, number: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Keep what a round leaves, and of the rounds before it the one that it started from.

        Raises:
            StorageError: the disk is full.
        """
        path = self.state_dir / f"personal-{run}-{number}.safetensors"
        write_atomically(path, encode_weights(tensors))
        for older in sorted(other for other in self._files(run) if other < number)[:-1]:
            with contextlib.suppress(OSError):
                self._files(run)[older].unlink()


@dataclass(frozen=True)
class PersonalResult:
    """What mutual training ended with.

    Attributes:
        update: the meme's parameters to send; those that stay here are as they were sent.
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
        manifest: of the tier offered, which the meme is a copy of.
        sent: its weights.
        offer: with the settings of mutual learning.
        data: the board's samples.
        chosen: indices of the training samples.
        held_out: indices of the held-out ones.
        threads: threads of one operator.
        report: called after every epoch.
        stopped: asked before every step.

    Raises:
        RefusedError: this board has no personal model, or one that goes with another meme; or a loss is not finite.
        TaskStopped: ``stopped`` said so.
        StorageError: the personal model cannot be kept.
    """
    if personal is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            "mutual learning needs a personal model; name its set in [personal] of this board",
        )
    mutual, pair = offer.train.mutual or MutualSettings(), personal.manifest()
    if pair.meme.parameters != manifest.parameters:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the set {personal.folder} is for a meme {pair.meme.arch} {pair.meme.tier}, the offer is"
            f" {manifest.arch} {manifest.tier}",
        )
    kept = personal.load(offer.run, offer.round)
    session = MutualSession(pair, personal.folder / pair.graph.path, threads=threads)
    session.load("meme", {name: kept.get(_ADAPTOR + name, value) for name, value in sent.items()})
    session.load("personal", *_own(personal, pair, kept))
    result = train_mutual(session, pair, data, chosen, offer.train, offer.round, report=report, stopped=stopped)
    own, meme = session.parameters("personal"), session.parameters("meme")
    evaluation = None
    if len(held_out) and not pair.personal.statistics:
        graph = personal.folder / pair.personal.graphs["onnx/eval"].path
        mask = np.ones(pair.personal.classes, np.float32)
        forward = ForwardSession(pair.personal, graph, own, threads=threads)
        evaluation = evaluate(forward, pair.personal, data, held_out, offer.train.batch_size, mask, {}, stopped=stopped)
    personal.save(
        offer.run,
        offer.round,
        {
            **{_MODEL + name: value for name, value in own.items()},
            **{_MOMENTUM + name: value for name, value in session.states("personal").items()},
            **{_ADAPTOR + name: meme[name] for name in mutual.stays},
        },
    )
    update = {name: sent[name] if name in mutual.stays else np.array(value) for name, value in meme.items()}
    return PersonalResult(update, result.steps, result.personal_loss, result.seconds, evaluation)


def _own(personal: Personal, pair: MutualManifest, kept: Tensors) -> tuple[Tensors, Tensors | None]:
    """Parameters and momentum of the personal model: those of the last round, or those that it starts from."""
    names = [spec.name for spec in pair.personal.parameters]
    if all(_MODEL + name in kept for name in names):
        momentum = {spec.name: kept[_MOMENTUM + spec.name] for spec in pair.personal.states}
        return {name: kept[_MODEL + name] for name in names}, momentum
    try:
        return decode_weights((personal.folder / pair.personal_init.path).read_bytes()), None
    except OSError as error:
        raise StorageError(f"cannot read what the personal model starts from: {error}") from error
