"""A grammar compiled where it can do no harm: in a process of its own, with little time, memory and stack.

llguidance works through a hostile schema for minutes, and some end the process: chains of references overflow
the stack. So `engine.grammar` has every grammar compiled here first, by bytes instead of a model's tokens.
Run as a program this reads a grammar in llguidance's JSON from its input and prints, as JSON, what llguidance
finds wrong with it; it does not return where a limit is hit.
"""

import json
import resource
import sys
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS = 2  # of computing
BYTES = 1 << 30  # of address space, where the system counts it
STACK = 2 << 20  # bytes; threads of the engine have at least four times that
LEXER_STATES = 50_000  # of 1 to 2 kB each


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of its text; what is wrong with the grammar its `get_error` says."""
    limits = LLParserLimits(
        max_lexer_states=LEXER_STATES, precompute_large_lexemes=False, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one finds grammars that permit nothing
    return matcher


def main() -> None:
    """Compile the grammar in the input."""
    for limit, value in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, BYTES),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # not every system has each of them
            resource.setrlimit(limit, (value, value))
    print(json.dumps(new_matcher(LLTokenizer("byte"), sys.stdin.read()).get_error()))  # noqa: T201 - a program


if __name__ == "__main__":
    main()
