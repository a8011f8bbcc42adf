"""The polynomial operations agree with the exact ones, and so do their gradients."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx import nn

from tools.demo_models import fastops

Operation = Callable[[mx.array], mx.array]


@pytest.mark.parametrize(
    ("fast", "exact"),
    [
        (fastops.softmax, lambda x: mx.softmax(x, axis=-1)),
        (fastops.gelu, nn.gelu_approx),
        (fastops.silu, nn.silu),
    ],
    ids=["softmax", "gelu", "silu"],
)
def test_values_and_gradients_match_the_exact_operation(fast: Operation, exact: Operation) -> None:
    mx.random.seed(0)
    x = mx.random.normal((7, 33)) * 2
    cotangent = mx.random.normal((7, 33))
    assert mx.abs(fast(x) - exact(x)).max().item() < 2e-3
    ours = mx.grad(lambda x: (fast(x) * cotangent).sum())(x)
    theirs = mx.grad(lambda x: (exact(x) * cotangent).sum())(x)
    assert mx.abs(ours - theirs).max().item() < 6e-3


def test_cross_entropy_and_its_gradient_match_the_exact_loss() -> None:
    mx.random.seed(1)
    logits = mx.random.normal((5, 4, 50)) * 3
    labels = mx.random.randint(0, 50, (5, 4))
    weights = mx.random.uniform(shape=(5, 4))

    def exact(x: mx.array) -> mx.array:
        return nn.losses.cross_entropy(x, labels)

    def fast(x: mx.array) -> mx.array:
        return fastops.cross_entropy(x, labels)

    assert mx.abs(fast(logits) - exact(logits)).max().item() < 5e-3
    ours = mx.grad(lambda x: (fast(x) * weights).sum())(logits)
    theirs = mx.grad(lambda x: (exact(x) * weights).sum())(logits)
    assert mx.abs(ours - theirs).max().item() < 3e-3


def test_masked_scores_get_no_weight() -> None:
    row = fastops.softmax(mx.array([3.0, -97.0, 1.0, -200.0]))
    assert row[1].item() < 1e-15
    assert row[3].item() < 1e-15
    assert abs(row.sum().item() - 1) < 1e-6
