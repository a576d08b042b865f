"""F1 of named entities and Pearson's correlation, as other programs count them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_protocol.errors import ConfigError
from fleet_protocol.metrics import RULES, evaluation_of, join_metrics
from fleet_protocol.recipe_spec import LossSpec, MetricSpec, OptimizerSpec, RecipeSpec
from models.zoo.randomized_model import vocabulary_of
from tests.fleet.named_entities import Scores, entity_scores
from tests.trainer_export.test_losses import evaluating, exported
from trainer_export.batches import SizedBatches
from trainer_export.loss import Answer, loss_named
from trainer_export.metric import metric_named
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

TAGS = ("O", "B-drug", "I-drug", "B-dose", "I-dose")
LOSS = loss_named("masked-cross-entropy")


def counts_of(guessed, truth):
    """The sums of the metric, by the traced form, for labels [batch, tokens]."""
    output = torch.nn.functional.one_hot(torch.tensor(guessed), len(TAGS)).float()
    answer = Answer(torch.tensor(truth), torch.ones(len(TAGS)))
    metric = metric_named("entity-f1")
    traced = metric.counts(LOSS, output, answer)
    listed = metric.pytorch_counts(LOSS, output, answer)
    for name, numbers in traced.items():
        np.testing.assert_array_equal(numbers.numpy(), listed[name].numpy(), err_msg=name)
    return {name: numbers.numpy().astype(np.float64) for name, numbers in traced.items()}


def as_tags(labels, kept):
    """Return the tags of the tokens that count."""
    return [TAGS[label] for label, counts in zip(labels, kept, strict=True) if counts]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_entities_are_counted_as_by_conlleval(data):
    """Whatever the tags, and wherever tokens are ignored."""
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)))
    size = shape[0] * shape[1]
    labels = st.lists(st.integers(-1, 4), min_size=size, max_size=size)
    guesses = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    truth = np.reshape(data.draw(labels), shape)
    guessed = np.reshape(data.draw(guesses), shape)
    sums = counts_of(guessed, truth)
    kept = truth >= 0
    scores = entity_scores(
        [as_tags(row, counts) for row, counts in zip(truth, kept, strict=True)],
        [as_tags(row, counts) for row, counts in zip(guessed, kept, strict=True)],
    )
    for place, kind in enumerate(("drug", "dose")):
        expected = scores.get(kind, Scores(0, 0, 0))
        assert sums["entity_hits"][place] == expected.correct
        assert sums["entities_predicted"][place] == expected.found
        assert sums["entities_present"][place] == expected.present
    joined = sum(scores.values(), Scores(0, 0, 0))
    assert RULES["micro-f1"](*sums.values()) == pytest.approx(joined.f1)


def test_an_entity_is_right_only_as_a_whole():
    """Another end, another type, and an ignored piece inside of a word."""
    truth = [[1, 2, -1, 2, 0, 3, 0]]
    whole = counts_of([[1, 2, 0, 2, 0, 3, 0]], truth)
    assert whole["entity_hits"].tolist() == [1, 1]
    assert whole["entities_present"].tolist() == [1, 1]
    shorter = counts_of([[1, 2, 0, 0, 0, 1, 0]], truth)
    assert shorter["entity_hits"].tolist() == [0, 0]
    assert shorter["entities_predicted"].tolist() == [2, 0]


def test_the_graph_counts_entities(tmp_path):
    """Over two batches of a model with labels for each token, with the sums of the eval graph."""
    recipe = Recipe(metrics=(metric_named("entity-f1"),))
    place, manifest, module = exported(tmp_path, "words", recipe)
    signature = Signature(
        manifest.input_shape, manifest.input_dtype, manifest.classes
    ).with_places_of(module)
    session = evaluating(place, manifest, module)
    sums = {}
    truths = []
    guesses = []
    counted = 0
    for x, y in SizedBatches(signature, vocabulary_of(module), (9, 4)).draw(2):
        for name, value in session.evaluate(x.numpy(), y.numpy(), np.ones(3, np.float32)).items():
            sums[name] = sums.get(name, 0) + value
        with torch.no_grad():
            guessed = module(x).argmax(-1).numpy()
        kept = y.numpy() >= 0
        counted += int(kept.sum())
        truths += [as_tags(row, counts) for row, counts in zip(y.numpy(), kept, strict=True)]
        guesses += [as_tags(row, counts) for row, counts in zip(guessed, kept, strict=True)]
    expected = sum(entity_scores(truths, guesses).values(), Scores(0, 0, 0))
    (found,) = evaluation_of(sums, counted, manifest.recipe).metrics
    assert expected.correct > 0
    assert found.value == pytest.approx(expected.f1)


def test_models_without_tags_are_refused():
    metric = metric_named("entity-f1")
    answer = Answer(torch.zeros(2, dtype=torch.int64), torch.ones(3))
    with pytest.raises(ConfigError, match="labels for each token"):
        metric.counts(LOSS, torch.zeros(2, 3), answer)
    answer = Answer(torch.zeros((2, 5), dtype=torch.int64), torch.ones(4))
    with pytest.raises(ConfigError, match="an odd number of them, but the model has 4"):
        metric.counts(LOSS, torch.zeros(2, 5, 4), answer)
    with pytest.raises(ConfigError, match="entity-f1 needs the loss masked-cross-entropy"):
        Recipe(loss=loss_named("huber"), metrics=(metric,))
    with pytest.raises(ConfigError, match="pearson needs a loss for numbers"):
        Recipe(metrics=(metric_named("pearson"),))


def test_correlations_of_batches_and_boards_join(tmp_path):
    """The graph's sums over two batches give numpy's correlation of all samples."""
    recipe = Recipe(loss=loss_named("mean-squared-error"), metrics=(metric_named("pearson"),))
    place, manifest, module = exported(tmp_path, "one", recipe)
    signature = Signature(
        manifest.input_shape, manifest.input_dtype, manifest.classes
    ).with_places_of(module)
    session = evaluating(place, manifest, module)
    evaluations = []
    outputs = []
    targets = []
    for x, y in SizedBatches(signature, sizes=(9, 14), loss=recipe.loss).draw(2):
        sums = session.evaluate(x.numpy(), y.numpy(), np.ones(1, np.float32))
        evaluations.append(evaluation_of(sums, len(y), manifest.recipe))
        with torch.no_grad():
            outputs += module(x)[:, 0].tolist()
        targets += y.tolist()
    expected = np.corrcoef(outputs, targets)[0, 1]
    assert join_metrics(evaluations)["pearson"] == pytest.approx(expected, abs=1e-5)


def test_equal_numbers_have_no_correlation():
    """Two outputs, of which one is always the same: the mean of 1 and 0."""
    outputs = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
    targets = np.array([[1.0, 1.0], [2.0, 2.0], [0.0, 3.0]])
    columns = (outputs, targets, outputs**2, targets**2, outputs * targets)
    sums = [column.sum(0) for column in columns]
    assert RULES["pearson"](*sums, np.asarray(3.0)) == pytest.approx(0.5)


def test_a_rule_of_a_later_version_is_left_out():
    """A board that does not know it reports the other numbers."""
    recipe = RecipeSpec(
        optimizer=OptimizerSpec(name="sgd"),
        loss=LossSpec(),
        metrics=(MetricSpec(name="later", rule="of-a-later-version", sums=("seen",)),),
    )
    sums = {"loss_sum": np.array(2.0), "correct": np.array(1.0), "seen": np.array([3.0, 4.0])}
    evaluation = evaluation_of(sums, 4, recipe)
    assert evaluation.metrics == ()
    assert evaluation.accuracy == 0.25
