"""A masked diffusion language model as drafter: masks after the text, filled in the order of confidence.

    block = [mask] · n
    for each of `steps` forwards over context + block, every row seeing every row:
        guess all that is still masked; fill in the guesses that are surest; never mask them again

The drafts are chosen, not drawn, also when sampling: rejection needs the probability of each draft given
those *before* it. Nothing is kept between rounds, as a filled token changes what every row sees; the network
sees the last ``context`` tokens only. The folder's config.json may say how many masks, forwards and tokens of
context (``draft_block_size``, ``draft_steps``, ``draft_context``); the spec overrules it:
``masked-diffusion:FOLDER?steps=2``.
"""

import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from sys import getsizeof
from typing import Any, Self

import mlx.core as mx

from engine.drafters.base import Draft, TextDrafter, refuse_mismatch
from engine.errors import ConfigurationError, DrafterMismatchError, ModelError
from engine.networks.mdlm import MaskedDiffusionModel
from engine.sampling import Sampler
from engine.target.model import Target

# What the spec calls a setting → what it is called here, its least and its largest value.
SETTINGS = {"block": ("block_size", 2, 512), "steps": ("steps", 1, 512), "context": ("context", 1, 1_000_000)}


class MaskedDiffusion(TextDrafter):
    """Drafts a block by unmasking it in a few bidirectional forwards."""

    name = "masked-diffusion"
    _tokens: "array[int]"

    def __init__(
        self,
        network: MaskedDiffusionModel,
        mask_token_id: int,
        *,
        block_size: int = 8,
        steps: int = 2,
        context: int = 256,
    ) -> None:
        """Fill a block in ``steps`` forwards over ``context`` tokens, the bonus included like in a block."""
        if block_size < 2 or steps < 1 or context < 1:
            raise ConfigurationError(
                f"block_size {block_size}, steps {steps} and context {context} of a masked-diffusion drafter "
                "must be at least 2, 1 and 1"
            )
        self.network, self.mask_token_id = network, mask_token_id
        self.block_size, self.steps, self.context = block_size, steps, context
        self.forwards = 0
        self.start()

    def bind(self, target: Target) -> None:
        size = self.network.args.vocab_size
        refuse_mismatch("vocabulary", size, target.vocab_size)
        if not 0 <= self.mask_token_id < size:
            raise DrafterMismatchError(
                f"this drafter cannot be used: its mask is token {self.mask_token_id}, its vocabulary {size}"
            )

    def twin(self) -> Self:
        sizes = {"block_size": self.block_size, "steps": self.steps, "context": self.context}
        return type(self)(self.network, self.mask_token_id, **sizes)

    def draft_forwards(self, count: int) -> int:
        return min(self.steps, count)

    def start(self) -> None:
        self._tokens = array("i")

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:  # noqa: ARG002
        text = [*self._tokens[max(0, len(self._tokens) + 1 - self.context) :], bonus]
        return Draft(self._fill(mx.array(text, mx.int32), count))

    def _fill(self, text: mx.array, count: int) -> mx.array:
        """Tokens [count] behind the text [C]; one graph, no synchronisation."""
        block = mx.full((count,), self.mask_token_id, mx.int32)
        masked = mx.arange(count)  # places in the block, ascending
        steps = min(self.steps, count)
        for step in range(steps):  # as equal as can be, the earlier steps the larger
            filled = count // steps + (step < count % steps)
            canvas = mx.concatenate([text, block])[None]
            self.forwards += 1
            logits = self.network(canvas, text.shape[0] + masked).astype(mx.float32)  # [M, V]
            logits = mx.where(mx.arange(logits.shape[-1]) == self.mask_token_id, -mx.inf, logits)
            confidence = mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1)  # log-probability of …
            guesses = mx.argmax(logits, axis=-1).astype(mx.int32)  # … the likeliest token, [M]
            order = mx.argsort(-confidence)
            surest = order[:filled]
            block = mx.put_along_axis(block, masked[surest], guesses[surest], axis=0)
            masked = mx.sort(masked[order[filled:]])
        return block

    @property
    def nbytes(self) -> int:
        return getsizeof(self._tokens)


def split_spec(argument: str) -> tuple[Path, dict[str, int]]:
    """Folder and settings of ``FOLDER`` or ``FOLDER?NAME=NUMBER,…``; a folder of that name comes first."""
    folder, mark, text = argument.rpartition("?")
    if not mark or Path(argument).exists():
        return Path(argument), {}
    found: dict[str, int] = {}
    for part in text.split(","):
        word, _, number = part.partition("=")
        name, least, largest = SETTINGS.get(word, ("", 1, 0))
        if name in found or not re.fullmatch("[0-9]{1,9}", number) or not least <= int(number) <= largest:
            forms = ", ".join(f"{known}={low} to {high}" for known, (_, low, high) in SETTINGS.items())
            raise ConfigurationError(
                f"--drafter masked-diffusion:{argument}: {part!r} cannot be set; "
                f"give each of {forms} at most once, with commas between them"
            )
        found[name] = int(number)
    return Path(folder), found


def settings_of(path: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """The settings that a ``config.json`` at ``path`` names, each ``draft_`` and its name here."""
    found: dict[str, int] = {}
    for name, least, largest in SETTINGS.values():
        if (value := config.get(f"draft_{name}")) is None:
            continue
        if type(value) is not int or not least <= value <= largest:
            raise ModelError(
                f"{path}: draft_{name} must be a number from {least} to {largest}, not {value!r}"
            )
        found[name] = value
    return found
