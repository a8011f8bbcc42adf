"""Are a server's answers the plain decoder's, and does it do beside that what clients rely on?

The server runs in this process and is asked over HTTP. Once its checks have passed, prompt by prompt and in
turns, it decodes greedily what mlx-lm's plain loop decodes with the same weights; never both at once. A row
of the arm `server` is made of what came over HTTP. No report is made of a server that failed a check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from engine.cache.policy import NATIVE
from engine.config import Engine, parse_block
from engine.device import Runtime
from engine.errors import ConfigurationError, EngineError, PromptError
from engine.evaluation.arms import PLAIN_LOOP, plain
from engine.evaluation.environment import LoadWatch, describe
from engine.evaluation.http import Client, ServerFault
from engine.evaluation.measure import (
    ArmRun,
    Progress,
    configuration,
    encode_all,
    measure,
    models,
    our_arm,
    scored_rows,
)
from engine.evaluation.prompts import Prompt
from engine.evaluation.question import Question, outcome, question, whole
from engine.evaluation.report import Arm, Report, now
from engine.evaluation.rounding import compare_with_plain
from engine.evaluation.served import served
from engine.evaluation.server_checks import ANSWERS, DOORS, KEEPING, Check, Examinee, examine
from engine.evaluation.server_switches import Offer, ServerSwitches
from engine.generate import THINKING_NAMES, ChatSwitches, Outcome
from engine.registry import Channel, ModelEntry
from engine.server.scheduler import ModelFinder
from engine.server.sessions import LoadedModel
from evidence_format.model import ReportRequest

PLAIN, SERVER = "plain", "server"
SHORT = 24  # tokens of the answers that checks ask for
CHECKS = len(DOORS) + len(ANSWERS) + len(KEEPING)


class ChecksFailed(EngineError):
    """The server does not do what it must.

    Attributes:
        checks: what each check found, None where nothing is wrong.
    """

    def __init__(self, checks: Mapping[str, str | None]) -> None:
        """Say what failed."""
        self.checks = dict(checks)
        failed = [f"{name}: {fault}" for name, fault in checks.items() if fault]
        super().__init__(f"{len(failed)} of {len(checks)} checks of the server failed; {'; '.join(failed)}")


class _Shared:
    """A model loaded once, by the first server that asks for it, and taken over by all others."""

    def __init__(self, find: ModelFinder) -> None:
        self._find, self._models = find, dict[str, LoadedModel]()

    def find(self, entry: ModelEntry) -> Callable[[], LoadedModel]:
        return partial(self.open, entry)

    def open(self, entry: ModelEntry) -> LoadedModel:
        if entry.name not in self._models:
            self._models[entry.name] = self._find(entry)()
        return self._models[entry.name]


class _Shown:
    """Progress in steps that are counted here."""

    def __init__(self, show: Progress, total: int) -> None:
        self._show, self._total, self._done = show, total, 0

    def step(self, phase: str, detail: str) -> None:
        self._show(self._done, self._total, phase, detail)
        self._done += 1

    def last(self, phase: str, detail: str) -> None:
        self._show(self._total, self._total, phase, detail)


def measure_server(
    offer: Offer,
    find: ModelFinder,
    prompts: Sequence[Prompt],
    switches: ServerSwitches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: ReportRequest | None = None,
) -> Report:
    """Check the server and compare its answers.

    Args:
        offer: what is served.
        find: finds the models of the registry, as `engine.server.serve.model_finder` does.
        prompts: at least one.
        switches: checked here.
        runtime: what runs.
        progress: told before each check and each run.
        request: what the report is bound to.

    Raises:
        ChecksFailed: the server failed a check.
        ServerFault: it refused a prompt, or answered otherwise than it was asked.
        ConfigurationError: a switch does not make sense, alone or with the model.
        PromptError: a prompt does not fit the model.
    """
    switches.check()
    started, watch, shared = now(), LoadWatch(), _Shared(find)
    shown = _Shown(progress, CHECKS + 2 * len(prompts))
    progress(0, CHECKS + 2 * len(prompts), "loading", offer.entry.name)
    with served(offer.registry, switches.serving, shared.find, transport=switches.transport) as client:
        model = shared.open(offer.entry)
        engine = _engine(model, offer.channel, switches)
        switches = replace(switches, chat=_chat(offer.entry, prompts, switches.chat))
        encoded = encode_all(engine, prompts, switches.chat)
        examinee = _examinee(client, offer, model, _questions(offer, model, prompts, encoded, switches))
        checks = _made({**DOORS, **ANSWERS}, _asked_for_little(examinee, switches), shown)
        arms = [Arm(PLAIN, "baseline", PLAIN_LOOP), our_arm(engine, SERVER)]
        plain(engine.target, encoded[0], SHORT, switches.prefill_chunk)  # untimed
        course = measure(
            _lanes(arms, engine, examinee, prompts, encoded),
            progress=lambda _, __, phase, detail: shown.step(phase, detail),
        )
    with served(offer.registry, switches.keeping, shared.find, transport=switches.transport) as client:
        keeping = replace(_asked_for_little(examinee, switches), client=client)
        checks |= _made(KEEPING, keeping, shown)
    shown.last("checking", "rounding and divergences")
    pair = {"arm": SERVER, "baseline": PLAIN}
    settings = configuration(engine, runtime, "eval server", switches) | {
        "model_id": offer.model_id,
        "transport": client.transport,
        "checks": " ".join(checks),
        "checks_failed": 0,
    }
    return Report.build(
        "quality",
        started=started,
        claims=[{"name": "identical_output", **pair}] if engine.policy == NATIVE else [],
        environment=describe(runtime, watch, models(engine)),
        configuration=settings,
        arms=arms,
        order=course.order,
        request=request,
        **compare_with_plain(engine, encoded, arms),
    )


def _made(checks: Mapping[str, Check], examinee: Examinee, shown: _Shown) -> dict[str, str | None]:
    """Make checks.

    Raises:
        ChecksFailed: one of them found something.
    """
    found = examine(examinee, checks, lambda name: shown.step("checking", name))
    if any(found.values()):
        raise ChecksFailed(found)
    return found


def _engine(model: LoadedModel, channel: Channel, switches: ServerSwitches) -> Engine:
    """The same parts as an evaluation knows them."""
    options = replace(
        model.located.options(channel), block=switches.block, prefill_chunk=switches.prefill_chunk
    )
    drafter = model.drafter("default")
    block = parse_block(switches.block)
    if drafter is None and block is not None and block > 1:
        raise ConfigurationError(f"--block {block} needs a drafter, and {model.entry.name} has none")
    if drafter is not None and block is not None and block > 2 * drafter.drafter.block_size:
        raise ConfigurationError(
            f"--block {block} is more than twice {drafter.drafter.block_size}, what this drafter was made for"
        )
    used = None if block == 1 else drafter
    return Engine(options, model.target, used, alone=used is None, policy=channel.policy)


def _chat(entry: ModelEntry, prompts: Sequence[Prompt], chat: ChatSwitches) -> ChatSwitches:
    """How conversations are put, the entry's own switches included.

    Raises:
        ConfigurationError: the entry sets a switch that evaluations do not know.
    """
    own = entry.chat_template_kwargs
    if not own or not (chat.chat or any(prompt.messages is not None for prompt in prompts)):
        return chat
    if odd := sorted(own.keys() - set(THINKING_NAMES)):
        raise ConfigurationError(
            f"{entry.name} sets {odd[0]} of its chat template, which evaluations do not; give --prompts code"
        )
    if chat.thinking != "default":
        return chat
    return replace(chat, thinking="on" if all(own.values()) else "off")


def _questions(
    offer: Offer,
    model: LoadedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    switches: ServerSwitches,
) -> list[Question]:
    """The prompts as requests, none of which asks for more than the model has room for.

    Raises:
        PromptError: one leaves no room for a second token.
    """
    asked = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        room = switches.max_tokens if model.context is None else model.context - len(tokens)
        if room < min(2, switches.max_tokens):
            raise PromptError(f"prompt {prompt.id} leaves no room in the context of {model.context}")
        common = switches.fields | {"model": offer.model_id, "max_tokens": min(room, switches.max_tokens)}
        asked.append(question(prompt, tokens, model.target, common, switches.chat))
    return asked


def _examinee(client: Client, offer: Offer, model: LoadedModel, questions: Sequence[Question]) -> Examinee:
    return Examinee(
        client, offer.model_id, questions, len(questions), sorted(model.target.stops), model.context
    )


def _asked_for_little(examinee: Examinee, switches: ServerSwitches) -> Examinee:
    """The same, asked for short answers by so many clients."""
    questions = [
        replace(asked, fields=asked.fields | {"max_tokens": min(SHORT, asked.fields["max_tokens"])})
        for asked in examinee.questions
    ]
    return replace(examinee, questions=questions, clients=switches.clients)


def _lanes(
    arms: Sequence[Arm],
    engine: Engine,
    examinee: Examinee,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
) -> list[ArmRun]:
    """The plain loop in this thread, and the server over HTTP."""
    by_tokens = {tuple(asked.tokens): asked for asked in examinee.questions}

    def plainly(asked: Question) -> Outcome:
        return plain(engine.target, asked.tokens, asked.fields["max_tokens"], engine.options.prefill_chunk)

    def over_http(asked: Question) -> Outcome:
        answer = whole(asked, examinee.client.post(asked.path, asked.fields))
        if answer.how.kv_policy != engine.policy.spec:
            raise ServerFault(
                f"{asked.identifier}: the server kept {answer.how.kv_policy}, not {engine.policy.spec}"
            )
        return outcome(asked, answer, engine.target)

    row = scored_rows(engine.target.tokenizer)
    ways = (plainly, over_http)
    return [
        ArmRun(arm, prompts, encoded, partial(_run, way, by_tokens), row, f"decoding by {arm.name}")
        for arm, way in zip(arms, ways, strict=True)
    ]


def _run(
    way: Callable[[Question], Outcome],
    by_tokens: Mapping[tuple[int, ...], Question],
    encoded: Sequence[list[int]],
) -> list[Outcome]:
    return [way(by_tokens[tuple(tokens)]) for tokens in encoded]
