"""Prompts of which a report about recall would be worth nothing, told before anything is run.

What makes one prompt unusable is told where it is read, see `engine.evaluation.prompts`; here is what shows
only in a set of them, and whether the answer stands beside the needle.
"""

from collections.abc import Sequence

from engine.errors import PromptError
from engine.evaluation.prompts import SHOWN, Prompt
from evidence_format.text import BARE_SETS, prompt_set


def refuse_unsound(prompts: Sequence[Prompt]) -> None:
    """Check prompts whose needles are to be found.

    Args:
        prompts: each with a needle.

    Raises:
        PromptError: an answer stands outside its needle, or prompts of one set ask differently.
    """
    for prompt in prompts:
        needle, text = prompt.needle, prompt.text
        if needle and text and needle.answer in text.replace(needle.sentence, "", 1):
            raise PromptError(
                f"prompt {prompt.id} holds its answer {needle.answer!r} outside its needle; take it out there"
            )
    _refuse_instructions(prompts)


def _refuse_instructions(prompts: Sequence[Prompt]) -> None:
    """Raise PromptError where prompts of one set ask differently, or those of a bare set ask anything."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        name = prompt_set(prompt.id)
        if name in BARE_SETS and prompt.instruction:
            raise PromptError(
                f"prompt {prompt.id} is of set {name}, whose prompts hold no instruction, but asks "
                f"{prompt.instruction[:SHOWN]!r}; give it an id of another set, such as needle-1"
            )
        other = first.setdefault(name, prompt)
        if other.instruction != prompt.instruction:
            raise PromptError(
                f"prompts {other.id} and {prompt.id} are of one set, {name!r}, but ask differently "
                f"({other.instruction[:SHOWN]!r}, {prompt.instruction[:SHOWN]!r}); "
                f"give one of them an id of another set, such as other-{name or 'set'}-1"
            )
