"""What stands around a prompt and its answer: the chat template's switches, and reasoning taken off answers.

A switch that changes nothing is refused, so that no report says a model was told something it was not told.
Reasoning is what stands between the marks of a literal table; the marks may be missing on either side: the
first because the chat template has written it, the last because the text was cut short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigurationError, PromptError
from engine.foreign import foreign
from evidence_format.text import MARKS, without_reasoning

THINKING = ("default", "on", "off")
# What templates call the switch. A template that knows none of the names ignores them.
THINKING_NAMES = ("enable_thinking", "thinking")
TAIL = 16  # tokens of a prompt in which the template may have begun the reasoning


@dataclass(frozen=True)
class ChatSwitches:
    """How conversations are put to the model.

    Attributes:
        chat: texts go through the chat template too, as a user's turn.
        thinking: ``on`` or ``off`` tells the template; ``default`` leaves it to the template.
        channel_prefix: text that the model's turn begins with.
        system: a system turn before the conversation.
    """

    chat: bool = False
    thinking: str = "default"
    channel_prefix: str | None = None
    system: str | None = None

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.thinking not in THINKING:
            raise ConfigurationError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")
        for name, value in (("--channel-prefix", self.channel_prefix), ("--system", self.system)):
            if value is not None and not value.strip():
                raise ConfigurationError(f"{name} must not be empty")

    @property
    def given(self) -> list[str]:
        """The switches that say something to the chat template."""
        said = {
            "--thinking": self.thinking != "default",
            "--channel-prefix": self.channel_prefix is not None,
            "--system": self.system is not None,
        }
        return [name for name, given in said.items() if given]


def chat_tokens(
    messages: Sequence[tuple[str, str]], tokenizer: Any, switches: ChatSwitches, identifier: str
) -> list[int]:
    """Token ids of a conversation with the beginning of the model's turn.

    Args:
        messages: (role, content) pairs.
        tokenizer: mlx-lm's wrapper.
        switches: how to put it.
        identifier: what messages call the prompt.

    Raises:
        PromptError: the template is missing or refuses the conversation, or it has a system turn already.
        ConfigurationError: the template ignores a switch.
    """
    turns = [{"role": role, "content": content} for role, content in messages]
    told = dict.fromkeys(THINKING_NAMES, switches.thinking == "on") if "--thinking" in switches.given else {}
    refused = f"prompt {identifier} does not go through the chat template"
    with foreign(lambda reason: PromptError(f"{refused}: {reason}")):

        def render(turns: list[dict[str, str]], told: dict[str, bool]) -> list[int]:
            tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, **told)
            return [int(token) for token in tokens]

        if told and render(turns, told) == render(turns, {name: not value for name, value in told.items()}):
            raise ConfigurationError(
                f"--thinking {switches.thinking}: this model's chat template has no such switch; "
                "leave it out, or begin the model's turn with --channel-prefix"
            )
        if switches.system is not None:
            bare, turns = turns, _with_system(turns, switches.system, identifier)
            if render(turns, told) == render(bare, told):
                raise ConfigurationError("--system: this model's chat template ignores system turns")
        tokens = render(turns, told)
        if switches.channel_prefix is not None:
            tokens += [int(t) for t in tokenizer.encode(switches.channel_prefix, add_special_tokens=False)]
        return tokens


def _with_system(turns: list[dict[str, str]], text: str, identifier: str) -> list[dict[str, str]]:
    if turns[0]["role"] == "system":
        raise PromptError(f"prompt {identifier} has a system turn of its own; leave out --system")
    return [{"role": "system", "content": text}, *turns]


def answer_of(tokenizer: Any, prompt: Sequence[int], text: str) -> str:
    """A model's text without its reasoning, and without white space around what is left where there was any.

    Args:
        tokenizer: of the model.
        prompt: token ids the text continues; they may end inside the reasoning.
        text: what the model said.
    """
    tail = str(tokenizer.decode(list(prompt[-TAIL:]))).rstrip() if prompt else ""
    opened = (number for number, (begin, _) in enumerate(MARKS) if tail.endswith(begin))
    return without_reasoning(text, next(opened, None))
