"""Makes the contract of a run's data from ``[contract]`` and the server's test sets."""

import logging
from collections.abc import Mapping

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.evaluation import load_test_set
from broker_server.rounds.run_context import RunContext
from fleet_protocol.data import DataConfig, DataSet
from fleet_protocol.data.contract import complete_contract
from fleet_protocol.data.inspection import inspect
from fleet_protocol.data.terms import NO_CONTRACT, ContractTerms, DataContract
from fleet_protocol.data.unused_labels import describe_unused
from fleet_protocol.errors import ConfigError, MismatchError
from fleet_protocol.manifest import Manifest

_LOG = logging.getLogger(__name__)
NO_TERMS = ContractTerms()


class FleetContracts:
    """Builds the contracts of one run from its test sets.

    The test set for the whole model is read first; the others must agree with it. A tier with a
    separate head has separate labels: only its own test set defines them.

    Attributes:
        findings: what looks wrong in the test sets that were read, in sentences without repetition.
    """

    def __init__(self, context: RunContext) -> None:
        """Start from the tables ``[contract]`` and ``[evaluation]`` of a run."""
        self._context = context
        self._configured = context.config.contract or NO_TERMS
        self._shared: DataContract | None = None
        self._own: dict[str, DataContract] = {}
        self.findings: tuple[str, ...] = ()

    def test_set(self, tier: TierArtifacts) -> DataSet:
        """Read the test set for a tier, in the order of the run's labels and columns.

        Raises:
            ConfigError: it disagrees with ``[contract]``, or with the test set of the whole model.
            DataError: it cannot be read, or does not fit the tier.
        """
        config = self._context.config.evaluation
        assert config.data is not None
        # A tier with separate labels has its own test set; the others use that of the whole model.
        source = config.tier_data.get(tier.tier.id, config.data)
        terms = self._terms(tier, source)
        try:
            data = self._load(tier, source, terms)
            contract = complete_contract(data, terms)
        except MismatchError as error:
            # Without terms the test set has nothing to disagree with.
            if not (terms.labels or terms.columns or terms.range or terms.tokens):
                raise
            settled = self._where_settled()
            raise ConfigError(f"{_source_name(source)} and {settled} disagree: {error}") from error
        _check_labels(contract, data, tier.manifest)
        self._examine(data, tier.manifest)
        if self._has_own_labels(tier):
            self._own[tier.tier.id] = contract
        elif self._shared is None:
            self._shared = contract
        return data

    def _load(self, tier: TierArtifacts, source: DataConfig, terms: ContractTerms) -> DataSet:
        own_source = tier.tier.id in self._context.config.evaluation.tier_data
        table = f"[evaluation.tier_data.{tier.tier.id}]" if own_source else "[evaluation.data]"
        # The fleet's value for missing entries applies if the test set names none.
        source = source.with_missing(terms.missing)
        return load_test_set(source, tier.manifest, terms, table=f"{table} of fleet.toml")

    def _examine(self, data: DataSet, manifest: Manifest) -> None:
        """Find what looks wrong in a test set; boards compare their samples with it."""
        sentences = [f"{data.source}: {finding.text}" for finding in inspect(data)]
        # Names state which labels there are, so no number can be left over.
        if not data.label_names:
            sentences.append(describe_unused(data.source, data.y, manifest.classes))
        for sentence in sentences:
            if sentence and sentence not in self.findings:
                self.findings = (*self.findings, sentence)

    def _where_settled(self) -> str:
        """Return the source of the terms that a test set disagrees with."""
        # The terms are configured, or stored from the beginning of the run.
        if self._configured != NO_TERMS:
            return "[contract] of fleet.toml, or the names with which the run began,"
        return "the test set of the whole model, or the model,"

    def by_tier(self) -> Mapping[str, DataContract]:
        """Return the contract of each tier that devices train; empty if none is defined."""
        contracts: dict[str, DataContract] = {}
        for tier in self._context.artifacts.tiers.values():
            contract = self._contract(tier)
            if contract != NO_CONTRACT:
                contracts[tier.tier.id] = contract
        return contracts

    def settled(self) -> ContractTerms | None:
        """Return the terms that a resumed run keeps, so that a changed test set moves no name."""
        # Without names, nothing about a sample depends on an order.
        if self._shared is None or not (self._shared.labels or self._shared.columns):
            return self._context.config.contract
        # The vocabulary of the model is added at every start, so only a configured one is stored.
        return ContractTerms(
            **self._shared.model_dump(exclude={"summary", "tokens"}),
            tokens=self._configured.tokens,
        )

    def _contract(self, tier: TierArtifacts) -> DataContract:
        if tier.tier.id in self._own:
            return self._own[tier.tier.id]
        contract = self._shared
        if contract is None:
            # No test set was read, so only configured terms hold.
            terms = self._with_bounds(self._configured, tier)
            contract = DataContract(**dict(terms))
        if self._has_own_labels(tier):
            # The shared names are those of the whole model's labels.
            return contract.model_copy(update={"labels": ()})
        return contract

    def _has_own_labels(self, tier: TierArtifacts) -> bool:
        return bool(self._context.artifacts.layout.own_head(tier.tier))

    def _terms(self, tier: TierArtifacts, source: DataConfig) -> ContractTerms:
        """Return the terms that a test set must agree with."""
        terms = self._configured
        if self._shared is not None:
            # The first test set has settled the terms; its figures do not bind the others.
            terms = ContractTerms(**self._shared.model_dump(exclude={"summary"}))
        if self._has_own_labels(tier):
            terms = terms.model_copy(update={"labels": ()})
        rule = source.missing_value
        # One number must stand for missing values everywhere.
        if rule is not None and terms.missing not in {None, rule}:
            raise ConfigError(
                f"[contract] missing = {terms.missing:g} of fleet.toml and missing = {rule:g} of "
                f"{_source_name(source)} disagree: set both to the same number"
            )
        if terms.missing is None:
            terms = terms.model_copy(update={"missing": rule})
        return self._with_bounds(terms, tier)

    def _with_bounds(self, terms: ContractTerms, tier: TierArtifacts) -> ContractTerms:
        """Add the vocabulary of a model of tokens to the terms."""
        manifest = tier.manifest
        vocabulary = tier.vocabulary()
        if vocabulary is None:
            return terms
        if terms.tokens is not None and terms.tokens > vocabulary:
            raise ConfigError(
                f"[contract] tokens = {terms.tokens} of fleet.toml, and {manifest.arch} has a"
                f" vocabulary of {vocabulary}: set {vocabulary} or less"
            )
        if terms.tokens is not None:
            return terms
        return terms.model_copy(update={"tokens": vocabulary})


def _source_name(source: DataConfig) -> str:
    """Return the name of a test set for messages."""
    return f"the test set {getattr(source, 'path', None) or getattr(source, 'entry_point', '')}"


def _check_labels(contract: DataContract, data: DataSet, manifest: Manifest) -> None:
    """Check that the model has one class for each label name."""
    count = len(contract.labels)
    # More names than classes can never be right; fewer may be, if boards lack the other labels.
    if count > manifest.classes:
        raise ConfigError(
            f"the fleet has {count} names for labels (from [contract] or from "
            f"{data.source}), but {manifest.arch} {manifest.tier} has {manifest.classes} "
            "classes: list as many names, or export the model with more classes"
        )
    if 0 < count < manifest.classes:
        _LOG.warning(
            "%s names %d labels, and %s has %d classes: boards with other labels are refused; list"
            " all in order as labels in [contract] of fleet.toml",
            data.source,
            count,
            manifest.arch,
            manifest.classes,
        )
