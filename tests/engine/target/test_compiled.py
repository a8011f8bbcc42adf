"""A compiled forward gives what the plain one gives and leaves the caches as the plain one leaves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models import qwen2
from mlx_lm.models.cache import KVCache

from engine.cache.ring import STEP, SlidingRing
from engine.cache.stats import held
from engine.cache.transaction import new_caches, resident
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.drafters.base import Drafter
from engine.session import Session
from engine.target.compiled import CompiledForward
from engine.target.model import Target
from tests.engine import families, tiny
from tests.engine.cache.invariants import failing
from tests.engine.identity import tokens_of
from tests.engine.random_drafters import block_drafter

SERVED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3", "gemma4_text", "gemma4",
    "gpt_oss",
)  # fmt: skip
UNSERVED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # recurrent states have no stand-in
TOLERANCE = 1e-4  # of the largest value
HEADROOM = 16


def build(family: str) -> Any:
    """A model of the table, or Qwen2, which has no line there."""
    if family != "qwen2":
        return families.build(family)
    mx.random.seed(3)
    model = qwen2.Model(qwen2.ModelArgs.from_dict({"model_type": "qwen2", **tiny.PLAIN}))
    model.eval()
    model.update(tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters()))
    return model


@cache
def target_of(family: str) -> Target:
    return Target(build(family))


def text_of(count: int, seed: int = 0) -> list[int]:
    random = tiny.seeded(seed + 31 * count)
    return [random.randrange(5, tiny.VOCAB) for _ in range(count)]


def seen(member: Any) -> list[mx.array]:
    """What the next query sees of a cache."""
    rows = held(member)
    return [rows.keys, rows.values] if rows else []


def near(ours: mx.array, plain: mx.array, what: str) -> None:
    assert ours.shape == plain.shape, f"{what}: {ours.shape}, not {plain.shape}"
    if plain.size:
        scale = max(1.0, mx.abs(plain).max().item())
        error = mx.abs(ours - plain).max().item() / scale
        assert error <= TOLERANCE, f"{what} differ by {error:.2g} of the largest value"


class Both:
    """Two sessions of one target, one compiled and one not, moved alike and compared at every step."""

    def __init__(
        self,
        target: Target,
        hidden_states: tuple[int, ...] = (0, 2),
        caches: Callable[[], list[Any]] | None = None,
        headroom: int = HEADROOM,
    ) -> None:
        self.text: list[int] = []
        self.sessions = [
            Session(
                target, self._drafter(target, hidden_states), headroom=headroom, caches=own, compiled=compiled
            )
            for own, compiled in zip(
                [caches() if caches else None for _ in range(2)], (True, False), strict=True
            )
        ]
        self.headroom, self.target_layers = headroom, hidden_states

    @staticmethod
    def _drafter(target: Target, hidden_states: tuple[int, ...]) -> Drafter | None:
        return block_drafter(target, hidden_states=hidden_states) if hidden_states else None

    def prefill(self, tokens: list[int]) -> None:
        for session in self.sessions:
            session.prefill(tokens)
        self.text += tokens
        self.check_caches()

    def round(self, tokens: list[int], kept: int) -> None:
        """One block of which the first ``kept`` tokens stay."""
        results = []
        for session in self.sessions:
            session.transaction.begin(len(tokens))
            logits, rows = session.forward(mx.array([tokens]))
            mx.eval(logits)
            if kept:
                session.commit(tokens[:kept], rows)
            else:
                session.transaction.abort()
            results.append((logits, rows))
        (logits, rows), (plain_logits, plain_rows) = results
        where = f"a block of {len(tokens)} behind {len(self.text)} positions"
        near(logits, plain_logits, f"logits of {where}")
        assert (rows is None) == (plain_rows is None) == (not self.target_layers)
        if rows is not None and plain_rows is not None:
            near(rows, plain_rows, f"hidden states of {where}")
        self.text += tokens[:kept]
        self.check_caches()

    def check_caches(self) -> None:
        compiled, plain = self.sessions
        for layer, (ours, theirs) in enumerate(zip(compiled.caches, plain.caches, strict=True)):
            assert (type(ours), ours.offset) == (type(theirs), theirs.offset)
            for one, other in zip(seen(ours), seen(theirs), strict=True):
                near(one, other, f"rows of layer {layer} at {ours.offset} positions")

    def walk(self, rounds: int, seed: int = 0) -> None:
        """Rounds of all lengths, of which some tokens, all or none stay."""
        random = tiny.seeded(seed)
        lengths = list(range(1, self.headroom + 1))
        random.shuffle(lengths)
        for turn in range(rounds):
            count = lengths[turn % len(lengths)]
            self.round(text_of(count, turn + seed), random.choice([0, 1, count // 2, count, count]))

    def close(self) -> None:
        for session in self.sessions:
            session.close()


@pytest.fixture
def both() -> Iterator[Callable[..., Both]]:
    """Makes pairs of sessions and closes them."""
    made: list[Both] = []

    def make(*args: Any, **kwargs: Any) -> Both:
        made.append(Both(*args, **kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Counts graphs by the lengths of their blocks, largest buffers and widest masks."""
    counted: Counter[tuple[int, ...]] = Counter()
    real = CompiledForward._trace

    def trace(self: CompiledForward, tokens: mx.array, entries: Any, buffers: Any) -> Any:
        widest = max(mask.shape[1] for *_, mask in entries.values())
        counted[tokens.shape[1], max(keys.shape[2] for keys, _ in buffers), widest] += 1
        return real(self, tokens, entries, buffers)

    monkeypatch.setattr(CompiledForward, "_trace", trace)
    return counted


@pytest.mark.sampled(10, 4)
@pytest.mark.parametrize("family", SERVED)
def test_blocks_of_every_length_with_rollbacks_far_past_the_window(family: str, both: Callable[..., Both]):
    for length in (1, tiny.WINDOW - 1, 40):
        pair = both(target_of(family))
        assert pair.sessions[0]._compiled is not None
        pair.prefill(text_of(length))
        pair.walk(20, seed=length)


@pytest.mark.parametrize("family", UNSERVED)
def test_recurrent_layers_are_not_compiled(family: str):
    with Session(target_of(family), None, headroom=4) as session:
        assert session._compiled is None


def test_quantized_caches_are_not_compiled():
    target = target_of("llama")
    caches = [KVCache().to_quantized(group_size=8 * 4, bits=8) for _ in range(target.layer_count)]
    with Session(target, None, headroom=4, caches=caches) as session:
        assert session._compiled is None


@pytest.mark.sampled(16, 1)
@pytest.mark.parametrize("length", [STEP - 16, STEP - 1, STEP, STEP + 44])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_buffers_grow_past_a_multiple_of_their_step(family: str, length: int, both: Callable[..., Both]):
    pair = both(target_of(family))
    pair.prefill(text_of(length))
    pair.walk(12, seed=length)
    pair.prefill(text_of(512 - len(pair.text) - 5))  # grown by mlx-lm's rule, then by ours
    pair.walk(6, seed=1)


@pytest.mark.sampled(12, 6)
@pytest.mark.parametrize("headroom", [1, 3, 5, 16])
@pytest.mark.parametrize("sink", [1, 4, 11])
def test_pinned_entries_stay_in_sight(sink: int, headroom: int, both: Callable[..., Both]):
    target = target_of("gemma3_text")

    def caches() -> list[Any]:
        return [
            SlidingRing(cache.window, headroom, sink) if isinstance(cache, SlidingRing) else cache
            for cache in new_caches(target.model, headroom)
        ]

    for length in (2, sink + tiny.WINDOW, 40):
        pair = both(target, caches=caches, headroom=headroom)
        pair.prefill(text_of(length))
        pair.walk(16, seed=length)


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4_text"])
def test_a_rewound_or_restarted_session_is_compiled_alike(family: str, both: Callable[..., Both]):
    pair = both(target_of(family))
    pair.prefill(text_of(20))
    pair.walk(5)
    for back in (1, 3, 9, len(pair.text)):
        left = pair.text[: max(len(pair.text) - back, 0)]
        held = {session.resume([*left, 299]) for session in pair.sessions}
        assert len(held) == 1  # a window that cannot go back starts over, in both
        pair.text = left[: held.pop()]
        pair.check_caches()
        pair.prefill(text_of(7, seed=back))
        pair.walk(5, seed=back)


@pytest.mark.slow
def test_sessions_of_one_target_take_turns(both: Callable[..., Both]):
    target = target_of("gemma3_text")
    pairs = [both(target, hidden_states) for hidden_states in ((0, 2), (5,), (), (0, 2))]
    assert (
        len({id(pair.sessions[0]._compiled) for pair in pairs}) == 3
    )  # the same hidden_states share their graphs
    for seed, pair in enumerate(pairs):
        pair.prefill(text_of(5 + 9 * seed, seed))
    for turn in range(10):
        for pair in pairs:
            pair.round(text_of(1 + (3 * turn) % 16, turn), turn % 2)


def test_an_exception_while_tracing_leaves_caches_and_stage_usable(both: Callable[..., Both]):
    target = Target(families.build("gemma4_text"))  # nothing compiled yet
    pair = both(target)
    pair.prefill(text_of(30))
    pair.round(text_of(3), 2)
    for layer in (0, target.layer_count - 1):
        for session in pair.sessions:
            session.transaction.begin(8)
            with pytest.raises(RuntimeError, match="out of memory"), failing(target.model.layers[layer].mlp):
                session.forward(mx.array([text_of(8)]))
            session.transaction.abort()
        pair.check_caches()
    pair.walk(16)
    pair.close()
    assert not any("hidden_state_hooks" in type(layer).__dict__ for layer in target.model.layers)


@pytest.mark.slow
def test_few_graphs_serve_a_long_run(traces: Counter[tuple[int, ...]]):
    target = Target(families.build("gemma3_text"))
    with Session(target, None, headroom=HEADROOM) as session:
        session.prefill(text_of(10))
        random = tiny.seeded(0)
        for _ in range(150):
            count = random.randrange(1, HEADROOM + 1)
            session.transaction.begin(count)
            logits, _ = session.forward(mx.array([text_of(count)]))
            mx.eval(logits)
            session.commit(text_of(count)[: (count + 1) // 2], None)
        length = len(session.tokens)
    assert set(traces.values()) == {1}  # none twice
    assert {count for count, *_ in traces} == {1, 2, 4, 8, 12, 16}
    assert len(traces) <= 6 * 4 * (length + HEADROOM).bit_length()  # four widths for each doubling


@pytest.mark.slow
def test_long_blocks_of_wide_models_are_not_compiled_on_a_cpu(
    traces: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
):
    target, prompt = Target(families.build("gemma3_text")), text_of(20)
    truth = tiny.plain_tokens(target.model, prompt, 60)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr("engine.target.compiled.LARGEST_ON_CPU", 8 * target.hidden_size)
    for block in (4, 8, 12, 16):  # some rounds are compiled, as blocks get shorter at the end
        drafter = tiny.ScriptedDrafter(prompt + truth, 0.2)
        assert (
            tokens_of(
                list(decode(target, drafter, prompt, max_tokens=60, draft_length=FixedDraftLength(block)))
            )
            == truth
        )
    assert max(count for count, *_ in traces) == 8


def test_a_second_sequence_needs_no_new_graph(traces: Counter[tuple[int, ...]]):
    target, prompt = Target(families.build("qwen3")), text_of(20)
    truth = tiny.plain_tokens(target.model, prompt, 40)
    for seed in range(3):
        drafter = tiny.ScriptedDrafter(prompt + truth, 0.3, seed=seed)
        assert (
            tokens_of(list(decode(target, drafter, prompt, max_tokens=40, draft_length=FixedDraftLength(8))))
            == truth
        )
    assert any(count == 8 for count, *_ in traces)
    assert set(traces.values()) == {1}


LONG = 8192


@cache
def long_target() -> Target:
    """Sliding and full layers whose buffers are much larger than everything else of a round."""
    changes = {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2 * LONG}
    return Target(tiny.build("gemma3_text", sliding_window=LONG // 8, **changes))


@pytest.fixture(scope="module")
def long_session() -> Iterator[Session]:
    """Eight windows in, with all graphs made and all buffers at their size."""
    target = long_target()
    caches = new_caches(target.model, HEADROOM)
    for member in caches:
        for _ in range(8):
            rows = mx.random.normal((1, 4, LONG // 8, 64), key=mx.random.key(0))
            member.update_and_fetch(rows, rows)
    with Session(target, None, headroom=HEADROOM, caches=caches) as session:
        for count in (1, 4, 16, 1, 4, 16):
            play(session, count)
        yield session


def play(session: Session, count: int) -> None:
    session.transaction.begin(count)
    logits, _ = session.forward(mx.array([text_of(count)]))
    mx.eval(logits)
    session.commit(text_of(count)[:1], None)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("count", [1, 4, 16])
def test_buffers_are_written_in_place(long_session: Session, count: int):
    largest = max(cache.keys.nbytes for cache in long_session.caches)
    play(long_session, count)
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        play(long_session, count)
    assert mx.get_peak_memory() - before < largest / 2  # not even one buffer twice
    assert mx.get_active_memory() - before < largest / 16


@pytest.mark.slow
def test_sliding_layers_hold_window_and_headroom_at_eight_windows(long_session: Session):
    rings = [cache for cache in long_session.caches if isinstance(cache, SlidingRing)]
    row = 2 * 4 * 64 * 4  # bytes: keys and values, heads, width, float32
    assert [ring.nbytes for ring in rings] == [(LONG // 8 + HEADROOM) * row] * 4
    full = [cache.nbytes for cache in long_session.caches if isinstance(cache, KVCache)]
    assert resident(long_session.caches)[1] == sum(ring.nbytes for ring in rings) + sum(full)
    assert all(LONG * row <= nbytes <= (LONG + 2 * STEP) * row for nbytes in full)


def test_weights_are_those_of_the_first_trace():
    model = families.build("llama")
    target = Target(model)
    with Session(target, None, headroom=4) as session:
        session.prefill(text_of(9))
        play(session, 4)
        nn.quantize(model, families.GROUP, families.BITS)
        session.transaction.begin(4)
        stale, _ = session.forward(mx.array([text_of(4)]))
        session.transaction.abort()
    with Session(Target(model), None, headroom=4) as session:
        session.prefill(text_of(9))
        play(session, 4)
        session.transaction.begin(4)
        fresh, _ = session.forward(mx.array([text_of(4)]))
        session.transaction.abort()
    assert mx.abs(stale - fresh).max().item() > 0.1
