"""Each forged result is reported as such by a client that trusts a runner's key, with exit code 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.bus.results import TrustLevel, believe
from bridge.errors import ResultError
from tests.adversary.answers import EXPECTED, FORGED, Answer, Keys, fetched


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys"))
    made.make()
    return made


def test_the_honest_result_is_believed(keys: Keys):
    believed = believe(fetched(Answer(), keys.sign), trusted=keys.trusted, expected=EXPECTED)
    assert (believed.signature, believed.signer) == (TrustLevel.TRUSTED, "mac")


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("answer", [pytest.param(answer, id=name) for name, answer in FORGED.items()])
def test_a_forged_result_is_reported_as_such(keys: Keys, answer: Answer):
    with pytest.raises(ResultError) as reported:
        believe(fetched(answer, keys.sign), trusted=keys.trusted, expected=EXPECTED)
    assert reported.value.exit_code == 3
    assert reported.value.message.isprintable()


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=name)
        for name, answer in FORGED.items()
        if name not in ("unsigned", "signed-by-another-key")
    ],
)
def test_nor_is_it_believed_where_no_key_is_trusted(keys: Keys, answer: Answer):
    """Whatever else is wrong with it shows without any key."""
    with pytest.raises(ResultError):
        believe(fetched(answer, keys.sign), trusted=Path("/nonexistent"), expected=EXPECTED)
