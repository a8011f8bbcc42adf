"""Are a server's answers the plain decoder's, and does it do besides what clients rely on?

The server runs in this process and is asked over HTTP. Once its checks have passed, it and mlx-lm's plain
loop decode the same prompts in turns. No report is made of a server that failed a check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any

from engine.cache.policy import NATIVE
from engine.config import Engine, Options
from engine.device import Runtime
from engine.draft_length import parse_block
from engine.errors import ConfigurationError, EngineError, PromptError
from engine.evaluation import measure
from engine.evaluation.arms import plain
from engine.evaluation.measure import encode_all
from engine.evaluation.prompts import Prompt
from engine.evaluation.server_checks import ANSWERS, DOORS, KEEPING, LONG, Check, Examinee, examine
from engine.evaluation.server_client import (
    CHAT_PATH,
    TEXT_PATH,
    Client,
    Question,
    ServerFault,
    outcome,
    served,
    whole_answer,
)
from engine.generate import THINKING_NAMES, ChatSwitches, Outcome
from engine.registry import Channel, ModelEntry, Registry
from engine.server.scheduler import ModelFinder, SchedulerLimits
from engine.server.serve import ServerSettings
from engine.server.service import RequestLimits
from engine.server.sessions import LoadedModel
from evidence_format.model import Arm, Report, ReportClaim, ReportRequest

PLAIN, SERVER = "plain", "server"
SHORT = 24  # tokens of the answers that checks ask for
CHECKS = len(DOORS) + len(ANSWERS) + len(KEEPING)
IDLE_S = 1.0  # after which the prompt cache lets go of a prompt, where checks look at that


@dataclass(frozen=True, kw_only=True)
class ServerSwitches(measure.SetSwitches):
    """What the command line can set about the comparison."""

    clients: int = measure.at_least(4, 2)
    block: str = "auto"
    prefill_chunk: int = measure.at_least(512)
    transport: str | None = None

    def check(self) -> None:
        super().check()
        parse_block(self.block)

    @property
    def fields(self) -> dict[str, Any]:
        speculation: dict[str, Any] = {"block": int(self.block)} if self.block not in ("auto", "1") else {}
        if self.block == "1":
            speculation = {"drafter": "none"}
        return speculation | {"temperature": 0, "return_token_ids": True, "return_rounds": True}

    @property
    def serving(self) -> ServerSettings:
        """The server whose answers are compared: it keeps nothing between requests."""
        return ServerSettings(
            request_limits=RequestLimits(max(self.max_tokens, LONG), self.max_tokens, self.clients),
            limits=SchedulerLimits(parallel=self.clients, sessions=0, chunk=self.prefill_chunk),
        )

    @property
    def keeping(self) -> ServerSettings:
        limits = replace(self.serving.limits, sessions=4 * self.clients, session_s=IDLE_S)
        return replace(self.serving, limits=limits)


@dataclass(frozen=True)
class Offer:
    """What is served: a model and its KV channel."""

    registry: Registry  # of the entry alone
    entry: ModelEntry
    channel: Channel
    model_id: str  # as requests name both

    @classmethod
    def of(cls, registry: Registry, model_id: str | None = None, channel: str | None = None) -> "Offer":
        """What an id of a registry means, with a channel named apart from it; None: the default one."""
        entry, found = registry.resolve(model_id or registry.default, channel)
        if entry.engine is not None:
            raise ConfigurationError(
                f"{entry.name} is decoded by the engine {entry.engine}, which tells no rounds; "
                "only models of this engine can be compared"
            )
        alone = replace(registry, entries=(entry,), default=entry.name)
        return cls(alone, entry, found, f"{entry.name}@{found.name}")


class ChecksFailed(EngineError):
    """The server does not do what it must; `checks` says what each found, None where nothing is wrong."""

    def __init__(self, checks: Mapping[str, str | None]) -> None:
        self.checks = dict(checks)
        failed = [f"{name}: {fault}" for name, fault in checks.items() if fault]
        super().__init__(f"{len(failed)} of {len(checks)} checks of the server failed; {'; '.join(failed)}")


def measure_server(
    offer: Offer,
    find: ModelFinder,
    prompts: Sequence[Prompt],
    switches: ServerSwitches,
    runtime: Runtime,
    *,
    progress: measure.Progress,
    request: ReportRequest | None = None,
) -> Report:
    """Check the server and compare its answers; raise ChecksFailed, or ServerFault for a refused prompt."""
    switches.check()
    steps, total = count(), CHECKS + 2 * len(prompts)
    load = cache(find(offer.entry))  # once, by the first server, for both of them

    def show(_: int, __: int, phase: str, detail: str) -> None:
        progress(next(steps), total, phase, detail)

    def make(checks: Mapping[str, Check], server: Examinee) -> dict[str, str | None]:
        found = examine(server, checks, lambda name: show(0, 0, "checking", name))
        if any(found.values()):
            raise ChecksFailed(found)
        return found

    progress(0, total, "loading", offer.entry.name)
    with served(offer.registry, switches.serving, lambda _: load, transport=switches.transport) as client:
        model = load()
        engine = engine_of(model, offer.channel, switches)
        switches = replace(switches, chat=_chat(offer.entry, prompts, switches.chat))
        evaluation = measure.Evaluation(
            "quality", "eval server", engine, switches, runtime, show, request, resumable=False
        )
        encoded = encode_all(engine, prompts, switches.chat)
        asked = questions(offer, model, prompts, encoded, switches)
        examinee = examinee_of(client, offer, model, asked, switches)
        checks = make({**DOORS, **ANSWERS}, examinee)
        plain(engine.target, encoded[0], SHORT, switches.prefill_chunk)  # untimed
        by_tokens = {tuple(each.tokens): each for each in asked}

        def decode_plainly(each: Question) -> Outcome:
            return plain(engine.target, each.tokens, each.fields["max_tokens"], switches.prefill_chunk)

        def ask(each: Question) -> Outcome:
            answer = whole_answer(each, client.fetch(each.path, each.fields))
            if (kept := answer.provenance.kv_policy) != engine.policy.spec:
                raise ServerFault(f"{each.identifier}: the server kept {kept}, not {engine.policy.spec}")
            return outcome(each, answer, engine.target)

        row = partial(measure.scored_row, model.target.tokenizer)

        def add(arm: Arm, decode: Callable[[Question], Outcome]) -> None:
            def run(some: Sequence[list[int]]) -> list[Outcome]:
                return [decode(by_tokens[tuple(tokens)]) for tokens in some]

            evaluation.runs.append(measure.ArmRun(arm, prompts, encoded, run, row, f"decoding by {arm.name}"))

        add(measure.plain_arm(PLAIN), decode_plainly)
        add(measure.our_arm(engine, SERVER), ask)
        evaluation.measured = measure.measure(evaluation.runs, progress=show)
    with served(offer.registry, switches.keeping, lambda _: load, transport=switches.transport) as client:
        checks |= make(KEEPING, replace(examinee, client=client))
    identity = ReportClaim(name="identical_output", arm=SERVER, baseline=PLAIN)
    return evaluation.report(
        [identity] if engine.policy == NATIVE else [],
        compared=2,
        model_id=offer.model_id,
        transport=client.transport,
        checks=" ".join(checks),
        checks_failed=0,
    )


def engine_of(model: LoadedModel, channel: Channel, switches: ServerSwitches) -> Engine:
    """The same parts as an evaluation knows them."""
    options = replace(
        Options.of(model.located, channel), block=switches.block, prefill_chunk=switches.prefill_chunk
    )
    drafter, block = model.drafter("default"), parse_block(switches.block)
    if block is not None and block > 1:
        if drafter is None:
            raise ConfigurationError(f"--block {block} needs a drafter, and {model.entry.name} has none")
        if block > 2 * (made_for := drafter.drafter.block_size):
            raise ConfigurationError(
                f"--block {block} is more than twice {made_for}, what this drafter was made for"
            )
    used = None if block == 1 else drafter
    return Engine(options, model.target, used, alone=used is None, policy=channel.policy)


def _chat(entry: ModelEntry, prompts: Sequence[Prompt], chat: ChatSwitches) -> ChatSwitches:
    own = entry.chat_template_kwargs
    if not own or not (chat.chat or any(prompt.messages is not None for prompt in prompts)):
        return chat
    if odd := sorted(own.keys() - set(THINKING_NAMES)):
        raise ConfigurationError(
            f"{entry.name} sets {odd[0]} of its chat template, which evaluations do not; give --prompts code"
        )
    own_thinking = "on" if all(own.values()) else "off"
    return replace(chat, thinking=own_thinking) if chat.thinking == "default" else chat


def questions(
    offer: Offer,
    model: LoadedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    switches: ServerSwitches,
) -> list[Question]:
    """The prompts as requests for no more than the context has space for; PromptError where it has none."""
    asked = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        most = switches.max_tokens
        if model.context is not None:
            most = min(most, model.context - len(tokens))
        if most < min(2, switches.max_tokens):
            raise PromptError(f"prompt {prompt.id} leaves no space in the context of {model.context} tokens")
        fields: dict[str, Any] = switches.fields | {"model": offer.model_id, "max_tokens": most}
        if prompt.messages is None and not switches.chat.chat:
            bare, bos = prompt.text or "", model.target.tokenizer.bos_token
            # a beginning-of-text token that the text spells out would be there twice
            fields["prompt"] = tokens if bos is not None and bare.startswith(bos) else bare
        else:
            turns = prompt.messages or (("user", prompt.text or ""),)
            fields["messages"] = [{"role": role, "content": content} for role, content in turns]
            if switches.chat.thinking != "default":
                fields["chat_template_kwargs"] = dict.fromkeys(THINKING_NAMES, switches.chat.thinking == "on")
        path = CHAT_PATH if "messages" in fields else TEXT_PATH
        asked.append(Question(prompt.id, path, fields, tokens))
    return asked


def examinee_of(
    client: Client, offer: Offer, model: LoadedModel, asked: Sequence[Question], switches: ServerSwitches
) -> Examinee:
    """The server as checks ask it: for short answers."""
    short = [
        replace(each, fields=each.fields | {"max_tokens": min(SHORT, each.fields["max_tokens"])})
        for each in asked
    ]
    return Examinee(client, offer.model_id, short, switches.clients, model, offer.channel.policy)
