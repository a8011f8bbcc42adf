"""The arms of a shoot-out: which policies are under test, which are controls, how one is run and recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.cache.policy import NATIVE, KVPolicy
from engine.cache.stats import VisibleRows
from engine.config import Engine
from engine.errors import ConfigurationError
from engine.evaluation.arms import OUR_LOOP, PLAIN_LOOP, Outcome
from engine.evaluation.distortion import examine, held_after
from engine.evaluation.interleave import Row, Run
from engine.evaluation.prompts import Prompt
from engine.evaluation.report import Arm, sample
from engine.evaluation.templates import answer_of
from engine.evaluation.throughput import models, our_arm, run_arm
from engine.restoration.loading import open_restoration
from engine.restoration.sources import LEARNED
from engine.target.attention import refuse_policy
from engine.target.folder import ModelCard

ORACLE, BASELINE, NO_NEEDLE = "oracle", "native", "no_needle"
MOST_ARMS = 32  # of a report
# Of sources listed together the first is under test; the others, exact and noise always, show its worth.
TESTED = (LEARNED, "exact", "zeros", "noise")
CONTROLS = ("exact", "noise")


def arms_of(engine: Engine, policies: Sequence[KVPolicy]) -> list[tuple[Engine, Arm]]:
    """Empty arms and the engines that run them: oracle, baseline, policies and their controls, ``no_needle``.

    Raises:
        ConfigurationError: a policy does not fit the model, or there are more arms than a report holds.
        ModelError: the model's attention cannot read what a policy keeps.
    """
    native = replace(engine, policy=NATIVE, restoration=None)
    arms = [(native, Arm(ORACLE, "oracle", PLAIN_LOOP)), (native, our_arm(native, BASELINE, "baseline"))]
    for policy, control in with_controls(policies).items():
        ours = under(engine, policy)
        arms.append((ours, our_arm(ours, policy.spec, "control" if control else "sut", control)))
    arms.append((native, our_arm(native, NO_NEEDLE, "control", NO_NEEDLE)))
    if len(arms) > MOST_ARMS:
        raise ConfigurationError(
            f"--policies asks for {len(arms)} arms, controls included; a report holds {MOST_ARMS}"
        )
    return arms


def under(engine: Engine, policy: KVPolicy) -> Engine:
    """The same engine under another policy.

    Raises:
        ConfigurationError: the policy does not fit the model, or lacks its projector.
        ModelError: the model's attention cannot read what the policy keeps, or a projector cannot be used.
    """
    model, options = engine.target.target.model, engine.options
    refuse_policy(model, policy)
    policy.chosen_layers(model)
    restoration = open_restoration(
        policy,
        engine.target,
        model=options.model,
        projector=options.projector if policy.source == LEARNED else None,
        drafter=options.drafter,
        dtype=options.dtype,
    )
    return replace(engine, policy=policy, restoration=restoration)


def cards_of(arms: Sequence[tuple[Engine, Arm]]) -> dict[str, ModelCard]:
    """The cards of all models that run in any arm, by role."""
    cards: dict[str, ModelCard] = {}
    for engine, _ in arms:
        cards |= models(engine)
        if engine.restoration is not None and engine.restoration.learned is not None:
            cards["projector"] = engine.restoration.learned.card
    return cards


def with_controls(policies: Sequence[KVPolicy]) -> dict[KVPolicy, str | None]:
    """Every policy to run, each with the control it is, or None for one under test.

    Policies that restore alike but for their source belong together, and get the controls they lack.
    """
    found: dict[KVPolicy, str | None] = {}
    for policy in policies:
        if policy.source is None:
            found[policy] = None
            continue
        alike = {source: replace(policy, source=source) for source in TESTED}
        listed = [source for source in TESTED if alike[source] in policies]
        for source in dict.fromkeys((*listed, *CONTROLS)):
            found[alike[source]] = None if source == listed[0] else source
    return found


def runner(engine: Engine, arm: Arm, limits: Mapping[tuple[int, ...], int]) -> Run:
    """Runs prompts through an arm, each to its own number of tokens, found by its token ids."""

    def run(prompts: Sequence[list[int]]) -> list[Outcome]:
        ours = arm.loop == OUR_LOOP
        return [
            run_arm(engine, ours, tokens, limits[tuple(tokens)], engine.new_draft_length())
            for tokens in prompts
        ]

    return run


class Examiner:
    """Makes rows; those of some prompts say what was held, and how far it lies from what native caches hold.

    What native caches hold of a prompt is kept until the next one comes.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        """Take an engine whose caches are native, and the token ids of the prompts to look into."""
        self._engine = engine
        self._examined = {tuple(tokens) for tokens in prompts}
        self._prompt: tuple[int, ...] = ()
        self._native: dict[int, VisibleRows] = {}

    def rows(self, engine: Engine) -> Row:
        """Rows of one arm; ``engine`` has its policy."""

        def row(prompt: Prompt, tokens: Sequence[int], outcome: Outcome) -> dict[str, Any]:
            answer = answer_of(engine.target.tokenizer, tokens, outcome.text)
            if tuple(tokens) not in self._examined:
                return sample(prompt, tokens, outcome, answer_text=answer)
            found = examine(engine, tokens, outcome.tokens, self._of(tokens))
            held = outcome if outcome.kv is not None else replace(outcome, kv=found.use)
            return sample(prompt, tokens, held, answer_text=answer, distortion=found.distortion)

        return row

    def _of(self, tokens: Sequence[int]) -> dict[int, VisibleRows]:
        if self._prompt != tuple(tokens):
            self._prompt, self._native = tuple(tokens), held_after(self._engine, tokens)
        return self._native
