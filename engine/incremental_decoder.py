"""Tokens to text, one at a time: what the tokenizer makes of all of them at once, less the prompt's part.

`tokenizer.decode` alone says what text tokens stand for. mlx-lm's streaming detokenizers differ from it: they
drop a leading space and spell byte 0 as a letter. Decoding everything again at every token would be slow, so
text is final as soon as no later token can change it. Until then it is pending:

    part of a character     later bytes complete it
    byte tokens ``<0xE4>``  one bad byte makes the whole run of them unreadable
    text that is cleaned    spaces before punctuation go; text that ends in a word is out of reach
"""

import re
from collections.abc import Sequence
from typing import Any

WINDOW = 8  # tokens that are decoded together where their text is final
UNREADABLE = "\ufffd"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
WORD_END = 3  # letters behind which cleaning changes nothing before them


class IncrementalDecoder:
    """The text that tokens add to a prompt."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """Begin a text.

        Args:
            tokenizer: of Hugging Face, or mlx-lm's wrapper of one.
            prompt: token ids the text continues. Some tokenizers drop a space at the beginning of what they
                decode; behind a prompt it is kept.
        """
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
        """Take the next token; returns the text that became final with it."""
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
    """Whether the tokenizer takes spaces before punctuation out; some are set to and do not."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    return " ," not in tokenizer.decode(tokenizer.encode("a ,b", add_special_tokens=False))
