"""A drafter's count of forwards is how often its network was called, and nothing else moves it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.batch_decode import Request, decode_batch
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Drafter
from engine.target.model import Target
from tests.engine.batches import gather, prompt_of, target_of
from tests.engine.random_drafters import KINDS, make

LONG, COUNT = 80, 24  # a prompt that an autoregressive drafter catches up with by itself


class Spy:
    """Counts the calls of one drafter's network, or of its twins'."""

    def __init__(self, drafter: Any, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        inner = getattr(drafter, "other", drafter)
        if hasattr(inner, "_model"):
            self._watch(patch, Target, "forward", inner._model)
        elif hasattr(inner, "network"):
            self._watch(patch, type(inner.network), "__call__", inner.network)

    def _watch(self, patch: pytest.MonkeyPatch, kind: type, name: str, watched: object) -> None:
        own = getattr(kind, name)

        def call(it: object, *args: Any, **more: Any) -> Any:
            self.calls += it is watched
            return own(it, *args, **more)

        patch.setattr(kind, name, call)


def drafter_and_spy(kind: str, patch: pytest.MonkeyPatch) -> tuple[Drafter, Spy]:
    drafter = make(kind, target_of("gemma3_text"))
    return drafter, Spy(drafter, patch)


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_the_network_is_counted(kind: str, monkeypatch: pytest.MonkeyPatch):
    drafter, spy = drafter_and_spy(kind, monkeypatch)
    assert drafter.forwards == 0
    seen = []
    for length in (5, LONG):  # of one drafter, one after the other
        rounds = [
            step.round
            for step in decode(
                target_of("gemma3_text"),
                drafter,
                prompt_of(length),
                max_tokens=COUNT,
                draft_length=FixedDraftLength(4),
            )
            if step.round is not None and step.round.block >= 2
        ]
        assert drafter.forwards == spy.calls
        seen.append(len(rounds))
    if kind == "prompt-lookup":
        assert drafter.forwards == 0
    elif kind.startswith("dflash"):
        assert drafter.forwards == sum(seen)
    elif kind.startswith("prompt-lookup+"):
        assert drafter.forwards > 0
    else:
        assert drafter.forwards > sum(seen)
    assert drafter.twin().forwards == 0


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_of_several_has_the_forwards_of_its_own_drafter(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    drafter, spy = drafter_and_spy(kind, monkeypatch)
    requests = [Request(prompt_of(length), count) for length, count in ((5, 1), (LONG, COUNT), (9, 12))]
    steps = gather(
        decode_batch(target_of("gemma3_text"), drafter, requests, draft_length=FixedDraftLength(4)), 3
    )
    shares = [each[-1].share for each in steps]
    counts = [share.drafter_forwards for share in shares if share is not None]
    assert sum(counts) == spy.calls
    assert counts[0] == 0
    assert drafter.forwards == 0
    assert (counts[1] > 0) == (kind != "prompt-lookup")
