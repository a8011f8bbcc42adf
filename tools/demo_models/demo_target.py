"""The demo target: a small stock `gemma3_text` model trained to write programs, chat and retrieve.

Covers its configuration, initial weights, curriculum and loss; the loop is in `trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tools.demo_models.corpora.batches import Mixture, batch
from tools.demo_models.corpora.document import ANSWER
from tools.demo_models.fastops import cross_entropy
from tools.demo_models.target_forward import forward
from tools.demo_models.tokenizer import BOS, END, EOS, PAD, VOCABULARY, DemoTokenizer
from tools.demo_models.trainer import named_parameters


def configuration(layers: int = 9, hidden: int = 128) -> dict[str, Any]:
    """The `config.json` of the target: sliding window 32, every third layer full, 4 heads and 2 KV heads."""
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
        "max_position_embeddings": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END],
        "pad_token_id": PAD,
    }


def build(config: dict[str, Any]) -> Any:
    """A stock mlx-lm model with a tied head and its default weights."""
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    model: Any = Model(ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    model.sanitize({})  # without a separate head in the weights, mlx-lm ties it
    return model


def initialise(model: Any, seed: int) -> None:
    """Seeded weights: variance 1 / inputs for matrices, 1 / hidden for embeddings, norms 0 (Gemma adds 1)."""
    mx.random.seed(seed)
    weights = []
    for name, value in named_parameters(model).items():
        if "norm" in name:
            weights.append((name, mx.zeros_like(value)))
        else:
            weights.append((name, mx.random.normal(value.shape) * value.shape[1] ** -0.5))
    model.load_weights(weights)


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one sequence length."""

    steps: int
    length: int
    rows: int
    mixture: Mixture = field(default_factory=Mixture)


# Copying digits must be learned early: while they look random, the tied head draws the ten digit embeddings
# together (cosine 0.86 after 500 steps of the plain mixture), and then they can no longer be told apart.
# Hence short, retrieval-heavy rows first.
CURRICULUM = (
    Phase(250, 64, 48, Mixture(retrieval=0.75, code=0.15)),
    Phase(250, 128, 32, Mixture(retrieval=0.55, code=0.32)),
    Phase(300, 256, 16),
    Phase(2000, 512, 8),
    Phase(150, 640, 6),
)
TINY_CURRICULUM = (Phase(4, 64, 4), Phase(4, 128, 4))


@dataclass
class TargetTask:
    """The target's loss and batches, for `trainer.fit`."""

    model: Any
    tokenizer: DemoTokenizer
    seed: int = 0
    curriculum: tuple[Phase, ...] = CURRICULUM
    figures: tuple[str, ...] = ("answer_accuracy", "text_accuracy", "text_loss")

    def phase(self, step: int) -> Phase:
        """The phase of a step; steps past the curriculum stay in its last phase."""
        for phase in self.curriculum:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.curriculum[-1]

    def variant(self, step: int) -> int:
        """The sequence length: each has its own shapes."""
        return self.phase(step).length

    def batch(self, step: int) -> tuple[mx.array, ...]:
        """Tokens [rows, length + 1] and weights [rows, length]."""
        phase = self.phase(step)
        tokens, weights = batch(
            self.tokenizer, phase.mixture, seed=self.seed, step=step, rows=phase.rows, length=phase.length
        )
        return mx.array(tokens), mx.array(weights)

    def loss(self, _variant: int, *arrays: mx.array) -> tuple[mx.array, ...]:
        """Weighted next-token loss; accuracy on answer digits and on text; loss on text (weight 1)."""
        tokens, weights = arrays
        labels = tokens[:, 1:]
        logits, _ = forward(self.model, tokens[:, :-1])
        losses = cross_entropy(logits, labels)
        right = (mx.argmax(logits, axis=-1) == labels).astype(mx.float32)
        answer = (weights == ANSWER).astype(mx.float32)
        text = (weights == 1.0).astype(mx.float32)
        return (
            (losses * weights).sum() / weights.sum(),
            (right * answer).sum() / mx.maximum(answer.sum(), 1),
            (right * text).sum() / mx.maximum(text.sum(), 1),
            (losses * text).sum() / mx.maximum(text.sum(), 1),
        )


def curriculum_steps(curriculum: tuple[Phase, ...] = CURRICULUM) -> int:
    """Steps of the whole curriculum."""
    return sum(phase.steps for phase in curriculum)
