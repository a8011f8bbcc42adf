"""Foreign engines under our channels: found out, held to it, and gone afterwards."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache

from engine.cache.policy import parse_policy
from engine.decode import decode
from engine.draft_length import FixedDraftLength
from engine.errors import ConfigurationError, GenerationError, ModelError
from engine.external_engines.engine import DraftCounts
from engine.external_engines.loops import open_external_engine
from engine.target.attention import _USERS
from engine.target.loading import load_target
from tests.engine import families, tiny
from tests.engine.external_engines import small
from tests.engine.external_engines.conftest import COUNT, PROMPT
from tests.engine.identity import tokens_of

CHANNELS = (
    "native",
    "full-kv",
    "sliding-bounded:2,4",
    "sink-window:2,6",
    "rotated:4,32",
    "affine:8,32@full",
    "lattice:e8,38",
    "lattice-packed:e8,8@all",
)
SOME = ("native", "sink-window:2,6", "rotated:4,32")


def looks(model):
    """All that an engine could leave on a model."""
    body = model.model
    kinds = {type(part) for part in model.modules()}
    return [
        [dict(each) for each in (model, body)],
        [dict(vars(each)) for each in (model, body)],
        list(body.layers),
        {kind: dict(vars(kind)) for kind in kinds},
        mx.default_stream(mx.default_device()),
    ]


def same(left, right):
    return all(
        str(one) == str(other) if index in {0, 1} else one == other
        for index, (one, other) in enumerate(zip(left, right, strict=True))
    )


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("channel", CHANNELS)
def test_mlx_lm_gives_the_tokens_of_our_own_loop_under_every_channel(target, ours, channel):
    policy, caches = parse_policy(channel), []
    external = open_external_engine("mlx-lm", target)
    assert external.strategy == "keyword"
    counts = DraftCounts()
    assert list(external.generate(PROMPT, COUNT, policy, caches=caches, counts=counts)) == ours(channel)
    assert counts.acceptance_length is None
    assert [type(cache) for cache in caches] == [
        type(cache) for cache in policy.new_caches(target.target.model, 1)
    ]
    assert not _USERS


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("channel", CHANNELS)
def test_a_loop_that_trims_does_so_on_our_caches(target, ours, rough, channel):
    """mlx-lm's own on rotating caches stays silently wrong past the window."""
    external = open_external_engine("mlx-lm-speculative", target, rough, block=4)
    assert external.strategy == "keyword"
    assert list(external.generate(PROMPT, COUNT, parse_policy(channel))) == ours(channel)


def test_an_engine_that_drafts_tells_its_rounds_and_accepted_drafts(target, folder, rough):
    for drafter, always in ((folder, True), (rough, False)):
        counts, tokens = DraftCounts(), []
        for token in open_external_engine("mlx-lm-speculative", target, drafter, block=4).generate(
            PROMPT, 12, counts=counts
        ):
            tokens.append(token)
            assert counts.rounds + counts.accepted >= len(tokens) >= counts.accepted
        assert (
            counts.rounds + counts.accepted == 12
        )  # each round gives its accepted drafts and one token more
        assert (counts.accepted == 9) == always
        assert counts.acceptance_length == 12 / counts.rounds


@pytest.mark.slow
def test_the_rough_draft_model_is_right_now_and_then(target, rough, ours):
    small_model = load_target(rough).target.model
    steps = list(
        speculative_generate_step(
            mx.array(ours("native")[:4]), target.target.model, small_model, max_tokens=20
        )
    )
    assert 0 < sum(drafted for *_, drafted in steps) < 12


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("family", ["gemma4_text", "llama", "gpt_oss"])
def test_other_families_too(tmp_path, family):
    families.save(tmp_path / "target", family)
    target = load_target(tmp_path / "target")
    other = tiny.save_target(tmp_path / "other", "llama")
    policy = parse_policy("sink-window:2,6")
    steps = decode(
        target.target, None, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(1), policy=policy
    )
    truth = tokens_of(list(steps))
    for name, drafter in (("mlx-lm", None), ("mlx-lm-speculative", other)):
        external = open_external_engine(name, target, drafter)
        assert list(external.generate(PROMPT, COUNT, policy)) == truth
        shared = len(policy.new_caches(target.target.model, 1)) < target.target.layer_count
        assert external.strategy == ("instance" if shared and drafter else "keyword")


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("kind", "keyword", "strategy"),
    [
        (small.Loop, "kv", "keyword"),
        (small.Asking, None, "instance"),
        (small.Named, None, "attribute"),
        (small.Inline, None, "native"),
        (small.Cheating, "kv", "native"),
        (small.Twice, None, "native"),
    ],
)
def test_the_way_is_found_by_counting(target, ours, kind, keyword, strategy):
    before, maker = looks(target.target.model), small.make_caches
    external = small.opened(target, kind, keyword)
    assert external.strategy == strategy
    tried = external._loop.__self__.runs
    for channel in SOME:
        policy = parse_policy(channel)
        if strategy == "native" and channel != "native":
            with pytest.raises(ConfigurationError, match="it has no hook and keeps its own caches"):
                external.generate(PROMPT, COUNT, policy)
        else:
            assert list(external.generate(PROMPT, COUNT, policy)) == ours(channel)
    assert external._loop.__self__.runs == tried + (
        1 if strategy == "native" else 5
    )  # two trials of channels, once each
    assert same(looks(target.target.model), before)
    assert small.make_caches is maker


@pytest.mark.slow
def test_why_a_way_was_not_taken_is_said(target):
    external = small.opened(target, small.Cheating, "kv")
    assert "keyword: engine Cheating, strategy keyword, policy native did not use the caches" in external.why
    assert "layer 0 received 0 of at least 6 positions" in external.why


@pytest.mark.slow
def test_an_engine_that_leaves_its_caches_later_is_found_out_before_the_next_token(target, ours):
    external = small.opened(target, small.Moving, "kv")
    assert external.strategy == "keyword"
    steps = external.generate(PROMPT, COUNT, parse_policy("sink-window:2,6"))
    given = list(islice(steps, small.Moving.after))
    assert given == ours("sink-window:2,6")[: small.Moving.after]
    with pytest.raises(GenerationError, match=r"Moving, .*, policy sink-window.* did not use the caches"):
        next(steps)


@pytest.mark.slow
@pytest.mark.parametrize("channel", SOME)
def test_all_is_undone_when_the_engine_breaks_down(target, channel):
    before = looks(target.target.model)
    external = small.opened(target, small.Failing)
    steps = external.generate(PROMPT, COUNT, parse_policy(channel))
    with pytest.raises(GenerationError, match=r"engine Failing, strategy instance, policy .*: out of luck"):
        list(steps)
    assert same(looks(target.target.model), before)
    assert not _USERS


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_is_undone_when_a_caller_leaves_midway(target, ours, count):
    before = looks(target.target.model)
    external = small.opened(target, small.Hooking)
    steps = external.generate(PROMPT, COUNT, parse_policy("rotated:4,32"))
    assert [next(steps) for _ in range(count)] == ours("rotated:4,32")[:count]
    steps.close()
    assert same(looks(target.target.model), before)
    assert not _USERS


@pytest.mark.slow
def test_generations_take_turns_on_one_target(target, ours, rough):
    """Each under its own channel, ours among them; between two tokens the target is as it was."""
    model = target.target.model
    before = looks(model)
    externals = [
        small.opened(target, small.Hooking),
        open_external_engine("mlx-lm", target),
        open_external_engine("mlx-lm-speculative", target, rough),
        small.opened(target, small.Named),
    ]
    channels = ("native", "sink-window:2,6", "rotated:4,32", "lattice:e8,38")
    runs = [
        (channel, external.generate(PROMPT, COUNT, parse_policy(channel)), [])
        for external, channel in zip(externals, channels, strict=True)
    ]
    runs.append(("native", externals[0].generate(PROMPT, COUNT), []))
    own = decode(target.target, None, PROMPT, max_tokens=COUNT, draft_length=FixedDraftLength(1))
    ours_again = []
    for _ in range(COUNT):
        for _, steps, tokens in runs:
            tokens.append(next(steps))
            assert same(looks(model), before) or _USERS  # coded attention stays for the whole generation
        ours_again += next(own).tokens
    for channel, steps, tokens in runs:
        assert tokens == ours(channel)
        assert next(steps, None) is None
    assert ours_again == ours("native")
    assert same(looks(model), before)


@pytest.mark.slow
def test_recurrent_layers_leave_an_engine_that_trims_its_own_caches(tmp_path):
    families.save(tmp_path / "target", "qwen3_5")
    target = load_target(tmp_path / "target")
    external = small.opened(target, small.Asking, drafts=True)
    assert external.strategy == "native"
    assert "by trimming, which a ArraysCache cannot do" in external.why
    given: list[KVCache] = ["left"]
    assert len(list(external.generate(PROMPT, 4, caches=given))) == 4
    assert not given
    with pytest.raises(ConfigurationError, match="it has no hook and keeps its own caches"):
        external.generate(PROMPT, 4, parse_policy("sink-window:2,6"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "message"),
    [
        ("restored:exact:2,6", "restored by our own prefill"),
        ("lattice:e8,38@99", "layer 99 is no attention layer"),
    ],
)
def test_channels_that_do_not_work_are_refused_up_front(target, channel, message):
    external = small.opened(target, small.Asking)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=message):
            external.generate(PROMPT, 4, parse_policy(channel))


@pytest.mark.slow
def test_an_engine_that_attends_by_itself_gets_no_codes(target):
    external = small.opened(target, small.Asking, attends=True)
    with pytest.raises(ConfigurationError, match="it attends by itself"):
        external.generate(PROMPT, 4, parse_policy("rotated:4,32"))
    assert len(list(external.generate(PROMPT, 4, parse_policy("lattice:e8,38")))) == 4


@pytest.mark.slow
def test_what_cannot_be_opened_says_why(target, rough, tmp_path):
    for arguments, message in (
        (("vllm", target), "engine 'vllm' is none of mlx-lm, mlx-lm-speculative, dflash, dflash-mlx"),
        (("mlx-lm", target, rough), "has no drafter"),
        (("mlx-lm", target, None, 8), "cannot verify 8 tokens at a time"),
        (("mlx-lm-speculative", target), "needs a drafter's folder"),
        (("mlx-lm-speculative", target, rough, 1), "cannot verify 1 tokens at a time"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            open_external_engine(*arguments)
    with pytest.raises(ModelError, match="vocabulary"):
        open_external_engine(
            "mlx-lm-speculative", target, tiny.save_target(tmp_path / "other", vocab_size=320)
        )
    with pytest.raises(ModelError):
        open_external_engine("mlx-lm-speculative", target, tmp_path / "none")


@pytest.mark.slow
def test_an_engine_that_is_not_installed_says_what_installs_it(target, rough, monkeypatch):
    monkeypatch.setattr("engine.external_engines.loops.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"dflash is not installed here; run: pip install --no-deps"):
        open_external_engine("dflash", target, rough)


@pytest.mark.slow
def test_an_engine_that_cannot_decode_at_all_is_refused(target):
    class Broken(small.Loop):
        def run(self, *_, **__):
            raise RuntimeError("no kernels")
            yield

    with pytest.raises(ConfigurationError, match=r"Broken does not decode with this target: .*no kernels"):
        small.opened(target, Broken)
