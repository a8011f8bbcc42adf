"""What a server has to do besides giving the right tokens; asked over HTTP, as clients ask.

For `DOORS` and `ANSWERS` nothing is kept between requests, so that the same request must give the same
tokens; for `KEEPING` the prompt cache keeps them for a short while.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from threading import Barrier
from time import monotonic, sleep
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from engine.cache.policy import NATIVE, KVPolicy
from engine.decode import decode
from engine.evaluation.server_client import (
    CHAT_PATH,
    TEXT_PATH,
    Answer,
    Answered,
    Client,
    Question,
    ServerFault,
    check_counts,
    whole_answer,
)
from engine.registry import SEPARATOR
from engine.server import schema
from engine.server.scheduler import STATS_S
from engine.server.sessions import LoadedModel
from evidence_format.claims import PARITY_LIMITS

REPEATABLE = {"seed": 0}  # lets a draft length look at nothing but tokens
LONG = 512  # tokens of an answer that is left before its end
SEEN = 3  # events of a stream before its client goes
PATIENCE_S, POLL_S = 30.0, 0.05
PROMPT_FIELDS = ("messages", "chat_template_kwargs", "prompt")
QUIET = ("requests_active", "requests_admitted", "kv_cache_bytes_active")
STATES = {  # all of these are 0
    "quiet": QUIET,
    "empty": (*QUIET, "prompt_cache_entries", "kv_cache_bytes_cached"),
}
# of log-probabilities, as `PARITY_LIMITS`: a key or value that is rounded otherwise may get the next code
ROUNDING_OF_CODES = 0.1
SLACK = 2**20  # bytes: kept graphs and small change


@dataclass(frozen=True)
class Examinee:
    """A server, and what it is asked."""

    client: Client  # with the key
    model_id: str  # as requests name the model
    questions: Sequence[Question]  # at least one
    clients: int  # that ask at once
    model: LoadedModel
    policy: KVPolicy  # of what `model_id` names

    @cached_property
    def chosen(self) -> list[Question]:
        """One question for each client, from the whole range of them."""
        count = len(self.questions)
        return [self.questions[index * count // self.clients % count] for index in range(self.clients)]

    @cached_property
    def shortest(self) -> Question:
        return min(self.questions, key=lambda asked: len(asked.tokens))

    @cached_property
    def alone(self) -> list[Answer]:
        return [self.ask(asked) for asked in self.chosen]

    def ask(self, asked: Question, **changes: Any) -> Answer:
        return whole_answer(asked, self.client.fetch(asked.path, asked.fields | REPEATABLE | changes))

    def ask_at_once(self) -> list[Answer]:
        gate = Barrier(self.clients)

        def ask(asked: Question) -> Answer:
            gate.wait()
            return self.ask(asked)

        with ThreadPoolExecutor(self.clients) as clients:
            return list(clients.map(ask, self.chosen))

    def held(self, asked: Question, ids: list[int]) -> int:
        """How many of these tokens at their beginning are in the prompt cache."""
        fitting = ids if self.model.context is None else ids[: self.model.context - 1]
        fields = {name: value for name, value in asked.fields.items() if name not in PROMPT_FIELDS}
        name = f"what follows {asked.identifier}"
        following = Question(name, TEXT_PATH, fields | {"prompt": fitting}, fitting)
        return self.ask(following, max_tokens=1).usage.prompt_tokens_details.cached_tokens

    def wait_until(self, state: str) -> dict[str, float]:
        """The metrics as soon as the server is in one of `STATES`; ServerFault where it takes too long."""
        sleep(2 * STATS_S)  # figures that are older may say what was before
        until = monotonic() + PATIENCE_S
        while True:
            reply = self.client.fetch("/metrics")
            if reply.status != 200:
                raise ServerFault(f"/metrics answered {reply.status}")
            found = metrics_of(str(reply.body))
            left = [f"{name} {found.get(name, nan):,.0f}" for name in STATES[state] if found.get(name, nan)]
            if not left:
                return found
            if monotonic() > until:
                raise ServerFault(f"after {PATIENCE_S:.0f} s still not {state}: {', '.join(left)}")
            sleep(POLL_S)


def metrics_of(text: str) -> dict[str, float]:
    """Prometheus' figures summed over their labels, each state's apart."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            state = sample.labels.get("state")
            found[sample.name.removeprefix("kakeya_") + (f"_{state}" if state else "")] += sample.value
    return dict(found)


def health(server: Examinee) -> None:
    """/health answers without a key."""
    reply = replace(server.client, key=None).fetch("/health")
    if reply.status != 200 or schema.Health.model_validate(reply.body).status != "ok":
        raise ServerFault(f"/health says {reply.status} {reply.body}")


def models(server: Examinee) -> None:
    """/v1/models lists the model unless its id spells out a policy, and has a card of it."""
    reply = server.client.fetch("/v1/models")
    listed = [card.id for card in schema.ModelList.model_validate(reply.body).data]
    is_spelled_out = server.model_id.partition(SEPARATOR)[2] not in server.model.entry.channels
    if server.model_id not in listed and not is_spelled_out:
        raise ServerFault(f"/v1/models does not list {server.model_id}")
    if server.client.fetch(f"/v1/models/{server.model_id}").status != 200:
        raise ServerFault(f"/v1/models/{server.model_id} is not there")


def key(server: Examinee) -> None:
    """No one is served without the key, or with another one."""
    asked = server.questions[0]
    for other in (None, "another-key-of-some-length"):
        client = replace(server.client, key=other)
        _check_refusal(client.fetch("/v1/models"), 401, None)
        _check_refusal(client.fetch("/metrics"), 401, None)
        _check_refusal(client.fetch(asked.path, asked.fields), 401, None)


def unknown_model(server: Examinee) -> None:
    """A model that is not there is 404, and so is a channel."""
    asked = server.questions[0]
    name = server.model_id.partition("@")[0]
    for wrong in ("no-such-model", f"{name}@no-such-channel"):
        _check_refusal(server.client.fetch(asked.path, asked.fields | {"model": wrong}), 404, "model")


def bad_value(server: Examinee) -> None:
    """A value out of bounds is 400, a feature that is not here 501, and both name the field."""
    asked = server.questions[0]
    for field, value, status in (("temperature", 3, 400), ("max_tokens", -1, 400), ("suffix", "x", 501)):
        _check_refusal(server.client.fetch(asked.path, asked.fields | {field: value}), status, field)


def _check_refusal(reply: Answered, status: int, param: str | None) -> None:
    if reply.status != status:
        raise ServerFault(f"answered {reply.status}, not {status}: {str(reply.body)[:200]}")
    error = schema.ErrorReply.model_validate(reply.body).error
    if error.param != param:
        raise ServerFault(f"the error is about {error.param}, not {param}: {error.message}")


def stream(server: Examinee) -> None:
    """A stream says what the same request says at once, and ends with x_kakeya; with usage if asked for."""
    kinds = {asked.path: index for index, asked in reversed(list(enumerate(server.chosen)))}
    for index in kinds.values():
        for with_usage in (False, True):
            _check_stream(server, server.chosen[index], server.alone[index], with_usage=with_usage)


def _check_stream(server: Examinee, asked: Question, answer: Answer, *, with_usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": with_usage}}
    with closing(server.client.stream(asked.path, asked.fields | REPEATABLE | options)) as events:
        documents = list(events)
    if documents[-1] is not None or None in documents[:-1]:
        raise ServerFault(f"{asked.identifier}: [DONE] is not at the end of the stream, alone")
    kind = schema.ChatChunk if asked.path == CHAT_PATH else schema.TextCompletion
    chunks: list[schema.ChatChunk | schema.TextCompletion] = [
        kind.model_validate(each) for each in documents[:-1]
    ]
    last = chunks[-1]
    if last.x_kakeya is None:
        raise ServerFault(f"{asked.identifier}: the last chunk lacks x_kakeya")
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    if counted != ([last] if with_usage else []) or bool(last.choices) is with_usage:
        raise ServerFault(f"{asked.identifier}: the usage is not where include_usage: {with_usage} wants it")
    if last.usage is not None:
        check_counts(asked, last.usage, last.x_kakeya)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(
        choice.text if isinstance(choice, schema.TextChoice) else choice.delta.content or ""
        for choice in choices
    )
    if (last.x_kakeya.token_ids, text) != (answer.tokens, answer.text):
        raise ServerFault(f"{asked.identifier}: the stream says something else than the whole answer")
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    if len(reasons) != 1 or (reasons[0] == "length") != (answer.finish == "length"):
        raise ServerFault(f"{asked.identifier}: the stream ends by {reasons}, the answer by {answer.finish}")


def clients(server: Examinee) -> None:
    """Several who ask at once get what each gets alone; rounding in a batch may choose between equals."""
    rounded = 0
    for asked, alone, among in zip(server.chosen, server.alone, server.ask_at_once(), strict=True):
        if (alone.tokens, alone.text, alone.finish) == (among.tokens, among.text, among.finish):
            continue
        pairs = zip(alone.tokens, among.tokens, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is None or not _is_tie(server, asked, position):
            raise ServerFault(f"{asked.identifier}: among {server.clients} the answer is another than alone")
        rounded += 1
    if 2 * rounded > server.clients:
        raise ServerFault(f"{rounded} of {server.clients} clients got another answer than each alone")


def _is_tie(server: Examinee, asked: Question, position: int) -> bool:
    """Whether plain decoding's two likeliest tokens at a position are equals but for rounding."""
    model = server.model.target
    bound = PARITY_LIMITS[model.card.dtype if model.card else "float32"]
    bound = bound if server.policy == NATIVE else max(bound, ROUNDING_OF_CODES)
    *_, step = decode(
        model.target,
        None,
        asked.tokens,
        max_tokens=position + 1,
        logprobs=2,
        policy=server.policy,
    )
    [*_, record] = step.logprobs or ()
    (_, first), (_, second) = record.top
    return first - second < bound


def next_turn(server: Examinee) -> None:
    """What goes on from an answer does not compute again what is held."""
    asked = server.shortest
    cached = server.held(asked, [*asked.tokens, *server.ask(asked).tokens, *asked.tokens[-8:]])
    if cached < len(asked.tokens):
        raise ServerFault(f"{asked.identifier}: {cached} tokens were held, not {len(asked.tokens)} or more")


def gone(server: Examinee) -> None:
    """A client that goes away in the middle leaves nothing behind; its answer is not decoded to its end."""
    asked, context = server.shortest, server.model.context
    most = LONG if context is None else min(LONG, context - len(asked.tokens) - 2)
    endless = {"max_tokens": most, "logit_bias": {str(token): -100 for token in server.model.target.stops}}
    answer = server.ask(asked, **endless)
    server.wait_until("empty")
    fields = asked.fields | REPEATABLE | endless | {"stream": True}
    with closing(server.client.stream(asked.path, fields)) as events:
        for _ in range(SEEN):
            next(events)
    server.wait_until("quiet")
    held = server.held(asked, [*asked.tokens, *answer.tokens])
    if held >= len(asked.tokens) + len(answer.tokens) - 1:
        raise ServerFault(f"an answer of {len(answer.tokens)} tokens was decoded to its end for no client")


def idle(server: Examinee) -> None:
    """The prompt cache empties, and memory is what it was before more of the same requests."""
    server.ask_at_once()
    before = server.wait_until("empty")["memory_bytes"]
    for _ in range(2):
        server.ask_at_once()
    after = server.wait_until("empty")["memory_bytes"]
    if after > before + SLACK:
        raise ServerFault(f"{after - before:,.0f} bytes of memory were not given back")


Check = Callable[[Examinee], None]


def _named(*checks: Check) -> Mapping[str, Check]:
    return {check.__name__.replace("_", "-"): check for check in checks}


DOORS = _named(health, models, key, unknown_model, bad_value)
ANSWERS = _named(stream, clients)
KEEPING = _named(next_turn, gone, idle)


def examine(
    server: Examinee, checks: Mapping[str, Check], began: Callable[[str], None]
) -> dict[str, str | None]:
    """Make all checks; return what each found, None where nothing is wrong. `began` is told each name."""
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        began(name)
        found[name] = None
        try:
            check(server)
        except ServerFault as fault:
            found[name] = str(fault)
        except ValidationError as error:
            found[name] = f"an answer is not as clients expect it: {error}"
    return found
