"""A label per token: the loss, its gradient, and graphs of models that return logits for every
position.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fleet_protocol.errors import ExportError
from models import architecture, build, infer_layout
from tests.marking import mostly_slow
from tests.trainer_export.helpers import all_reports, deviation, graphs_of, tiny, train_report
from trainer_export.check import open_session, run_session
from trainer_export.exported import Export
from trainer_export.losses.cross_entropy import correct_count, loss_and_logit_gradient, loss_sum
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])


def random_batch(ignored):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (5, 7), generator=generator)
    return logits, torch.where(torch.rand(5, 7, generator=generator) < ignored, -1, y)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_loss_and_gradient_are_those_of_autograd(ignored):
    """The mean is over the labels that count in the whole batch; a negative label has no
    gradient.
    """
    logits, y = random_batch(ignored)
    own = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy((own * MASK).flatten(0, 1), y.flatten(), ignore_index=-1)
    (slope,) = torch.autograd.grad(expected, own)
    loss, gradient = loss_and_logit_gradient(logits, y, MASK)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, slope)
    assert not gradient[y < 0].any()


def test_sums_count_what_counts():
    """The sum of the losses and the number of hits leave negative labels out."""
    logits, y = random_batch(0.4)
    total = nn.functional.cross_entropy(
        (logits * MASK).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"
    )
    torch.testing.assert_close(loss_sum(logits, y, MASK), total, check_dtype=False)
    hits = sum(
        int(y[i, j] >= 0 and (logits[i, j] * MASK).argmax() == y[i, j])
        for i in range(5)
        for j in range(7)
    )
    assert int(correct_count(logits, y, MASK)) == hits


def test_a_batch_in_which_nothing_counts_has_no_loss():
    """0, not 0/0."""
    logits, y = random_batch(0.0)
    loss, gradient = loss_and_logit_gradient(logits, torch.full_like(y, -1), MASK)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "depth"),
    mostly_slow(
        [("transformer_mlm", 1), ("next_word", 2), ("token_classifier", 1)],
        lambda case: case[0] == "transformer_mlm",
    ),
)
def test_graphs_take_a_label_per_token(name, depth):
    """Train and eval take y [batch, tokens] and agree with PyTorch, labels that do not count among
    them.
    """
    module, signature = tiny(name, 0.5, depth)
    assert signature.places == signature.input_shape
    graphs = {graph.key: graph for graph in graphs_of(name, 0.5, depth)}
    for key in ("onnx/train", "onnx/eval"):
        port = next(p for p in graphs[key].inputs if p.name == "y")
        assert port.shape == ("batch", *signature.input_shape)
    assert graphs["onnx/infer"].outputs[0].shape == (
        "batch",
        *signature.input_shape,
        signature.classes,
    )
    reports = all_reports(module, signature, graphs=graphs_of(name, 0.5, depth))
    assert deviation(reports.values()) <= 1e-5


def test_evaluation_ignores_negative_labels():
    """Making a label negative takes its loss out of the sum and nothing else."""
    module, _ = tiny("token_classifier", 0.5, 1)
    graph = next(g for g in graphs_of("token_classifier", 0.5, 1) if g.key == "onnx/eval")
    session = open_session(graph.data)
    feed = {f"param.{n}": p.detach().numpy() for n, p in module.named_parameters()}
    x = np.random.default_rng(0).integers(1, 30, (4, 6))
    y = np.random.default_rng(1).integers(0, 3, (4, 6))
    feed |= {"x": x, "mask": np.ones(3, np.float32)}
    whole = run_session(session, {**feed, "y": y})
    left = run_session(session, {**feed, "y": np.where(np.arange(6) < 2, y, -1)})
    right = run_session(session, {**feed, "y": np.where(np.arange(6) < 2, -1, y)})
    assert float(left["loss_sum"] + right["loss_sum"]) == pytest.approx(
        float(whole["loss_sum"]), rel=1e-5
    )
    assert int(left["correct"] + right["correct"]) == int(whole["correct"])


def test_logits_of_another_shape_are_refused():
    """A signature with one label per sample does not fit logits per token, and the message says
    what would.
    """
    module, signature = tiny("token_classifier")
    plain = Signature(signature.input_shape, "int64", signature.classes)
    with pytest.raises(
        ExportError,
        match=r"must return logits \[batch, 3\], but .*\[batch, tokens, 3\] for a label per token",
    ):
        train_report(module, plain)
    with pytest.raises(ExportError, match="must return logits"):
        Signature((2, 3, 4), "float32", 5).with_places_of(nn.Linear(4, 5))


class Stepwise(nn.Module):
    """Logits of each of as many steps, or rows and columns, as there are classes."""

    def __init__(self, hidden, classes, moves):
        super().__init__()
        self.first = nn.Conv2d(2, hidden, 1)
        self.last = nn.Conv2d(hidden, classes, 1)
        self.moves = moves

    def forward(self, x):
        logits = (
            self.last(self.first(x))
            if x.dim() == 4
            else self.last(self.first(x.unsqueeze(3))).squeeze(3)
        )
        for one, other in self.moves:
            logits = logits.movedim(one, other)
        return logits


@pytest.mark.parametrize(
    ("shape", "moves", "message"),
    [
        (
            (2, 4),
            [],
            (
                r"dimension 1 of \[batch, 4, 4\], but graphs read them in dimension "
                r"2.*logits\.movedim\(1, 2\)"
            ),
        ),
        ((2, 4), [(1, 2)], ""),
        (
            (2, 4, 4),
            [(1, 3)],
            r"dimension 3 of \[batch, 4, 4, 4\].*dimension 1; .*logits\.movedim\(3, 1\)",
        ),
        ((2, 4, 4), [(1, 3), (3, 1)], ""),
    ],
)
def test_as_many_places_as_classes_hide_no_classes_elsewhere(shape, moves, message):
    """They were read along the wrong dimension in silence; what the message says is taken."""

    @architecture()
    def stepwise(cut, *, input_shape=shape, classes=4):
        return Stepwise(cut.width("hidden", 6), cut.classes(classes), moves)

    layout = infer_layout(stepwise)
    export = Export(stepwise, layout, Recipe())
    tier = layout.tier(0.5)
    if message:
        with pytest.raises(ExportError, match=message):
            export.signature_of(tier, build(stepwise, tier))
    else:
        assert export.signature_of(tier, build(stepwise, tier)).places == (4,) * (len(shape) - 1)
