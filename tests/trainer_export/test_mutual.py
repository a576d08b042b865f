"""The mutual losses against autograd, the limits, the simultaneous step, and the proximal term."""

import pytest
import torch
from torch.nn import functional

from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_step import Learner, pair_step
from trainer_export.proximal import proximal_gradients, proximal_loss
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL, mutual_loss_and_logit_gradient, mutual_parts
from trainer_export.update import TrainedTensors

Y = torch.tensor([2, 0, 1, 2])


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]


def by_autograd(own, other, trust):
    """The definition, with torch's own losses: the other model's distribution is the target."""
    own = own.clone().requires_grad_()
    divergence = functional.kl_div(
        torch.log_softmax(own, 1), torch.softmax(other, 1), reduction="batchmean"
    )
    loss = trust * functional.cross_entropy(own, Y) + (1 - trust) * divergence
    (gradient,) = torch.autograd.grad(loss, own)
    return loss.detach(), gradient


@pytest.mark.parametrize("trust", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_autograd(logits, trust):
    """In closed form, so that no graph needs the gradient of a softmax."""
    own, other = logits
    loss, gradient = mutual_loss_and_logit_gradient(own, other, Y, trust)
    expected, slope = by_autograd(own, other, trust)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, slope)
    traced, _ = mutual_loss_and_logit_gradient(
        own, other, Y, torch.tensor(trust, dtype=torch.float64)
    )
    torch.testing.assert_close(traced, expected)


def test_no_gradient_reaches_the_teacher(logits):
    """The other model's distribution is a constant of the loss."""
    own, other = (value.requires_grad_() for value in logits)
    loss, _ = mutual_loss_and_logit_gradient(own, other, Y, 0.4)
    assert torch.autograd.grad(loss, other, allow_unused=True) == (None,)


def test_models_that_agree_teach_each_other_nothing(logits):
    """The divergence of equal distributions is 0, and so is its gradient, even for huge logits."""
    own = logits[0] * 1e3
    parts = mutual_parts(own, own.clone(), Y)
    assert parts.divergence == 0
    _, gradient = mutual_loss_and_logit_gradient(own, own.clone(), Y, 0.0)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def linear(parameters, x):
    return functional.linear(x, parameters[0], parameters[1])


def learner(seed, trust, recipe):
    generator = torch.Generator().manual_seed(seed)
    parameters = [
        torch.randn(3, 5, generator=generator, dtype=torch.float64),
        torch.randn(3, generator=generator, dtype=torch.float64),
    ]
    states = {
        state.name: [torch.zeros_like(p) for p in parameters] for state in recipe.optimizer.states
    }
    return Learner(
        linear,
        TrainedTensors(parameters, states),
        trust,
        torch.tensor(0.1, dtype=torch.float64),
        recipe,
    )


def test_the_step_is_simultaneous_and_each_half_is_torch_sgd():
    """Both losses come from the outputs before the step; momentum, decay and clipping are
    torch's.
    """
    recipe = Recipe(Sgd(momentum=0.9, weight_decay=0.01), clip_norm=0.5)
    personal = learner(1, 0.3, recipe)
    meme = learner(2, 0.8, recipe)
    generator = torch.Generator().manual_seed(3)
    copies = [
        [p.clone().requires_grad_() for p in half.trained.parameters] for half in (personal, meme)
    ]
    optimizers = [torch.optim.SGD(copy, lr=0.1, momentum=0.9, weight_decay=0.01) for copy in copies]
    for _ in range(3):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        outputs = [linear(copy, x) for copy in copies]
        for own, other, half, optimizer, copy in zip(
            outputs, reversed(outputs), (personal, meme), optimizers, copies, strict=True
        ):
            divergence = functional.kl_div(
                torch.log_softmax(own, 1), torch.softmax(other.detach(), 1), reduction="batchmean"
            )
            loss = half.knob * functional.cross_entropy(own, Y) + (1 - half.knob) * divergence
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            torch.nn.utils.clip_grad_norm_(copy, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        learnt = pair_step(MUTUAL, (personal, meme), x, Y)
        personal, meme = (
            Learner(linear, new.trained, half.knob, half.lr, recipe)
            for new, half in zip(learnt, (personal, meme), strict=True)
        )
        for half, copy in zip((personal, meme), copies, strict=True):
            for mine, theirs in zip(half.trained.parameters, copy, strict=True):
                torch.testing.assert_close(mine, theirs.detach())


def test_alpha_one_ignores_the_meme():
    """The personal model then trains alone, whatever the meme says."""
    recipe = Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None)
    x = torch.ones(4, 5, dtype=torch.float64)
    one, _ = pair_step(MUTUAL, (learner(1, 1.0, recipe), learner(2, 0.5, recipe)), x, Y)
    two, _ = pair_step(MUTUAL, (learner(1, 1.0, recipe), learner(9, 0.5, recipe)), x, Y)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.trained.parameters, two.trained.parameters, strict=True)
    )


def test_a_parameter_outside_the_loss_still_decays():
    """Its gradient is 0; weight decay and momentum go on."""
    recipe = Recipe(Sgd(momentum=0.0, weight_decay=0.5), clip_norm=None)
    half = learner(1, 0.5, recipe)
    idle = torch.ones(2, dtype=torch.float64)
    wider = Learner(
        linear, TrainedTensors([*half.trained.parameters, idle], {}), 0.5, half.lr, recipe
    )
    learnt, _ = pair_step(
        MUTUAL, (wider, learner(2, 0.5, recipe)), torch.ones(4, 5, dtype=torch.float64), Y
    )
    torch.testing.assert_close(learnt.trained.parameters[2], idle * 0.95)


def test_the_proximal_gradient_is_that_of_the_proximal_loss(logits):
    """It is mu (w - w_sent), added to the gradient of the rest."""
    anchors = [value.clone() for value in logits]
    parameters = [(value + 0.5).requires_grad_() for value in logits]
    rest = [torch.ones_like(value) for value in logits]
    expected = torch.autograd.grad(proximal_loss(parameters, anchors, 0.3), parameters)
    got = proximal_gradients(rest, [p.detach() for p in parameters], anchors, 0.3)
    for mine, slope in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, slope + 1)
    assert proximal_loss(anchors, anchors, 0.3) == 0
