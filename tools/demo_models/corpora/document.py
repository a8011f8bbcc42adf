"""A training text as weighted pieces, so that one loss can care about answers more than about filler."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER = 5.0  # digits that must be retrieved: trained hardest, and the accuracy that progress lines show
NORMAL = 1.0
CONTEXT = 0.1  # filler, facts and user turns: unpredictable by design


@dataclass(frozen=True)
class Piece:
    """A stretch of text and the weight of its tokens in the loss."""

    text: str
    weight: float = NORMAL


Document = tuple[Piece, ...]


def text_of(document: Document) -> str:
    """The document as one string."""
    return "".join(piece.text for piece in document)
