"""Tokens to text as they come: what the tokenizer makes of all of them at once, less the prompt's part.

`tokenizer.decode` alone says what text tokens mean. mlx-lm's streaming detokenizers differ from it: they
drop a leading space and spell byte 0 as a letter. Decoding everything again at every token would be slow, so
text is final as soon as no later token can change it. Until then it is pending:

    part of a character     later bytes complete it
    byte tokens ``<0xE4>``  one bad byte makes the whole run of them unreadable
    text that is cleaned    spaces before punctuation go; text that ends in a word is out of reach
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

WINDOW = 8  # tokens that are decoded together where their text is final
UNREADABLE = "\ufffd"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
WORD_END = 3  # letters behind which cleaning changes nothing before them


class IncrementalDecoder:
    """The text that tokens add to a prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        # some tokenizers drop a space at the beginning of what they decode; behind a prompt it is kept
        self._tokenizer = tokenizer
        self._cleaned = _cleans(tokenizer)
        self.pending = ""  # text of the last tokens if no other follows
        self._window = [int(token) for token in prompt[-WINDOW:]]  # decoded together
        text = self._decode()
        if self._window and not self._is_final(self._window[-1], text):
            self._window, text = [], ""
        self._known = len(text)  # characters of the window's text that are final, or the prompt's
        self._since = len(self._window)  # where its tokens begin whose text is pending

    def add(self, token: int) -> str:
        """Add the next token; the text that became final with it."""
        self._window.append(token)
        text = self._decode()
        self.pending = text[self._known :]
        if not self.pending or not self._is_final(token, text):
            return ""
        final, self.pending, self._known = self.pending, "", len(text)
        if len(self._window) > WINDOW:
            self._window = self._window[self._since :]
            self._known = len(self._decode())
        self._since = len(self._window)
        return final

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._window))

    def _is_final(self, token: int, text: str) -> bool:
        """Whether no later token can change a text that ends with this token."""
        if text.endswith(UNREADABLE) or BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or ""):
            return False
        return not self._cleaned or text[-WORD_END:].isalnum()


def _cleans(tokenizer: Any) -> bool:
    """Whether the tokenizer removes spaces before punctuation; some are set to and do not."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    return " ," not in tokenizer.decode(tokenizer.encode("a ,b", add_special_tokens=False))


class TextEnds:
    """Tokens and strings that end a text."""

    tokens: Collection[int]
    texts: tuple[str, ...]
    least = 0  # tokens before which no string ends a text

    def first_in(self, text: str, count: int) -> int | None:
        """Where the first stop string in a text of so many tokens begins."""
        if count < self.least:
            return None
        return min((at for stop in self.texts if (at := text.find(stop)) >= 0), default=None)

    def partial_in(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self.texts), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """One text growing token by token.

    Stop tokens give no text. Text that may turn out to be the beginning of a stop string waits; the stop
    string itself is cut off with everything behind it.
    """

    def __init__(self, tokenizer: Any, stops: TextEnds, prompt: Sequence[int] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = stops
        self._held = ""  # final, but perhaps part of a stop string
        self.stopped_by: str | None = None  # the stop string that ended it
        self.given = 0  # characters that became certain
        self.begins: list[int] = []  # of every token, where its text begins

    def add(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens, possibly none."""
        return "".join([self._add(token) for token in tokens])

    @property
    def ended(self) -> bool:
        """Whether a stop string ended it."""
        return self.stopped_by is not None

    def finish(self) -> str:
        """What was still held back."""
        return "" if self.ended else self._give(self._held + self._decoder.pending)

    def _add(self, token: int) -> str:
        before = self._held + self._decoder.pending
        stopped = self.ended or token in self._stops.tokens
        self._held += "" if stopped else self._decoder.add(token)
        text = self._held + self._decoder.pending
        begin = self.given + _beginning(before, text)
        self.begins.append(max([begin, *self.begins[-1:]]))
        if stopped:
            return ""
        if (end := self._stops.first_in(text, len(self.begins))) is not None:
            self.stopped_by = next(stop for stop in self._stops.texts if text.startswith(stop, end))
            return self._give(text[:end])
        certain = self._held[: len(self._held) - self._stops.partial_in(self._held)]
        self._held = self._held[len(certain) :]
        return self._give(certain)

    def _give(self, text: str) -> str:
        self.given += len(text)
        return text


def _beginning(before: str, text: str) -> int:
    """Where the text of a token begins; that of a part of a character begins where the character does."""
    if text.startswith(before) and not text.startswith(before + UNREADABLE) and text != before:
        return len(before)
    return len(before.rstrip(UNREADABLE))


def text_of(tokenizer: Any, tokens: Sequence[int], stops: TextEnds, prompt: Sequence[int] = ()) -> str:
    """The whole text of a finished sequence, which continues a prompt."""
    stream = TextStream(tokenizer, stops, prompt)
    return stream.add(tokens) + stream.finish()
