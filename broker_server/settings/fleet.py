"""The configuration of a run, ``fleet.toml``, as frozen values."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from broker_server.settings.assignment import parse_mix
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.combinations import yielding_defaults
from broker_server.settings.evaluation import EvaluationConfig, Share
from broker_server.settings.method import StrategyConfig
from broker_server.settings.privacy import PrivacyConfig, SecureSumConfig
from broker_server.settings.robust import RobustConfig
from broker_server.settings.rounds import DownloadConfig, RoundConfig, UploadConfig
from broker_server.strategies.optimizer_rules import OptimizerSettings
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED, FrozenModel, problems
from fleet_protocol.messages import Name
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.schedule import RateSchedule

_KINDS_OF_RATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"final": ("cosine", "linear"), "every": ("step",), "factor": ("step",)}
)
"""Keys of a schedule, with the kinds of schedule in which they have an effect."""


class ViewConfig(FrozenModel):
    """Where `shoal up` serves the page of its store.

    Attributes:
        port: of the page; 0 takes a free one.
        host: address it listens on; ``0.0.0.0`` lets others on the network look, with the token.
        token_file: has the token that is asked for, and is made; by default ``view.token`` in the
            store.
        actions: whether operators act on the page, with the token in ``operator.token`` of the
            store, which is made.
    """

    port: int = Field(default=8420, ge=0, le=65535)
    host: str = "127.0.0.1"
    token_file: Path | None = None
    actions: bool = False


class ModelConfig(FrozenModel):
    """Which model is trained.

    Attributes:
        artifacts: folder that ``shoal export`` wrote.
        arch: name of the architecture in it.
        weights: safetensors file to start from instead of the exported initial weights.
        recipe: what the artifacts must have been exported with, as far as it is said; None for
            anything.
    """

    artifacts: Path = Path("artifacts")
    arch: str
    weights: Path | None = None
    recipe: RecipeTable | None = None


class TrainConfig(FrozenModel):
    """How devices train.

    Attributes:
        learning_rate: before the first milestone.
        epochs: passes over a device's data in one round.
        steps: instead of whole passes exactly so many steps in one round, over as many passes as
            they take.
        batch_size: samples per step.
        micro_batch: samples that a device computes at once, where it cannot hold a batch: it sums
            the gradients of such pieces and takes one step. Needs ``accumulate`` in the recipe;
            None for whole batches.
        mask_labels: zero the logits of labels a device does not hold (specification 1.5).
        milestones: rounds at which the learning rate is multiplied by ``factor``.
        factor: of the multi-step schedule.
        rate: warm-up and schedule of the learning rate, beside ``milestones``; None for neither.
        optimizer_state: whether devices' optimizers begin every round anew (``reset``), or go on
            with what the device's last round of the same tier left (``keep``); a plan that moves
            its window needs ``reset``.
        schedule: a milestone acts ``after`` its round (specification 1.2, step 6), or already in it
            (``before``, 2.6).
    """

    learning_rate: float = Field(default=0.05, gt=0, le=1e15)
    epochs: int = Field(default=3, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    mask_labels: bool = True
    rate: RateSchedule | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    milestones: tuple[int, ...] = ()
    factor: float = Field(default=0.1, gt=0)
    schedule: Literal["after", "before"] = "after"

    @model_validator(mode="after")
    def _rate_has_effect(self, info: ValidationInfo) -> "TrainConfig":
        if self.rate is None:
            return self
        where = f'with kind = "{self.rate.kind}"'
        for key, kinds in _KINDS_OF_RATE.items():
            instead = f'kind = "{kinds[0]}"'
            has_effect = self.rate.kind in kinds
            self.rate.refuse_idle(info, key, has_effect, where=where, instead=instead)
        return self

    def rate_after(self, closed_rounds: int) -> float:
        """Return the learning rate of the round that follows ``closed_rounds`` closed ones."""
        acting = closed_rounds + 1 if self.schedule == "before" else closed_rounds
        passed = sum(acting >= milestone for milestone in self.milestones)
        return self.learning_rate * self.factor**passed


class TiersConfig(FrozenModel):
    """Which device gets which tier.

    Attributes:
        assign: ``capacity``: the largest tier a device declares itself able to train. ``fix`` and
            ``dynamic``: the level it is given by ``levels``, once or before every round
            (specification 1.1), but never more than that.
        levels: a mix of levels such as ``a1-b1-e2``; the first level is the global model's.
        allowed: ids of the tiers in use; None for every exported one.
        exclude_smaller: only devices able to train the full model take part (the Exclusive
            baseline).
        memory_share: share of a board's free memory that training may take.
    """

    assign: Literal["capacity", "fix", "dynamic"] = "capacity"
    levels: str | None = None
    allowed: tuple[str, ...] | None = Field(default=None, min_length=1)
    exclude_smaller: bool = False
    memory_share: Share = 0.8

    @model_validator(mode="after")
    def _levels_are_for_assigning(self) -> "TiersConfig":
        if (self.levels is None) != (self.assign == "capacity"):
            raise ValueError('levels go with assign = "fix" or "dynamic", and these need levels')
        if self.levels is not None:
            parse_mix(self.levels)
        return self


class RunKeys(FrozenModel):
    """What a run is, in a fleet and in a simulation.

    Attributes:
        keep_versions: how many of the newest global versions keep their weights in the store,
            beside the one that was judged best; None for all of them.
        seed: of sampling, plans and the devices' shuffling.
        train: how devices train.
        upload: how updates travel.
        download: how weights travel.
        strategy: how sub-models are cut and merged.
        server_optimizer: what the server does with a merge; None for what the strategy does by
            itself.
        tiers: which device gets which tier.
        robust: what is done about updates that are unlike the others.
        privacy: what hides one device's part; None for nothing.
        secure_sum: what keeps updates from the server, which learns their sums; None for nothing.
    """

    keep_versions: int | None = Field(default=None, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**64)
    train: TrainConfig = TrainConfig()
    upload: UploadConfig = UploadConfig()
    download: DownloadConfig = DownloadConfig()
    strategy: StrategyConfig = StrategyConfig()
    server_optimizer: OptimizerSettings | None = None
    tiers: TiersConfig = TiersConfig()
    robust: RobustConfig = RobustConfig()
    privacy: PrivacyConfig | None = None
    secure_sum: SecureSumConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "RunKeys":
        if list(self.train.milestones) != sorted(set(self.train.milestones)):
            raise ValueError("train.milestones must ascend")
        return self

    @property
    def central_noise(self) -> PrivacyConfig | None:
        """Return the noise that the server adds to sums; None for none."""
        return self._noise("central")

    @property
    def local_noise(self) -> PrivacyConfig | None:
        """Return the noise that devices add to their updates; None for none."""
        return self._noise("local")

    def _noise(self, where: str) -> PrivacyConfig | None:
        return self.privacy if self.privacy is not None and self.privacy.where == where else None


class FleetConfig(RunKeys):
    """Everything ``fleet.toml`` says.

    Attributes:
        fleet: name of the fleet, first part of every topic.
        store: folder of the server's database and blobs.
        broker: which broker.
        model: which model.
        round: how rounds go.
        evaluation: how the global model is judged.
        contract: the definition of a sample for every board, if the test set does not define it, or
            lists names in another order; None to use the test set.
        view: the page that `shoal up` serves beside; None for none.
        code: further folders whose Python functions ``evaluation.data`` may name, besides the
            folder of this file.
    """

    fleet: Name
    store: Path = Path("runs/store")
    broker: BrokerConfig = BrokerConfig()
    model: ModelConfig
    round: RoundConfig = RoundConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    contract: ContractTerms | None = None
    view: ViewConfig | None = None
    code: tuple[Path, ...] = ()

    @model_validator(mode="after")
    def _defaults_yield(self) -> "FleetConfig":
        # A frozen value is changed while it is made alone: what yields never was set.
        self.__dict__.update(yielding_defaults(self))
        return self

    @classmethod
    def stored(cls, text: str) -> "FleetConfig":
        """Read the configuration of a stored run, perhaps of an earlier version, only to show it.

        Anyone who can write the store can change it, so no path, address or function in it is ever
        opened or called; `broker_server.service.trusted` decides with which configuration a server
        resumes.

        Raises:
            ConfigError: it is not a valid configuration.
        """
        try:
            return cls.model_validate_json(text, context=STORED)
        except ValidationError as error:
            text = problems(error, "the document")
            raise ConfigError(
                f"the configuration of the run in the store was changed, or is damaged: {text}"
            ) from error

    def with_stored_contract(self, stored: str) -> "FleetConfig":
        """Add the contract with which a stored run began, if none is set.

        So the names of the run keep their order.
        """
        if self.contract:
            return self
        return self.model_copy(update={"contract": self.stored(stored).contract})

    def differing_settings(self, stored: str) -> list[str]:
        """Return the names of the settings that differ from a stored configuration.

        Broker, store and page may be elsewhere now. So may the whole folder: two paths are the same
        if they have the same place relative to the store. A run keeps the contract with which it
        began if none is set.
        """
        before = self.stored(stored).run_settings()
        now = self.run_settings()
        names = []
        for name in {**now, **before}:
            ignored = self.contract is None and name.partition(".")[0] == "contract"
            if not ignored and not _same(before.get(name), now.get(name)):
                names.append(name)
        return names

    def run_settings(self) -> dict[str, "SettingValue"]:
        """List every setting that defines a run, such as ``train.epochs``, with its JSON value."""
        relative: dict[str, Any] = {}
        absolute: dict[str, Any] = {}
        beside_store = self.relocated(lambda path: Path(os.path.relpath(path, self.store)))
        _add_settings(beside_store.model_dump(mode="json", exclude=ELSEWHERE), "", relative)
        _add_settings(self.model_dump(mode="json", exclude=ELSEWHERE), "", absolute)
        return {name: SettingValue(value, absolute[name]) for name, value in relative.items()}


@dataclass(frozen=True)
class SettingValue:
    """The JSON value of a setting in two forms; settings that agree in either form are the same.

    Attributes:
        relative: with paths relative to the store, which stay the same when the folder is moved, or
            copied to another computer.
        absolute: with absolute paths.
    """

    relative: Any
    absolute: Any


ELSEWHERE = {"broker", "store", "view", "code", "keep_versions"}
"""Settings of a server, not of a run: they may differ when a run resumes."""


_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_TABLES = 4  # nested tables; a deeper one is one value


def _add_settings(value: Any, name: str, settings: dict[str, Any], depth: int = 0) -> None:
    """Add the settings of a table to a dictionary, by their dotted names.

    Its keys may come from anybody, so a table with unknown keys is one value.
    """
    is_table = isinstance(value, dict) and all(_PLAIN_KEY.fullmatch(key) for key in value)
    if not is_table or not value or depth >= _MOST_TABLES:
        settings[name] = value
        return
    for key, inner in value.items():
        _add_settings(inner, f"{name}.{key}".lstrip("."), settings, depth + 1)


def _same(before: SettingValue | None, now: SettingValue | None) -> bool:
    if before is None or now is None:
        return False
    return bool(before.relative == now.relative or before.absolute == now.absolute)
