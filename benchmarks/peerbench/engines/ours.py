"""This project's engine.

At a fixed block it drafts with the DFlash drafter alone, as the peers do. With `auto` it runs as it does for
the shipped pair when nothing is said: it chooses the length of each block, and looks drafts up in the text
where these fare better than the drafter's. Scripted drafts always cost the drafter's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from engine.decode import Diagnosis, decode
from engine.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from engine.drafters.base import Draft, Drafter, NetworkDrafter
from engine.drafters.with_lookup import WithLookup
from engine.evaluation.calibration import Calibration
from engine.sampling import Sampler
from engine.target.loading import load_drafter
from engine.target.model import Target
from peerbench.engines.base import AUTO, Arm, Batch, World
from peerbench.script import Script

WARM_UPS = 4


class Kakeya:
    """Our loop."""

    def __init__(self, world: World) -> None:
        self._target = world.target.target
        self._drafter = load_drafter(world.folders.drafter, self._target).drafter

    def arm(self, block: int | str) -> Arm:
        """See `Engine.arm`."""
        draft_length = (
            AdaptiveDraftLength(self._drafter.block_size) if block == AUTO else FixedDraftLength(int(block))
        )
        return KakeyaArm(self._target, self._drafter, draft_length)


class KakeyaArm:
    """Our loop at one draft length, which learns from run to run."""

    def __init__(self, target: Target, drafter: Drafter, draft_length: DraftLength) -> None:
        self._target, self._drafter, self._pace = target, drafter, draft_length

    def warm_up(self, prompts: Sequence[Sequence[int]], max_tokens: int, script: Script | None) -> None:
        """Run once; an adaptive draft length tries every block, as before the engine's own measurements."""
        calibration = Calibration(self._pace) if isinstance(self._pace, AdaptiveDraftLength) else None
        for prompt in prompts[:WARM_UPS]:
            for _ in self._decode(prompt, max_tokens, script, calibration or self._pace):
                pass
            if calibration is None or calibration.finished:
                break

    def run(self, prompt: Sequence[int], max_tokens: int, script: Script | None) -> Iterator[Batch]:
        """See `Arm.run`."""
        return self._decode(prompt, max_tokens, script, self._pace)

    def _decode(
        self, prompt: Sequence[int], max_tokens: int, script: Script | None, draft_length: DraftLength
    ) -> Iterator[Batch]:
        drafter: Drafter = self._drafter
        if script is not None:
            drafter = Scripted(drafter, script)
        elif isinstance(self._pace, AdaptiveDraftLength):
            drafter = WithLookup(drafter)
        stages = Diagnosis(stage_times=True)
        for step in decode(
            self._target, drafter, prompt, max_tokens=max_tokens, draft_length=draft_length, diagnosis=stages
        ):
            yield Batch(step.tokens, step.round)


class Scripted(NetworkDrafter):
    """A drafter's own drafting, the values replaced by the script's."""

    def __init__(self, drafter: Drafter, script: Script) -> None:
        self._drafter, self._script = drafter, script
        self.name, self.target_layers, self.block_size = (
            drafter.name,
            drafter.target_layers,
            drafter.block_size,
        )

    @property
    def nbytes(self) -> int:
        """See `Drafter.nbytes`."""
        return self._drafter.nbytes

    @property
    def forwards(self) -> int:
        """See `Drafter.forwards`."""
        return self._drafter.forwards

    def bind(self, target: Target) -> None:
        """See `Drafter.bind`."""
        self._drafter.bind(target)

    def start(self) -> None:
        """See `Drafter.start`."""
        self._script.start()
        self._drafter.start()

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        """See `Drafter.observe`."""
        self._script.saw(len(tokens))
        self._drafter.observe(tokens, hidden_states)

    def rewind(self, count: int) -> bool:  # noqa: ARG002 - the protocol's
        """See `Drafter.rewind`: no sequence is resumed here."""
        return False

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        """See `Drafter.propose`."""
        draft = self._drafter.propose(bonus, count, sampler)
        return replace(draft, tokens=self._script.say(draft.tokens))
