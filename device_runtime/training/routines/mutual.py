"""The routine ``mutual`` of FML: a board's own model and a copy of the global one teach each other.

Tao Shen et al.: "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765; specification
5.3 and 5.4.

The copy (the meme) is the ``sent`` model of a pair, the personal one is its ``own``. If the fleet
shares only a trunk, the adaptor (the other parameters of the meme) stays on the board, too; a pair
that includes an adaptor may give it any shape, so that the board may have other labels than the
fleet's model. The board keeps the personal model, its optimizer's states and the adaptor from round
to round. `device_runtime.training.pair_training` does the training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from device_runtime.training.backends import ForwardSession, PairSession
from device_runtime.training.hooks import Hooks
from device_runtime.training.measuring import HeldOut, judge
from device_runtime.training.own_model import MODEL, OwnModel
from device_runtime.training.own_model_files import KeptRound
from device_runtime.training.own_settings import read_settings
from device_runtime.training.pair_training import train_pair
from device_runtime.training.routines.routine import Result, Routine
from device_runtime.training.task import DeviceSetup, Task
from device_runtime.training.weights_file import read_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.manifest import Manifest, ParameterSpec
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Evaluation, Instructions
from fleet_protocol.pair_manifest import PairManifest

NAME = "mutual"

Tensors = dict[str, NDArray[Any]]
# Prefix of names in the files between rounds; MODEL is that of the personal model's parameters.
_STATE = "state/"
_ADAPTOR = "adaptor/"


class MutualSettings(FrozenModel):
    """How much the two models trust the labels in one round (specification 5.1).

    Attributes:
        alpha: weight of the labels for the personal model; the remainder is the weight of the meme.
        beta: weight of the labels for the meme; the remainder is the weight of the personal model.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    beta: float = Field(default=0.5, ge=0, le=1)


@dataclass(frozen=True)
class _Pair:
    """The board's pair, and the parameters of its meme that stay on the board."""

    model: OwnModel
    manifest: PairManifest
    adaptor: frozenset[str]


def _require_own_model(setup: DeviceSetup) -> OwnModel:
    if setup.own_model is None:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            "mutual learning needs a personal model; name its set in [own_model] of this board",
        )
    return setup.own_model


def _join(_instructions: Instructions, setup: DeviceSetup) -> None:
    _require_own_model(setup)


def _run(task: Task, setup: DeviceSetup, hooks: Hooks) -> Result:
    settings = read_settings(MutualSettings, task.instructions.settings, f"routine {NAME}")
    pair = _load_pair(_require_own_model(setup), task)
    meme = pair.manifest.sent
    weights = read_weights(setup.blobs.path(task.weights.digest), task.manifest)
    setup = replace(setup, data=setup.data.fit_to(meme))
    session = PairSession(
        pair.manifest, pair.model.path(pair.manifest.graph), threads=setup.threads
    )
    kept = pair.model.files.load(task.run, task.round)
    session.load("own", pair.model.parameters(kept), _kept_states(pair, kept))
    session.load("sent", _meme_weights(pair, weights, kept))
    result = train_pair(session, pair.manifest, task.schedule(setup), settings.model_dump(), hooks)
    own = session.parameters("own")
    sent = session.parameters("sent")
    evaluation = _evaluate(task, setup, pair, own, hooks)
    _keep(task, pair, session)
    # Copies, because the session overwrites its arrays.
    update = {name: np.array(value) for name, value in sent.items() if name not in pair.adaptor}
    return Result(update, result.steps, result.seconds, result.losses["own"], None, evaluation)


def _keep(task: Task, pair: _Pair, session: PairSession) -> None:
    """Save what the next round starts from: personal model, its optimizer's states, adaptor."""
    sent = session.parameters("sent")
    kept: Tensors = {}
    for name, value in session.parameters("own").items():
        kept[MODEL + name] = value
    for name, value in session.states("own").items():
        kept[_STATE + name] = value
    for name in sorted(pair.adaptor):
        kept[_ADAPTOR + name] = sent[name]
    pair.model.files.save(task.run, task.round, kept)


def _load_pair(model: OwnModel, task: Task) -> _Pair:
    """Load the board's pair; its meme must share the same parameters as the offer."""
    pair = model.manifest()
    stays = frozenset(task.instructions.stays)
    if pair.routine != NAME:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the set {model.folder} is for the routine {pair.routine}, not for {NAME}",
        )
    if pair.adaptor is None:
        # The meme then starts from the sent weights only, so all of them must fit.
        adaptor = stays
        offered = _specs(task.manifest, but=frozenset())
        mine = _specs(pair.sent, but=frozenset())
    else:
        adaptor = frozenset(pair.adaptor.parameters)
        offered = _specs(task.manifest, but=stays)
        mine = _specs(pair.sent, but=adaptor)
    for name in {**offered, **mine}:
        in_run = offered.get(name)
        in_set = mine.get(name)
        if _shape(in_run) == _shape(in_set):
            continue
        manifest = task.manifest
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the set {model.folder} does not match this run: {name} is {_words(in_run, in_set)}"
            f" in the run's {manifest.arch} {manifest.tier} and {_words(in_set, in_run)} in the"
            f" set's meme {pair.sent.arch} {pair.sent.tier}; export the pair for the fleet's"
            " model, with --adaptor for what the run does not share",
        )
    return _Pair(model, pair, adaptor)


def _specs(manifest: Manifest, but: frozenset[str]) -> dict[str, ParameterSpec]:
    """Return the parameters of a model by name, except some."""
    return {spec.name: spec for spec in manifest.parameters if spec.name not in but}


def _shape(spec: ParameterSpec | None) -> tuple[Any, ...]:
    return () if spec is None else (spec.shape, spec.dtype, spec.axes)


def _words(spec: ParameterSpec | None, compared: ParameterSpec | None) -> str:
    """Return the properties of a parameter that differ from the one it is compared with."""
    if spec is None:
        return "not shared"
    shape = f"{spec.dtype} {list(spec.shape)}"
    if compared is None or spec.shape != compared.shape:
        return shape
    return f"{shape} over {', '.join(spec.axes)}"


def _kept_states(pair: _Pair, kept: KeptRound | None) -> Tensors | None:
    """Return the personal model's optimizer states from the last round; None if there are none."""
    if kept is None:
        return None
    return kept.under(_STATE, {spec.name: spec for spec in pair.manifest.own.states})


def _meme_weights(pair: _Pair, sent: Mapping[str, NDArray[Any]], kept: KeptRound | None) -> Tensors:
    """Return the meme as it was sent, except its adaptor; its optimizer starts afresh."""
    weights = dict(sent)
    if kept is not None:
        parameters = pair.manifest.sent.parameters
        expected = {spec.name: spec for spec in parameters if spec.name in pair.adaptor}
        weights |= kept.under(_ADAPTOR, expected)
    elif pair.manifest.adaptor is not None:
        weights |= tensors_in(pair.model.read(pair.manifest.adaptor))
    return weights


def _evaluate(
    task: Task, setup: DeviceSetup, pair: _Pair, own: Tensors, hooks: Hooks
) -> Evaluation | None:
    """Return loss and accuracy of the personal model on held-out samples."""
    manifest = pair.manifest.own

    def open_graph(key: str) -> ForwardSession:
        graph = pair.model.path(manifest.graphs[key])
        return ForwardSession(manifest, graph, own, threads=setup.threads)

    mask = np.ones(manifest.classes, np.float32)
    _training, held_out = setup.split()
    samples = HeldOut(setup.data, held_out, task.instructions.train.batch_size, mask)
    return judge(open_graph, manifest, task.schedule(setup), samples, hooks)


# It needs no graphs of the offered set: those of the pair are on the board.
ROUTINE = Routine(
    NAME,
    phase="training",
    settings=MutualSettings,
    graphs=lambda _manifest, _setup: (),
    run=_run,
    join=_join,
    own_model=True,
    # Specification 5.2: the plain mean of the memes keeps the numbers of samples private.
    tells_samples=False,
)
