"""Small trained tokenizer and tiny random models shared by the training tests."""

from typing import Any

import pytest

from tools.demo_models import demo_target, tokenizer


@pytest.fixture(scope="session")
def demo_tokenizer() -> tokenizer.DemoTokenizer:
    return tokenizer.train(seed=1, size=300)


@pytest.fixture
def tiny_target() -> Any:
    model = demo_target.build(demo_target.configuration(layers=3, hidden=128))
    demo_target.initialise(model, seed=3)
    return model
