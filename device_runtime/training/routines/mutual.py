"""The routine ``mutual`` of FML: a personal model of this board and a copy of the global one teach
each other.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; specification
5.3 and 5.4.

The copy (the meme) is the ``sent`` model of a pair, the personal one is its ``own``. If the fleet
shares only a trunk, the rest of the meme (the adaptor) stays here too; a pair that brings an
adaptor of its own gives it any shape, so that the board may have other labels than the fleet's
model. The board keeps the personal model, its optimizer's states and the adaptor from round to
round. The losses are those of the paper: there is no label mask. Orders and random numbers are
those of `device_runtime.training.schedule`, the own model's layers before the sent one's.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from device_runtime.training.backends import ForwardSession, PairSession
from device_runtime.training.epochs import check_parameters
from device_runtime.training.hooks import EpochReport, Hooks
from device_runtime.training.labels import require_labels
from device_runtime.training.measuring import HeldOut, judge
from device_runtime.training.own_model import MODEL, OwnModel
from device_runtime.training.own_model_files import Kept
from device_runtime.training.own_settings import read_settings
from device_runtime.training.routines.routine import Result, Routine
from device_runtime.training.schedule import TrainingSchedule, draw_noise, training_batch
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.weights_file import read_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import ParameterSpec
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Evaluation, Instructions
from fleet_protocol.pair_manifest import SIDES, PairManifest, Side
from fleet_protocol.targets import counted

NAME = "mutual"

Tensors = dict[str, NDArray[Any]]
_STATE = "state/"
_ADAPTOR = "adaptor/"


@dataclass(frozen=True)
class PairResult:
    """What training ended with; the parameters and states stay in the session."""

    steps: int
    losses: Mapping[
        Side, float
    ]  # mean loss of each model in the last epoch, weighted by the labels that count
    seconds: float  # time of the training alone


def train_pair(
    session: PairSession,
    manifest: PairManifest,
    schedule: TrainingSchedule,
    scalars: Mapping[str, float],
    hooks: Hooks,
) -> PairResult:
    """Train both models for the epochs or steps of an offer; hooks hear the loss of the sent model.

    Raises:
        TaskStopped: the hooks said so.
        DataError: no label of the training samples counts.
        RefusedError: a loss or a parameter is not finite.
    """
    require_labels(schedule.data, schedule.chosen)
    started = time.monotonic()
    step = 0
    means = np.full(len(SIDES), math.nan)
    for planned in schedule.passes():
        totals = np.zeros(len(SIDES))
        weight = 0
        for number, indices in enumerate(planned.batches):
            hooks.go_on()
            step_seed = schedule.step_seed(planned.epoch, number)
            x, y = training_batch(schedule.data, indices, manifest.sent.input_dtype, step_seed)
            inputs = {**scalars, "lr": schedule.settings.rate_at(step, schedule.steps)}
            losses = session.step(x, y, inputs, draw_noise(manifest.noise, step_seed, len(indices)))
            step += 1
            if not all(map(math.isfinite, losses)):
                found = ", ".join(
                    f"{loss} ({side})" for side, loss in zip(SIDES, losses, strict=True)
                )
                raise RefusedError(
                    RefusalReason.FAILED,
                    f"the losses of the board's own model and the one it was sent are {found} in round {schedule.round}"
                    f" at step {step} (epoch {planned.epoch + 1}); lower the learning rate or look at the data",
                )
            count = counted(y)
            totals = totals + np.array(losses) * count
            weight = weight + count
        means = totals / weight if weight else means
        hooks.report(
            EpochReport(
                planned.epoch + 1,
                planned.epochs,
                step,
                float(means[SIDES.index("sent")]),
            )
        )
    for side in SIDES:
        check_parameters(session.parameters(side), schedule.round, step, f" of the {side} model")
    return PairResult(
        step,
        dict(zip(SIDES, map(float, means), strict=True)),
        time.monotonic() - started,
    )


class MutualSettings(FrozenModel):
    """How much the two models trust the labels in one round (specification 5.1)."""

    alpha: float = Field(
        default=0.5, ge=0, le=1
    )  # of the personal model; the rest is trust in the meme
    beta: float = Field(
        default=0.5, ge=0, le=1
    )  # of the meme; the rest is trust in the personal model


@dataclass(frozen=True)
class _Pair:
    """The board's pair, and which parameters of its meme stay here."""

    model: OwnModel
    manifest: PairManifest
    adaptor: frozenset[str]


def _own_model(setup: DeviceSetup) -> OwnModel:
    if setup.own_model is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            "mutual learning needs a personal model; name its set in [own_model] of this board",
        )
    return setup.own_model


def _join(_instructions: Instructions, setup: DeviceSetup) -> None:
    _own_model(setup)


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    settings = read_settings(MutualSettings, task.instructions.settings, f"routine {NAME}")
    pair = _load_pair(_own_model(setup), task)
    meme = pair.manifest.sent
    sent = read_weights(setup.blobs.path(task.weights.digest), task.manifest)
    setup = replace(setup, data=setup.data.fit_to(meme))
    session = PairSession(
        pair.manifest, pair.model.path(pair.manifest.graph), threads=setup.threads
    )
    kept = pair.model.files.load(task.run, task.round)
    session.load("own", *_personal(pair, kept))
    session.load("sent", _meme(pair, sent, kept))
    result = train_pair(session, pair.manifest, task.schedule(setup), settings.model_dump(), hooks)
    own = session.parameters("own")
    after = session.parameters("sent")
    evaluation = _evaluate(task, setup, pair, own, hooks)
    pair.model.files.save(
        task.run,
        task.round,
        {
            **{MODEL + name: value for name, value in own.items()},
            **{_STATE + name: value for name, value in session.states("own").items()},
            **{_ADAPTOR + name: after[name] for name in sorted(pair.adaptor)},
        },
    )
    update = {name: np.array(value) for name, value in after.items() if name not in pair.adaptor}
    return Result(update, result.steps, result.seconds, result.losses["own"], None, evaluation)


def _load_pair(model: OwnModel, task: Task) -> _Pair:
    """The board's pair; what its meme shares must be what the offer shares."""
    pair = model.manifest()
    manifest = task.manifest
    stays = task.instructions.stays
    if pair.routine != NAME:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the set {model.folder} is for the routine {pair.routine}, not for {NAME}",
        )
    own = frozenset(stays if pair.adaptor is None else pair.adaptor.parameters)
    # Without an adaptor of its own the meme starts wholly from what is sent, so all of it must fit.
    offered, mine = (
        {
            spec.name: spec
            for spec in side.parameters
            if pair.adaptor is None or spec.name not in out
        }
        for side, out in ((manifest, frozenset(stays)), (pair.sent, own))
    )
    for name in {**offered, **mine}:
        theirs = offered.get(name)
        ours = mine.get(name)
        if _facts(theirs) != _facts(ours):
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"the set {model.folder} does not go with this run: {name} is {_words(theirs, ours)} in the run's"
                f" {manifest.arch} {manifest.tier} and {_words(ours, theirs)} in the set's meme {pair.sent.arch}"
                f" {pair.sent.tier}; export the pair for the fleet's model, with --adaptor for what the run does not"
                " share",
            )
    return _Pair(model, pair, own)


def _facts(spec: ParameterSpec | None) -> tuple[Any, ...]:
    return () if spec is None else (spec.shape, spec.dtype, spec.axes)


def _words(spec: ParameterSpec | None, other: ParameterSpec | None) -> str:
    """What a parameter is, as far as the other one differs."""
    if spec is None:
        return "not shared"
    shape = f"{spec.dtype} {list(spec.shape)}"
    return (
        shape
        if other is None or spec.shape != other.shape
        else f"{shape} over {', '.join(spec.axes)}"
    )


def _personal(pair: _Pair, kept: Kept | None) -> tuple[Tensors, Tensors | None]:
    """The personal model as the last round left it, with its optimizer's states, or as the set
    starts it.
    """
    states = {spec.name: spec for spec in pair.manifest.own.states}
    return pair.model.parameters(kept), None if kept is None else kept.under(_STATE, states)


def _meme(pair: _Pair, sent: Mapping[str, NDArray[Any]], kept: Kept | None) -> Tensors:
    """The meme as it was sent, but for its adaptor; its optimizer starts afresh."""
    weights = dict(sent)
    if kept is not None:
        expected = {
            spec.name: spec for spec in pair.manifest.sent.parameters if spec.name in pair.adaptor
        }
        weights |= kept.under(_ADAPTOR, expected)
    elif pair.manifest.adaptor is not None:
        weights |= tensors_in(pair.model.read(pair.manifest.adaptor))
    return weights


def _evaluate(
    task: Task, setup: DeviceSetup, pair: _Pair, own: Tensors, hooks: Hooks
) -> Evaluation | None:
    """Loss and accuracy of the personal model on held-out samples."""
    manifest = pair.manifest.own

    def opened(key: str) -> ForwardSession:
        return ForwardSession(
            manifest, pair.model.path(manifest.graphs[key]), own, threads=setup.threads
        )

    mask = np.ones(manifest.classes, np.float32)
    judged = HeldOut(setup.data, setup.split()[1], task.instructions.train.batch_size, mask)
    return judge(opened, manifest, task.schedule(setup), judged, hooks)


# Of the set that is offered it needs no graphs: those of the pair are on the board.
ROUTINE = Routine(
    NAME,
    phase="training",
    settings=MutualSettings,
    graphs=lambda _, __: (),
    run=_run,
    join=_join,
)
