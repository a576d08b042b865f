"""The F1 of named entities: spans of tokens with a type, all of whose tokens must be right.

Labels are in the order ``O``, ``B-1``, ``I-1``, ``B-2``, ``I-2`` and so on. As in the default mode
of conlleval and seqeval, an ``I`` that continues nothing begins an entity. Tokens whose label is
ignored, such as padding and further pieces of a word, are left out of the sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from fleet_protocol.errors import ConfigError
from trainer_export.loss import Answer, Loss
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.metric import Metric

_TOKENS = 3  # dimensions of decisions [batch, tokens, classes]

Span = tuple[int, int, int]
"""Type from 0, first token, and the token after the last one."""


@dataclass(frozen=True)
class EntityF1(Metric):
    """F1 over the entities of all types (micro); the sums have a number for each type."""

    name: ClassVar[str] = "entity-f1"
    rule: ClassVar[str] = "micro-f1"
    sums: ClassVar[tuple[str, ...]] = ("entity_hits", "entities_predicted", "entities_present")

    def check(self, loss: Loss) -> None:
        """Require a cross entropy."""
        if not isinstance(loss, MaskedCrossEntropy):
            raise ConfigError(
                f"the metric {self.name} needs the loss {MaskedCrossEntropy.name}, not {loss.name}"
            )

    def counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the entities of each type that are right, predicted, and present."""
        predicted, truth = self._decided(loss, output, answer)
        kept = truth.sum(-1)  # 1 for tokens with a label, 0 for ignored ones
        guesses = _TaggedTokens.from_labels(predicted, kept)
        entities = _TaggedTokens.from_labels(truth, kept)
        right = (guesses.spans() * entities.spans()).sum(-1)
        # Boundaries and type must both agree.
        hits = right[..., None] * guesses.kinds * entities.kinds
        sums = (hits, guesses.beginning(), entities.beginning())
        counts: dict[str, Tensor] = {}
        for name, numbers in zip(self.sums, sums, strict=True):
            counts[name] = numbers.flatten(0, 1).sum(0)
        return counts

    def pytorch_counts(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> dict[str, Tensor]:
        """Count the same, sentence by sentence, from lists of entities."""
        predicted, truth = self._decided(loss, output, answer)
        counts = torch.zeros(len(self.sums), (truth.shape[-1] - 1) // 2)
        for guessed, labels in zip(predicted, truth, strict=True):
            kept = labels.sum(-1) > 0
            guesses = _entities(guessed[kept].argmax(-1).tolist())
            entities = _entities(labels[kept].argmax(-1).tolist())
            for place, spans in enumerate((guesses & entities, guesses, entities)):
                for kind, _, _ in spans:
                    counts[place, kind] += 1
        return dict(zip(self.sums, counts, strict=True))

    def _decided(
        self,
        loss: Loss,
        output: Tensor,
        answer: Answer,
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted and true labels, float32 [batch, tokens, classes], 0 or 1."""
        decided = loss.decided(output, answer)
        if decided is None or decided[0].dim() != _TOKENS:
            raise ConfigError(
                f"the metric {self.name} needs a model with labels for each token, such as"
                " token_classifier"
            )
        classes = decided[0].shape[-1]
        if classes % 2 == 0:
            raise ConfigError(
                f"the metric {self.name} reads labels as O, B-1, I-1, B-2, I-2 and so on, an odd"
                f" number of them, but the model has {classes}"
            )
        return decided


@dataclass(frozen=True)
class _TaggedTokens:
    """Sentences in which tokens are labelled.

    Attributes:
        kinds: type of the entity that a token is in, float32 [batch, tokens, types], 0 or 1.
        starts: whether an entity begins there, float32 [batch, tokens].
        ends: whether an entity ends there, in the same form.
    """

    kinds: Tensor
    starts: Tensor
    ends: Tensor

    @classmethod
    def from_labels(cls, labels: Tensor, kept: Tensor) -> "_TaggedTokens":
        """Read labels, float32 [batch, tokens, classes], of the tokens that count."""
        # An ignored token then looks like O, and `follows` skips it.
        labels = labels * kept[..., None]
        # Odd labels are B, even ones I; label 0 is O.
        begins = labels[..., 1::2].sum(-1)
        kinds = labels[..., 1::2] + labels[..., 2::2]
        inside = kinds.sum(-1)
        # A graph cannot remove tokens, so the next one that counts is found by its position among
        # them.
        place = torch.cumsum(kept, -1)
        # Row i has a 1 in the column of the next token that counts.
        follows = (place[:, None, :] == place[:, :, None] + 1).to(torch.float32)
        follows = follows * kept[:, None, :] * kept[:, :, None]
        kinds_before = torch.matmul(follows.transpose(1, 2), kinds)
        kinds_behind = torch.matmul(follows, kinds)
        same_before = (kinds_before * kinds).sum(-1)
        same_behind = (kinds_behind * kinds).sum(-1)
        begins_behind = torch.matmul(follows, begins[..., None])[..., 0]
        # An I after the same type continues; after O or another type it begins an entity.
        continues = same_before * (1.0 - begins)
        continued = same_behind * (1.0 - begins_behind)
        starts = inside * (1.0 - continues)
        ends = inside * (1.0 - continued)
        return cls(kinds, starts, ends)

    def spans(self) -> Tensor:
        """Return 1 where an entity goes from the row's token to the column's.

        Float32 [batch, tokens, tokens].
        """
        # Tokens of one entity have as many ends before them.
        ended = torch.cumsum(self.ends, -1) - self.ends
        is_unbroken = (ended[:, :, None] == ended[:, None, :]).to(torch.float32)
        tokens = torch.arange(self.ends.shape[-1])
        in_order = (tokens[:, None] <= tokens[None, :]).to(torch.float32)
        return self.starts[:, :, None] * self.ends[:, None, :] * is_unbroken * in_order

    def beginning(self) -> Tensor:
        """Return the types of the entities that begin at each token, as `kinds`."""
        return self.kinds * self.starts[..., None]


def _entities(labels: list[int]) -> set[Span]:
    """List the entities of a sentence, whose labels are numbers in the order of the module."""
    spans: set[Span] = set()
    kind = None
    start = 0
    # The 0 at the end closes an entity of the last token.
    for place, label in enumerate([*labels, 0]):
        own_kind = None if label == 0 else (label - 1) // 2
        is_inside = label > 0 and label % 2 == 0
        if kind is not None and not (is_inside and own_kind == kind):
            spans.add((kind, start, place))
            kind = None
        if own_kind is not None and kind is None:
            kind = own_kind
            start = place
    return spans


METRICS: Mapping[str, type[Metric]] = MappingProxyType({EntityF1.name: EntityF1})
