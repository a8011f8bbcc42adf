"""The server against plain decoding: a good one is accepted, a fault is found by the check it belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.evidence.gate import judge
from engine.device import prepare
from engine.errors import ConfigurationError, PromptError
from engine.evaluation import server as evaluation
from engine.evaluation import server_checks
from engine.evaluation.prompts import Prompt, load_prompts
from engine.evaluation.server import ChecksFailed, Offer, ServerSwitches, measure_server
from engine.evaluation.server_checks import ANSWERS, DOORS, KEEPING, Check, Examinee, examine
from engine.evaluation.server_client import ServerFault, served
from engine.generate import ChatSwitches
from engine.registry import Places, Registry
from engine.server import app, service
from engine.server.prompt_cache import PromptCache
from engine.server.response import ChoiceBuilder, ResponseBuilder
from engine.server.scheduler import Scheduler
from engine.server.serve import model_finder
from engine.server.sessions import LoadedModel
from tests.engine.evaluation.test_measurements import REQUEST, check, quiet
from tests.engine.evaluation.test_prompts import write

pytestmark = pytest.mark.slow

FIND = model_finder(Places.of_machine(), download=False)
SMALL = {"max_tokens": 16, "clients": 3}


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    rows = [{"id": f"code-{i}", "kind": "code", "prompt": f"def f{i}(x):\n" * 3} for i in range(3)]
    chat = {"id": "chat-1", "kind": "chat", "messages": [{"role": "user", "content": "hi"}]}
    return load_prompts(str(write(tmp_path / "p.jsonl", *rows, chat)))


@pytest.fixture
def offered(folders: tuple[Path, Path]) -> Callable[..., Offer]:
    """An offer of the tiny pair."""

    def make(drafter: str = str(folders[1]), **changes: Any) -> Offer:
        return Offer.of(Registry.single(folders[0], drafter, **changes))

    return make


def measured(offer: Offer, prompts: list[Prompt], **changes: Any) -> dict[str, Any]:
    switches = ServerSwitches(**{"prompts": "own.jsonl", **SMALL, **changes})
    return check(measure_server(offer, FIND, prompts, switches, prepare(), progress=quiet, request=REQUEST))


def judged(document: dict[str, Any]) -> set[str]:
    """The rules it breaks."""
    return {violation.code for violation in judge(json.dumps(document).encode()).violations}


def test_good_server_passes_and_claims_plain_decodings_output(
    offered: Callable[..., Offer], prompts: list[Prompt]
):
    document = measured(offered(), prompts)
    assert document["kind"] == "quality"
    assert document["claims"] == [{"name": "identical_output", "arm": "server", "baseline": "plain"}]
    assert [(arm["name"], arm["role"]) for arm in document["arms"]] == [
        ("plain", "baseline"),
        ("server", "sut"),
    ]
    plain, ours = document["arms"]
    assert [row["tokens"] for row in ours["samples"]] == [row["tokens"] for row in plain["samples"]]
    assert [arm for arm, _ in document["order"]] == ["plain", "server", "server", "plain"] * 2
    assert ours["system"]["loop"] == "kakeya.decode"
    assert ours["system"]["drafter"] == "dflash"
    assert document["liveness"]["drafter_forwards"] > 0
    settings = document["configuration"]
    assert settings["checks"].split() == [*DOORS, *ANSWERS, *KEEPING]
    assert (settings["checks_failed"], settings["transport"], settings["clients"]) == (0, "tcp", 3)
    assert judged(document) == set()

    row = ours["samples"][1]
    row["tokens"][5] = (row["tokens"][5] + 1) % 300
    assert "OUTPUT_DIVERGED" in judged(document), "a wrong token in a row that came over HTTP"


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize(
    ("of_offer", "changes"),
    [
        ({"channel": "sink-window-256"}, {"block": "4"}),
        ({"channel": "affine8"}, {"transport": "unix"}),
        ({"drafter": "none"}, {"chat": ChatSwitches(chat=True)}),
        ({}, {"block": "1"}),
        ({"channel": "lattice:e8,10"}, {}),
    ],
    ids=["window", "codes-over-a-unix-socket", "no-drafter-as-conversations", "plain-steps", "spelled-out"],
)
def test_output_of_a_lossy_channel_is_recorded_not_claimed(
    tmp_path: Path,
    prompts: list[Prompt],
    offered: Callable[..., Offer],
    of_offer: dict[str, Any],
    changes: dict[str, Any],
):
    if of_offer.get("channel") in ("affine8", "lattice:e8,10"):  # the tiny pair can use neither
        offer = Offer.of(Registry.load(), "demo", of_offer["channel"])
    else:
        offer = offered(**of_offer)
    document = measured(offer, prompts, **changes)
    native = document["configuration"]["kv"] == "native"
    assert [claim["name"] for claim in document["claims"]] == ["identical_output"] * native
    assert document["arms"][1]["system"]["kv"] == offer.channel.policy.spec
    assert document["configuration"]["model_id"] == offer.model_id
    wider = of_offer.get("channel") == "sink-window-256"  # than every context here
    assert judged(document) == ({"POLICY_NO_EFFECT"} if wider else set())


def test_the_doors_of_a_server_are_checked(offered: Callable[..., Offer], prompts: list[Prompt]):
    with examined(offered(), prompts) as server:
        assert examine(server, DOORS, lambda name: None) == dict.fromkeys(DOORS)


class examined:
    """A running server and what it is asked, made as `measure_server` makes both."""

    def __init__(self, offer: Offer, prompts: list[Prompt], *, keeping: bool = False) -> None:
        self._offer, self._prompts = offer, prompts
        self._switches = ServerSwitches(**SMALL)
        self._serving = self._switches.keeping if keeping else self._switches.serving

    def __enter__(self) -> Examinee:
        models: list[LoadedModel] = []

        def find(entry: Any) -> Callable[[], LoadedModel]:
            models.append(FIND(entry)())
            return lambda: models[-1]

        self._served = served(self._offer.registry, self._serving, find)
        client = self._served.__enter__()
        try:
            [model] = models
            engine = evaluation.engine_of(model, self._offer.channel, self._switches)
            encoded = evaluation.encode_all(engine, self._prompts, self._switches.chat)
            asked = evaluation.questions(self._offer, model, self._prompts, encoded, self._switches)
            return evaluation.examinee_of(client, self._offer, model, asked, self._switches)
        except BaseException:
            self._served.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        self._served.__exit__(*error)


def wrong(take: Any, position: int) -> Any:
    """ResponseBuilder of a server of whose tokens one is another than was decoded."""

    def spoiled(self: ResponseBuilder, steps: Any) -> Any:
        at, changed = position - len(self.tokens), []
        for step in steps:
            tokens = list(step.tokens)
            if 0 <= at < len(tokens):
                tokens[at] = 7 if tokens[at] != 7 else 8
            at -= len(tokens)
            changed.append(replace(step, tokens=tuple(tokens)))
        return take(self, changed)

    return spoiled


def test_gate_rejects_a_server_with_a_constant_wrong_token(
    offered: Callable[..., Offer], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    """It agrees with itself, and checks ask for less than so many tokens."""
    monkeypatch.setattr(ResponseBuilder, "hear", wrong(ResponseBuilder.hear, 26))
    document = measured(offered(), prompts, max_tokens=30)
    assert document["configuration"]["checks_failed"] == 0
    assert "OUTPUT_DIVERGED" in judged(document)


def unwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "healthy", property(lambda self: False))


def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.app.cards", lambda *_: [])


def open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_is_among", lambda given, keys: True)


def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = Registry.resolve
    monkeypatch.setattr(Registry, "resolve", lambda self, *_: resolve(self, self.default))


def unnamed_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.app._steps", lambda location, body: [])


def lossy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    framed = service._framed

    def lossy(builder: Any, chunks: Any) -> bytes:
        return framed(builder, [chunk for chunk in chunks if chunk.x_kakeya is not None])

    monkeypatch.setattr(service, "_framed", lossy)


def unfinished_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChoiceBuilder, "done", b"")


def mixed_up(monkeypatch: pytest.MonkeyPatch, most: int = 100) -> None:
    begin, left = Scheduler._begin, [most]

    def mixed(self: Scheduler, job: Any) -> Any:
        if self._active and left[0]:
            left[0] -= 1
            job.request = replace(job.request, prompt=job.request.prompt[::-1])
        return begin(self, job)

    monkeypatch.setattr(Scheduler, "_begin", mixed)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptCache, "find", lambda self, key, prompt, empty: None)


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on for a client that has gone."""
    take_turns = Scheduler._take_turns

    def unheard(self: Scheduler) -> None:
        for active in self._active:
            active.job.cancelled.clear()
        take_turns(self)

    monkeypatch.setattr(Scheduler, "_take_turns", unheard)


def hoarding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptCache, "expire", lambda self: None)
    monkeypatch.setattr(server_checks, "PATIENCE_S", 2.5)


def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    kept, add = [], PromptCache.add

    def leak(self: PromptCache, key: Any, snapshot: Any) -> None:
        kept.append(mx.zeros((400_000,)))
        mx.eval(kept[-1])
        add(self, key, snapshot)

    monkeypatch.setattr(PromptCache, "add", leak)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Check], str, str]] = [
    (unwell, DOORS, "health", "/health says 503"),
    (unlisted, DOORS, "models", "does not list target@native"),
    (open_to_all, DOORS, "key", "answered 200, not 401"),
    (any_model, DOORS, "unknown-model", "answered 200, not 404"),
    (unnamed_field, DOORS, "bad-value", "the error is about None, not temperature"),
    (lossy_stream, ANSWERS, "stream", "says something else than the whole answer"),
    (unfinished_stream, ANSWERS, "stream", "without \\[DONE\\]"),
    (mixed_up, ANSWERS, "clients", "is another than alone"),
    (forgetful, KEEPING, "next-turn", "0 tokens were held"),
    (deaf, KEEPING, "gone", "was decoded to its end for no client"),
    (hoarding, KEEPING, "idle", "still not empty"),
    (leaking, KEEPING, "idle", "bytes of memory were not given back"),
]


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize(
    ("spoil", "checks", "name", "message"),
    [
        pytest.param(*row, marks=[] if row[1] is not KEEPING else pytest.mark.slow, id=row[0].__name__)
        for row in FAULTS
    ],
)
def test_a_fault_is_found_by_the_check_it_belongs_to(
    offered: Callable[..., Offer],
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    checks: dict[str, Check],
    name: str,
    message: str,
):
    with examined(offered(), prompts, keeping=checks is KEEPING) as server:
        spoil(monkeypatch)
        found = examine(server, {name: checks[name]}, lambda name: None)
        monkeypatch.undo()
    with pytest.raises(ServerFault, match=message):
        raise ServerFault(found[name] or "nothing was found")


def test_an_answer_that_rounding_in_a_batch_may_have_chosen_is_no_fault(
    offered: Callable[..., Offer], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    with examined(offered(), prompts) as server:
        mixed_up(monkeypatch, most=1)
        monkeypatch.setitem(server_checks.PARITY_LIMITS, "float32", 100.0)
        assert examine(server, {"clients": ANSWERS["clients"]}, lambda name: None) == {"clients": None}
        monkeypatch.undo()
        mixed_up(monkeypatch, most=1)
        found = examine(server, {"clients": ANSWERS["clients"]}, lambda name: None)
    assert "is another than alone" in str(found["clients"])


def test_a_check_that_fails_leaves_no_report(
    offered: Callable[..., Offer], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    open_to_all(monkeypatch)
    with pytest.raises(ChecksFailed, match="1 of 7 checks of the server failed; key: answered 200") as failed:
        measured(offered(), prompts)
    assert [name for name, fault in failed.value.checks.items() if fault] == ["key"]


def test_a_server_that_reads_other_tokens_is_at_fault(
    offered: Callable[..., Offer], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.server.service.text_prompts", _shortened)
    with pytest.raises(ChecksFailed, match="the server read other tokens than the prompt's"):
        measured(offered(), prompts)


def _shortened(request: Any, model: LoadedModel) -> Any:
    from engine.server.prompting import text_prompts

    return [replace(asked, tokens=asked.tokens[1:]) for asked in text_prompts(request, model)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens must be at least 1, not 0"),
        ({"limit": 0}, "--limit must be at least 1, not 0"),
        ({"clients": 1}, "--clients must be at least 2, not 1"),
        ({"prefill_chunk": 0}, "--prefill-chunk must be at least 1, not 0"),
        ({"block": "0"}, "--block must be auto or a number"),
    ],
)
def test_switches_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        ServerSwitches(**changes).check()


@pytest.mark.parametrize(
    ("of_offer", "changes", "message"),
    [
        ({"drafter": "none"}, {"block": "4"}, "--block 4 needs a drafter, and target has none"),
        ({}, {"block": "64"}, "--block 64 is more than twice 8"),
    ],
)
def test_block_too_long_for_the_drafter_is_refused(
    offered: Callable[..., Offer],
    prompts: list[Prompt],
    of_offer: dict[str, Any],
    changes: dict[str, Any],
    message: str,
):
    with pytest.raises(ConfigurationError, match=message):
        measured(offered(**of_offer), prompts, **changes)


def test_prompt_that_fills_the_context_is_refused(offered: Callable[..., Offer], prompts: list[Prompt]):
    with pytest.raises(PromptError, match=r"leaves no space in the context of 12"):
        measured(offered(context=12), prompts)


def entry_with(offer: Offer, **changes: Any) -> Offer:
    entry = offer.entry.model_copy(update=changes)
    registry = replace(offer.registry, entries=(entry,))
    return Offer.of(registry)


def test_model_of_an_external_engine_is_refused(offered: Callable[..., Offer]):
    with pytest.raises(ConfigurationError, match="decoded by the engine mlx-lm"):
        entry_with(offered(), engine="mlx-lm")


def test_unknown_chat_template_switch_is_refused(offered: Callable[..., Offer], prompts: list[Prompt]):
    with pytest.raises(ConfigurationError, match="sets tone of its chat template"):
        measured(entry_with(offered(), chat_template_kwargs={"tone": "kind"}), prompts)
