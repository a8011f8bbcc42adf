"""The prompts of a report, made again from its configuration: sets that are shipped, a given file, or a seed.

Nothing of the report but its switches is used, so that a prompt that was swapped is seen by its tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.config import Engine
from engine.errors import ConfigurationError
from engine.evaluation.haystack import GENERATED, Haystack, retrieval_prompts
from engine.evaluation.kv import NO_PROMPTS, KVSwitches, made_prompts
from engine.evaluation.measure import encode_all
from engine.evaluation.prompts import SHIPPED_SETS, Prompt, load_prompts
from engine.evaluation.recall import reach
from engine.generate import ChatSwitches, token_limit
from evidence_format.model import Arm

NO_NEEDLE = "no_needle"
COMMANDS = ("eval throughput", "eval quality", "eval server", "eval recall", "eval kv", "generate")


@dataclass(frozen=True)
class Asked:
    """One prompt as it was put to an arm.

    Attributes:
        prompt: as read or made.
        tokens: what the target reads of it.
        most: tokens that may be generated for it.
    """

    prompt: Prompt
    tokens: list[int]
    most: int


@dataclass(frozen=True)
class Prompts:
    """All prompts by id, as they are, and with their needles taken out."""

    whole: Mapping[str, Asked]
    emptied: Mapping[str, Asked]

    def of(self, arm: Arm) -> Mapping[str, Asked]:
        """Those that an arm was given."""
        return self.emptied if arm.control == NO_NEEDLE else self.whole


@dataclass(frozen=True)
class Switches:
    """A report's configuration, read one switch at a time."""

    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A switch that must be a text."""
        return str(self._read(name, str))

    def optional_text(self, name: str) -> str | None:
        """A text, or None where nothing was said."""
        value = self._read(name, str | None)
        return None if value is None else str(value)

    def number(self, name: str) -> int:
        """A switch that must be a whole number."""
        return int(self._read(name, int))

    def optional_number(self, name: str) -> int | None:
        """A whole number, or None where nothing was said."""
        value = self._read(name, int | None)
        return None if value is None else int(value)

    def flag(self, name: str) -> bool:
        """A switch that is on or off."""
        return bool(self._read(name, bool))

    def listed(self, name: str, kind: Any) -> tuple[Any, ...]:
        """A list, which a configuration holds as one line of JSON; empty where nothing was said."""
        text = self.optional_text(name)
        try:
            return tuple(TypeAdapter(list[kind]).validate_json(text)) if text else ()
        except ValidationError:
            raise ConfigurationError(
                f"the report's configuration has {name} = {text!r}, which is no list"
            ) from None

    def _read(self, name: str, kind: Any) -> Any:
        value = self.values.get(name)
        try:
            return TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigurationError(
                f"the report's configuration has {name} = {json.dumps(value)[:80]}, so its prompts cannot "
                "be made again; was it written by this engine?"
            ) from None

    @property
    def command(self) -> str:
        """The command that wrote the report."""
        command = self.text("command")
        if command not in COMMANDS:
            raise ConfigurationError(
                f"the report is of {command!r}, which verify cannot replay; it replays {', '.join(COMMANDS)}"
            )
        return command

    @property
    def chat(self) -> ChatSwitches:
        """How prompts are put to the model."""
        if self.command == "generate":
            return ChatSwitches()
        switches = ChatSwitches(
            self.flag("chat"),
            self.text("thinking"),
            self.optional_text("channel_prefix"),
            self.optional_text("system"),
        )
        switches.check()
        return switches

    @property
    def haystack(self) -> Haystack:
        """Of prompts that are made up."""
        depths = self.listed("depths", float)
        haystack = Haystack(
            self.optional_number("context"), depths or None, self.optional_number("per_depth")
        )
        haystack.check()
        return haystack


def make_prompts(engine: Engine, switches: Switches, given: Path | None) -> Prompts:
    """All prompts of a report.

    Args:
        engine: whose tokenizer, context and policy.
        switches: the report's configuration.
        given: the file of prompts, where the report was made with one.

    Raises:
        ConfigurationError: the report was made with a file and none is given, or its switches make no sense.
        PromptError: the prompts cannot be read or made.
    """
    command = switches.command
    if command == "eval kv":
        prompts = _of_shootout(engine, switches, given)
    elif command == "eval recall":
        prompts = retrieval_prompts(
            _set(switches, "prompts", given, (*SHIPPED_SETS, GENERATED)),
            switches.haystack,
            engine.target.tokenizer,
            limit=switches.optional_number("limit"),
            seed=switches.number("seed"),
            switches=switches.chat,
            beyond=reach(engine.policy),
        )
    elif command == "generate":
        prompts = load_prompts(_file("its prompt was typed", given))
    else:
        name = _set(switches, "prompts", given, (*SHIPPED_SETS, "all"))
        prompts = load_prompts(name, switches.optional_number("limit"), switches.number("seed"))
    whole = _asked(engine, switches, prompts, prompts)
    if command not in ("eval recall", "eval kv"):
        return Prompts(whole, {})
    emptied = [prompt.without_needle() if prompt.needle else prompt for prompt in prompts]
    return Prompts(whole, _asked(engine, switches, prompts, emptied))


def _of_shootout(engine: Engine, switches: Switches, given: Path | None) -> list[Prompt]:
    """Those of `eval kv`: made up for needles, read for speed."""
    speed = switches.text("speed_prompts")
    if speed != NO_PROMPTS:
        speed = _set(switches, "speed_prompts", given, (*SHIPPED_SETS, "all"))
    shootout = KVSwitches(
        policies=switches.listed("policies", str),
        haystack=switches.haystack,
        speed_prompts=speed,
        speed_limit=switches.number("speed_limit"),
        seed=switches.number("seed"),
        chat=switches.chat,
    )
    shootout.check()
    return made_prompts(engine, shootout)


def _set(switches: Switches, name: str, given: Path | None, shipped: Sequence[str]) -> str:
    """The set a switch names, or the given file where it names one."""
    text = switches.text(name)
    if all(part in shipped for part in text.split(",")):
        return text
    return _file(f"its prompts are {text!r}, no shipped set", given)


def _file(why: str, given: Path | None) -> str:
    if given is None:
        raise ConfigurationError(
            f"the report cannot be replayed by itself ({why}); give the prompts with --prompts FILE"
        )
    return str(given)


def _asked(
    engine: Engine, switches: Switches, originals: Sequence[Prompt], prompts: Sequence[Prompt]
) -> dict[str, Asked]:
    """Prompts with their tokens and limits by id; the limits are those of the originals."""
    encoded = encode_all(engine, prompts, switches.chat)
    asked = {}
    for original, prompt, tokens in zip(originals, prompts, encoded, strict=True):
        short = switches.command == "eval kv" and original.needle is not None
        most = switches.number("answer_tokens" if short else "max_tokens")
        asked[prompt.id] = Asked(prompt, tokens, token_limit(engine.target, len(tokens), most))
    return asked
