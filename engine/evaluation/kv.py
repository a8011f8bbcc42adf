"""The shoot-out of KV policies: what each stores, what that does to keys, values, answers, drafts and speed.

Arms: the oracle (mlx-lm's plain decoding), ``native`` (our loop, all keys and values kept) as baseline, our
loop under every policy, and the control ``no_needle``. A policy that restores comes with its controls. All
arms run every prompt, interleaved: retrieval prompts, whose needles lie beyond every window and which
are decoded for an answer's length, and prompts without a needle that are decoded for longer, so that drafts
and speed rest on more tokens. Greedy, one block length for all, the drafter's taps taken from the target as
the policy leaves it. The first retrieval prompts are run once more, untimed, to look into live caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.cache.policy import NATIVE, KVPolicy, parse_policy
from engine.config import Engine, Options, open_engine
from engine.device import Runtime
from engine.errors import ConfigurationError, PromptError
from engine.evaluation.environment import describe
from engine.evaluation.fingerprint import fingerprint
from engine.evaluation.haystack import GENERATED, Haystack, retrieval_prompts
from engine.evaluation.interleave import Lane, Progress, run_interleaved, scored_rows
from engine.evaluation.journal import Journals
from engine.evaluation.kv_arms import NO_NEEDLE, ORACLE, Examiner, arms_of, cards_of, runner
from engine.evaluation.prompts import Prompt, load_prompts
from engine.evaluation.report import Arm, Report, now
from engine.evaluation.system_load import StrainWatch
from engine.evaluation.templates import ChatSwitches
from engine.evaluation.throughput import configuration, encode_all
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from evidence_format.model import ReportRequest
from evidence_format.policies import MEANINGFUL

POLICIES = (
    "sliding-bounded:0,16",  # half of the shipped target's own windows
    "sink-window:4,64",
    "affine:8,64",
    "affine:4,64",
    "rotated:4,64",
    "lattice:d4,38",
    "lattice:e8,38",
    # one pair on the same layers and at equal stored bits: what the lattice adds to the rotation
    "rotated:5,64@inner:2",
    "lattice-packed:e8,5",
    "restored:learned",
    "restored:exact",
    "restored:zeros",
    "restored:noise",
)
CONTEXT, DEPTHS, PER_DEPTH = 440, (0.0, 0.2, 0.4, 0.6, 0.8), 4
BLOCK = "8"
NO_PROMPTS = "none"
EXAMINED = 10  # prompts on which live caches are looked into: two of every depth


@dataclass(frozen=True)
class KVSwitches:
    """What the command line can set about a shoot-out.

    Attributes:
        policies: what `--kv` takes, each.
        haystack: of the retrieval prompts.
        answer_tokens: tokens to generate for one of them.
        speed_prompts: a set or a file of prompts without a needle, or ``none``.
        speed_limit: at most so many of them.
        max_tokens: tokens to generate for one of them.
        seed: of the retrieval prompts.
        claim_parity: policies for which recall parity with the oracle is claimed.
        claim_bytes: ``POLICY=BYTES``, the most resident bytes claimed of a policy.
        chat: how prompts are put to the model.
    """

    policies: tuple[str, ...] = POLICIES
    haystack: Haystack = field(default_factory=lambda: with_defaults(Haystack()))
    answer_tokens: int = 16
    speed_prompts: str = "code"
    speed_limit: int = 8
    max_tokens: int = 64
    seed: int = 0
    claim_parity: tuple[str, ...] = ()
    claim_bytes: tuple[str, ...] = ()
    chat: ChatSwitches = field(default_factory=ChatSwitches)

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        self.haystack.check()
        self.chat.check()
        for name in ("answer_tokens", "speed_limit", "max_tokens"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(f"{flag} must be at least 1, not {getattr(self, name)}")
        if self.answer_tokens > self.max_tokens:
            raise ConfigurationError(
                f"--answer-tokens {self.answer_tokens} is more than --max-tokens {self.max_tokens}"
            )
        parsed = self.parsed
        if NATIVE in parsed:
            raise ConfigurationError("--policies: native is the baseline and always runs; leave it out")
        if not parsed:
            raise ConfigurationError("--policies must name at least one policy")
        if twice := [each.spec for each in parsed if parsed.count(each) > 1]:
            raise ConfigurationError(f"--policies names {twice[0]} twice")
        for text in self.claim_parity:
            if parse_policy(text) not in parsed:
                raise ConfigurationError(f"--claim-parity {text}: it is none of --policies")
        for policy, _ in self.bytes_claimed:
            if policy not in parsed:
                raise ConfigurationError(f"--claim-bytes {policy.spec}: it is none of --policies")
        if self.claim_parity and self.speed_prompts != NO_PROMPTS:
            raise ConfigurationError(
                "--claim-parity claims recall of prompts that all hold a needle; add --speed-prompts none"
            )

    @property
    def parsed(self) -> tuple[KVPolicy, ...]:
        """The policies, in their order."""
        return tuple(parse_policy(text) for text in self.policies)

    @property
    def bytes_claimed(self) -> list[tuple[KVPolicy, int]]:
        """The policies of `claim_bytes`, each with the most bytes.

        Raises:
            ConfigurationError: it is not written POLICY=BYTES.
        """
        found = []
        for text in self.claim_bytes:
            policy, _, count = text.rpartition("=")
            if not count.isascii() or not count.isdigit() or int(count) < 1:
                raise ConfigurationError(f"--claim-bytes {text}: write POLICY=BYTES, e.g. affine:4,64=200000")
            found.append((parse_policy(policy), int(count)))
        return found

    @property
    def widest(self) -> int:
        """The most positions that a policy keeps where it drops others."""
        return max((each.span for each in self.parsed), default=0)


def with_defaults(haystack: Haystack) -> Haystack:
    """The retrieval prompts of a shoot-out, where nothing else was said."""
    return Haystack(
        CONTEXT if haystack.context is None else haystack.context,
        DEPTHS if haystack.depths is None else haystack.depths,
        PER_DEPTH if haystack.per_depth is None else haystack.per_depth,
    )


def settled(options: Options) -> Options:
    """The engine's switches with the shoot-out's defaults: the shipped drafter alone, and one block length.

    Raises:
        ConfigurationError: a policy was given where they are compared.
    """
    if options.kv != NATIVE.spec:
        raise ConfigurationError(
            f"eval kv compares policies; give --policies {options.kv!r} in place of --kv"
        )
    drafter = options.drafter
    if drafter is None:
        shipped = options.model is None or options.model.resolve() == SHIPPED_TARGET.resolve()
        drafter = str(SHIPPED_DRAFTER) if shipped else "none"
    fixed = drafter != "none" and options.block == "auto"
    return replace(options, drafter=drafter, block=BLOCK if fixed else options.block)


def open_shootout(options: Options) -> Engine:
    """The engine that the arms share; a projector is for the policies, not for it.

    Raises:
        ConfigurationError, ModelError: see `engine.config.open_engine`.
    """
    return replace(open_engine(replace(options, projector=None)), options=options)


def measure_kv(
    engine: Engine,
    switches: KVSwitches,
    runtime: Runtime,
    *,
    progress: Progress,
    request: ReportRequest | None = None,
    journals: Journals | None = None,
) -> Report:
    """Run all arms over all prompts.

    Raises:
        ConfigurationError: a switch does not make sense, a policy does not fit the model, there are more arms
            than a report holds, or the journal belongs to another run.
        ModelError: the model's attention cannot read what a policy keeps.
        PromptError: a prompt does not fit the model, or is too short for needles beyond every window or for
            anything to be restored.
    """
    switches.check()
    started, watch = now(), StrainWatch()
    arms = arms_of(engine, switches.parsed)
    cards = cards_of(arms)
    prompts = made_prompts(engine, switches)
    emptied = [prompt.without_needle() if prompt.needle else prompt for prompt in prompts]
    encoded, empty = (encode_all(engine, some, switches.chat) for some in (prompts, emptied))
    _refuse_short(prompts, encoded, switches.parsed)
    settings = configuration(engine, runtime, "eval kv", switches)
    environment = describe(runtime, watch, cards)
    marks = fingerprint(environment, settings, prompts, encoded, request)
    journal = journals.open(marks) if journals else None
    limits = {
        tuple(tokens): switches.max_tokens if prompt.needle is None else switches.answer_tokens
        for prompt, tokens in zip([*prompts, *prompts], [*encoded, *empty], strict=True)
    }
    examiner, plain = Examiner(arms[0][0], encoded[:EXAMINED]), scored_rows(engine.target.tokenizer)
    lanes = []
    for of, arm in arms:
        asked, tokens = (emptied, empty) if arm.control == NO_NEEDLE else (prompts, encoded)
        row = plain if of.policy == NATIVE else examiner.rows(of)
        lanes.append(
            Lane(arm, asked, tokens, run=runner(of, arm, limits), row=row, phase=f"running {arm.name}")
        )
    total = len(lanes) * len(prompts)
    for number, lane in enumerate(lanes, 1):
        progress(0, total, "warming up", f"{lane.arm.name}, {number} of {len(lanes)}")
        lane.run([lane.encoded[0], lane.encoded[-1]])
    course = run_interleaved(lanes, progress=progress, journal=journal)
    progress(total, total, "checking", "kv")
    return Report.build(
        "kv",
        started=journal.started if journal else started,
        claims=_claims([arm for _, arm in arms], switches),
        environment=describe(runtime, watch, cards),
        configuration=settings | {"resumed": course.resumed},
        arms=[arm for _, arm in arms],
        order=course.order,
        restarts=course.restarts,
        request=request,
    )


def made_prompts(engine: Engine, switches: KVSwitches) -> list[Prompt]:
    """Retrieval prompts, their needles beyond every window, then those that are decoded for longer."""
    made = retrieval_prompts(
        GENERATED,
        switches.haystack,
        engine.target.tokenizer,
        limit=None,
        seed=switches.seed,
        switches=switches.chat,
        beyond=switches.widest,
    )
    if switches.speed_prompts == NO_PROMPTS:
        return made
    longer = load_prompts(switches.speed_prompts, switches.speed_limit)
    if found := [prompt.id for prompt in longer if prompt.needle is not None]:
        raise PromptError(f"--speed-prompts takes prompts without a needle; {found[0]} has one")
    return [*made, *longer]


def _refuse_short(
    prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]], policies: Sequence[KVPolicy]
) -> None:
    """Raise PromptError for a prompt of which a policy that restores would restore nothing."""
    kept = max((each.span for each in policies if each.source is not None), default=0)
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens) <= kept:
            raise PromptError(
                f"prompt {prompt.id} has {len(tokens)} tokens, of which {kept} are kept and none restored; "
                "give longer ones, or --speed-prompts none"
            )


def _claims(arms: Sequence[Arm], switches: KVSwitches) -> list[dict[str, Any]]:
    """What the report asks to be believed for."""
    claims: list[dict[str, Any]] = [
        {"name": "recall_parity", "arm": parse_policy(text).spec, "baseline": ORACLE}
        for text in switches.claim_parity
    ]
    claims += [
        {"name": "resident_bytes", "arm": policy.spec, "at_most": most}
        for policy, most in switches.bytes_claimed
    ]
    restoring = [arm.name for arm in arms if arm.role == "sut" and arm.restoration in MEANINGFUL]
    return claims + [{"name": "restoration", "arm": name} for name in restoring]
