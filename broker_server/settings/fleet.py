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
from broker_server.settings.export import ExportTable
from broker_server.settings.method import StrategyConfig
from broker_server.settings.privacy import PrivacyConfig, SecureSumConfig
from broker_server.settings.private import PrivateConfig
from broker_server.settings.robust import RobustConfig
from broker_server.settings.rounds import DownloadConfig, RoundConfig, UploadConfig
from broker_server.strategies.optimizer_rules import OptimizerSettings
from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError
from fleet_protocol.frozen import STORED, FrozenModel, problems
from fleet_protocol.messages import Name
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.run_names import RunName
from fleet_protocol.schedule import RateSchedule

_KINDS_OF_RATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"final": ("cosine", "linear"), "every": ("step",), "factor": ("step",)}
)
"""Keys of a schedule, with the kinds of schedule in which they have an effect."""


class ViewConfig(FrozenModel):
    """Where `shoal up` serves the page of its store.

    Attributes:
        port: port of the page; 0 selects a free port.
        host: address on which the page's server listens; with ``0.0.0.0``, other computers on the
            network can open the page if they have the token.
        token_file: file with the token that the page requires; the file is created if it is
            missing. By default, the file is ``view.token`` in the store.
        actions: whether operators can make changes on the page, with the token in the store's file
            ``operator.token``, which is created if missing.
    """

    port: int = Field(default=8420, ge=0, le=65535)
    host: str = "127.0.0.1"
    token_file: Path | None = None
    actions: bool = False


class ModelConfig(FrozenModel):
    """The model that is trained.

    Attributes:
        artifacts: folder that ``shoal export`` wrote.
        arch: name of the architecture in that folder.
        weights: safetensors file with the weights to start from, instead of the exported initial
            weights.
        recipe: settings with which the artifacts must have been exported, as far as they are given;
            None accepts any.
        export: the export that `shoal run` and `shoal up` do first; None to use the folder as it
            is.
    """

    artifacts: Path = Path("artifacts")
    arch: str
    weights: Path | None = None
    recipe: RecipeTable | None = None
    export: ExportTable | None = None


class TrainConfig(FrozenModel):
    """How devices train.

    Attributes:
        learning_rate: learning rate before the first milestone.
        epochs: number of passes over a device's data in one round.
        steps: exact number of training steps per round, instead of whole passes; None for
            ``epochs``.
        batch_size: samples per step.
        micro_batch: number of samples that a device processes at once if a whole batch does not fit
            in its memory. The device sums the gradients of these pieces, and takes one step. This
            requires ``accumulate`` in the recipe. None for whole batches.
        mask_labels: whether to zero the logits of labels that a device does not have (specification
            1.5).
        milestones: rounds at which the learning rate is multiplied by ``factor``.
        factor: factor by which each milestone multiplies the learning rate.
        rate: warm-up and schedule of the learning rate, besides ``milestones``; None for neither.
        optimizer_state: whether a device's optimizer starts every round with a new state
            (``reset``), or continues with the state after the device's last round of the same tier
            (``keep``). A plan that moves its window requires ``reset``.
        schedule: whether a milestone changes the learning rate after its round (``after``,
            specification 1.2, step 6), or already in its round (``before``, specification 2.6).
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
        # A rate of another kind ignores these keys.
        where = f'with kind = "{self.rate.kind}"'
        for key, kinds in _KINDS_OF_RATE.items():
            instead = f'kind = "{kinds[0]}"'
            has_effect = self.rate.kind in kinds
            self.rate.refuse_idle(info, key, has_effect, where=where, instead=instead)
        return self

    def rate_after(self, closed_rounds: int) -> float:
        """Return the learning rate of the round that follows ``closed_rounds`` closed ones."""
        # `before`: the round that is about to begin counts as passed.
        acting = closed_rounds + 1 if self.schedule == "before" else closed_rounds
        passed = sum(acting >= milestone for milestone in self.milestones)
        return self.learning_rate * self.factor**passed


class TiersConfig(FrozenModel):
    """How tiers are assigned to devices.

    Attributes:
        assign: how devices get their tiers. ``capacity``: the largest tier that a device can train
            according to its report. ``fix`` and ``dynamic``: the level that ``levels`` assigns to
            the device once (``fix``) or before every round (``dynamic``, specification 1.1), but
            never a larger tier than the device can train.
        levels: a mix of levels such as ``a1-b1-e2``; the first level is that of the global model.
        allowed: ids of the tiers in use; None for all exported tiers.
        exclude_smaller: whether only devices that can train the full model take part (the Exclusive
            baseline).
        memory_share: share of a board's free memory that training may use.
    """

    assign: Literal["capacity", "fix", "dynamic"] = "capacity"
    levels: str | None = None
    allowed: tuple[str, ...] | None = Field(default=None, min_length=1)
    exclude_smaller: bool = False
    memory_share: Share = 0.8

    @model_validator(mode="after")
    def _levels_are_for_assigning(self) -> "TiersConfig":
        if (self.levels is None) != (self.assign == "capacity"):
            # A mix that cannot be parsed is refused when the configuration is read.
            raise ValueError('levels needs assign = "fix" or "dynamic", and these need levels')
        if self.levels is not None:
            parse_mix(self.levels)
        return self


class RunKeys(FrozenModel):
    """The settings of a run, in a fleet and in a simulation.

    Attributes:
        run_name: name of the run; commands accept this name as well as the run's id. The name must
            be unique within a store.
        keep_versions: number of newest global versions whose weights the store keeps, in addition
            to the best version; None keeps all.
        seed: seed for device sampling, plans, and the shuffling of samples on the devices.
        train: how devices train.
        upload: how updates are encoded.
        download: how weights are encoded.
        strategy: how sub-models are cut and merged.
        server_optimizer: how the server applies a merge; None for the strategy's own rule.
        tiers: how tiers are assigned to devices.
        robust: how the run treats updates that are unlike the others.
        privacy: how one device's part is hidden; None for not at all.
        secure_sum: how updates are hidden from the server, which learns only their sums; None for
            not at all.
        private: what each device keeps of the model, and trains for itself; None for nothing.
    """

    run_name: RunName | None = None
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
    private: PrivateConfig | None = None

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
    """The settings of ``fleet.toml``.

    Attributes:
        fleet: name of the fleet, which is part of every topic.
        store: folder of the server's database and blobs.
        broker: the broker.
        model: the model.
        round: how rounds are run.
        evaluation: how the global model is evaluated.
        contract: the definition of a sample for every board, if the test set does not define it, or
            lists names in another order; None to use the test set.
        view: the page that `shoal up` also serves; None for none.
        code: folders, in addition to this file's folder, with Python functions that
            ``evaluation.data`` can name.
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
        # A frozen value may change only while it is created: settings that give way were never set.
        self.__dict__.update(yielding_defaults(self))
        return self

    def without_export(self) -> "FleetConfig":
        """Return the settings of a run, which begins with what is exported."""
        if self.model.export is None:
            return self
        model = self.model.model_copy(update={"export": None})
        return self.model_copy(update={"model": model})

    @classmethod
    def stored(cls, text: str) -> "FleetConfig":
        """Read the configuration of a stored run, even of an earlier version, only to display it.

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
        # The present setting counts; `differing_settings` refuses it if it is not what the run
        # began with.
        if self.contract:
            return self
        return self.model_copy(update={"contract": self.stored(stored).contract})

    def differing_settings(self, stored: str) -> list[str]:
        """Return the names of the settings that differ from a stored configuration.

        Broker, store and page may have moved. So may the whole folder: two paths are the same if
        they have the same place relative to the store. A run keeps the contract with which it began
        if none is set.
        """
        before = self.stored(stored).run_settings()
        now = self.run_settings()
        names = []
        for name in {**now, **before}:
            # Without a contract in the file, the run keeps that with which it began.
            ignored = self.contract is None and name.partition(".")[0] == "contract"
            if not ignored and not _same(before.get(name), now.get(name)):
                names.append(name)
        return names

    def run_settings(self) -> dict[str, "SettingValue"]:
        """List every setting that defines a run, such as ``train.epochs``, with its JSON value."""
        # Both, since a store may be moved with its data or without: see `SettingValue`.
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
        relative: settings with paths relative to the store, which stay the same when the folder is
            moved, or copied to another computer.
        absolute: settings with absolute paths.
    """

    relative: Any
    absolute: Any


ELSEWHERE = {"broker", "store", "view", "code", "keep_versions", "run_name"}
"""Settings of a server, not of a run: they may differ when a run resumes."""


_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_TABLES = 4  # nested tables; a deeper one is one value


def _add_settings(value: Any, name: str, settings: dict[str, Any], depth: int = 0) -> None:
    """Add the settings of a table to a dictionary, by their dotted names.

    Its keys may come from an untrusted source, so a table with unknown keys is one value.
    """
    # A key with other letters could pass for a nested name, or fill the log.
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
