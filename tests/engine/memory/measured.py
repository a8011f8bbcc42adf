"""What caches really hold after a run that was computed, to hold predictions against."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from engine.cache.batch import BatchTransaction, merge
from engine.cache.policy import KVPolicy
from engine.cache.transaction import resident
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Drafter
from engine.memory import RunLengths
from engine.restoration.session import RestorationPlan
from engine.session import Session
from engine.target.model import Target
from tests.engine import families
from tests.engine.batches import prompt_of
from tests.engine.random_drafters import make

HEAD_DIM = 32  # the least that is coded


@cache
def target_of(family: str) -> Target:
    """A random model of the family whose heads can be coded, built once."""
    return Target(families.build(family, head_dim=HEAD_DIM))


def run_alone(target: Target, policy: KVPolicy, run: RunLengths, drafter: Drafter | None = None) -> int:
    """Bytes of a sequence's caches after its prompt and one round.

    Args:
        target: the model.
        policy: which keys and values are kept.
        run: its lengths.
        drafter: for rounds of more than one token; a random DFlash network if not given.
    """
    if run.block > 1 and drafter is None:
        drafter = make("dflash", target)
    with _session(target, policy, run, drafter) as session:
        steps = _steps(session, run)
        next(steps)
        step = next(steps)
        assert step.round is not None
        assert step.round.block == run.block
        return resident(session.caches)[1]


def run_together(target: Target, policy: KVPolicy, run: RunLengths) -> int:
    """Bytes of the merged caches of several sequences after their prompts and one round."""
    sequences: list[list[Any]] = []
    for _ in range(run.batch):
        with _session(target, policy, run, None) as session:
            step = next(iter(_steps(session, run)))
            assert step.round is None
            sequences.append(session.caches)
    transaction = BatchTransaction(target.model, merge(target.model, sequences))
    transaction.begin(run.block)
    with _session(target, policy, run, None):  # so that attention reads codes
        logits, _ = target.forward(mx.zeros((run.batch, run.block), mx.int32), transaction.caches, None)
    mx.eval(logits, [cache.state for cache in transaction.caches])
    transaction.commit([run.block] * run.batch)
    transaction.close()
    return resident(transaction.caches)[1]


def _session(target: Target, policy: KVPolicy, run: RunLengths, drafter: Drafter | None) -> Session:
    plan = None
    if policy.source is not None:
        plan = RestorationPlan(policy.source, policy.sink, policy.window)
    return Session(target, drafter, headroom=run.headroom, policy=policy, restoration=plan)


def _steps(session: Session, run: RunLengths) -> Any:
    return decode(
        session.target,
        session.drafter,
        prompt_of(run.context),
        max_tokens=1 + run.block if session.drafter else 2,
        draft_length=FixedDraftLength(run.block if session.drafter else 1),
        prefill_chunk=run.prefill_chunk,
        session=session,
    )
