"""Every kind of drafter with random weights, made for whatever target is given.

A random drafter is nearly always wrong, and a model that drafts for itself always right. `Helped` makes some
drafts true and others wrong, so that rounds are confirmed in part while the drafter's own memory is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.qwen3 import ModelArgs

from engine.drafters.autoregressive import Autoregressive
from engine.drafters.base import Draft, Drafter, NetworkDrafter
from engine.drafters.block import BlockDrafter
from engine.drafters.masked_diffusion import MaskedDiffusion
from engine.drafters.mtp import MTPDrafter
from engine.drafters.prompt_lookup import PromptLookup
from engine.drafters.with_lookup import WithLookup
from engine.networks.dflash2 import build_network
from engine.networks.dflash_config import DFlashConfig
from engine.networks.mdlm import MaskedDiffusionModel
from engine.networks.mtp import build_head
from engine.sampling import Sampler
from engine.target.model import Target
from tests.engine import tiny

SECOND = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}


def block_drafter(
    target: Target, second: bool = False, hidden_states: tuple[int, ...] = (), seed: int = 7
) -> BlockDrafter:
    """A DFlash or, if ``second``, DFlash 2 drafter of a target with `tiny`'s width and vocabulary.

    Args:
        target: what it is bound to.
        second: DFlash 2.
        hidden_states: target layers it reads; first, middle and last if not given.
        seed: of its weights.
    """
    layers = target.layer_count
    nested: dict[str, Any] = {
        "mask_token_id": tiny.MASK,
        "target_layer_ids": list(hidden_states or (0, layers // 2, layers - 1)),
    }
    changes: dict[str, Any] = {"num_target_layers": layers, "dflash_config": nested}
    if second:
        changes["architectures"] = ["DFlash2DraftModel"]
        nested |= SECOND
    mx.random.seed(seed)
    network = build_network(DFlashConfig.from_dict(tiny.drafter_config(**changes)))
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    return BlockDrafter(network)


def mtp_drafter(config: dict[str, Any] = tiny.GEMMA, seed: int = 7) -> MTPDrafter:
    """A next-token head of the family of ``config``, for targets with `tiny`'s width."""
    mx.random.seed(seed)
    network, _ = build_head(config)
    network.update(tree_map(lambda w: 2 * w if w.ndim > 1 else w, network.parameters()))
    return MTPDrafter(network)


@cache
def small_model() -> Target:
    """A model of one layer with the vocabulary of `tiny`."""
    return Target(tiny.build("llama", seed=8, num_hidden_layers=1))


@cache
def diffusion_model() -> MaskedDiffusionModel:
    """A masked diffusion model with the vocabulary of `tiny`."""
    mx.random.seed(1)
    model = MaskedDiffusionModel(ModelArgs.from_dict(tiny.FAMILIES["qwen3"][1]))
    model.eval()
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters()))
    return model


KINDS: dict[str, Callable[[Target], Drafter]] = {
    "dflash": block_drafter,
    "dflash2": lambda target: block_drafter(target, second=True),
    "prompt-lookup": lambda _: PromptLookup(1),
    "autoregressive": lambda _: Autoregressive(small_model()),
    "autoregressive-itself": lambda target: Autoregressive(Target(target.model)),
    "masked-diffusion": lambda _: MaskedDiffusion(diffusion_model(), tiny.MASK, steps=2),
    "mtp": lambda _: mtp_drafter(),
    "prompt-lookup+dflash": lambda target: WithLookup(block_drafter(target)),
    "prompt-lookup+autoregressive": lambda _: WithLookup(Autoregressive(small_model())),
}


def make(kind: str, target: Target) -> Drafter:
    """A drafter of a kind, bound to the target."""
    drafter = KINDS[kind](target)
    drafter.bind(target)
    return drafter


class Helped(NetworkDrafter):
    """A drafter whose drafts are each made true with a given chance, and wrong otherwise."""

    def __init__(self, drafter: Drafter, text: Sequence[int], right: float, seed: int = 0) -> None:
        """Help ``drafter`` with ``text``, the prompt and its continuation."""
        self._drafter, self._text, self._right = drafter, list(text), right
        self._random = tiny.seeded(seed)
        self._seen = 0
        self.name, self.target_layers = drafter.name, drafter.target_layers
        self.block_size = drafter.block_size

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    @property
    def forwards(self) -> int:
        return self._drafter.forwards

    def bind(self, target: Target) -> None:
        self._drafter.bind(target)

    def twin(self) -> Helped:
        raise NotImplementedError("help is for one text only")

    def start(self) -> None:
        self._drafter.start()
        self._seen = 0

    def observe(self, tokens: Sequence[int], hidden_states: mx.array | None) -> None:
        assert (hidden_states is None) == (not self.target_layers)
        self._drafter.observe(tokens, hidden_states)
        self._seen += len(tokens)

    def rewind(self, count: int) -> bool:
        done = self._drafter.rewind(count)
        self._seen -= count if done else 0
        return done

    def propose(self, bonus: int, count: int, sampler: Sampler | None = None) -> Draft:
        draft = self._drafter.propose(bonus, count, sampler)
        truth = self._text[self._seen + 1 : self._seen + 1 + len(draft)]
        helped = mx.array([self._random.random() < self._right for _ in truth], mx.bool_)
        true, own = mx.array(truth, mx.int32), draft.tokens[: len(truth)]
        wrong = mx.where(own == true, (true + 1) % tiny.VOCAB, own)
        known = mx.where(helped, true, wrong)
        return Draft(mx.concatenate([known, draft.tokens[len(truth) :]]), draft.q)
