"""Figures as short texts, the same on a terminal and in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.evidence.rules.claims import ClaimFigure

MISSING = "-"


def number_text(value: float | None) -> str:
    """Three or more significant digits, e.g. ``143.2``, ``3.84``, ``0.950``."""
    if value is None:
        return MISSING
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def ratio_text(value: float | None) -> str:
    """A ratio to a baseline, e.g. ``2.13x``."""
    return MISSING if value is None else f"{value:.2f}x"


def difference_text(value: float | None) -> str:
    """A difference of outputs, e.g. ``2.6e-05``."""
    return MISSING if value is None else f"{value:.2g}"


def bytes_text(value: float | None) -> str:
    """Bytes in binary units, e.g. ``1.5 MiB``."""
    if value is None:
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def claim_text(claim: ClaimFigure) -> str:
    """A claim's figure beside its bound, e.g. ``2.13x (claimed: 1.00x)``, and whether the rows reach it."""
    text = _CLAIM_TEXTS.get(claim.name, number_text)
    shown = [] if claim.figure is None else [text(claim.figure)]
    if claim.bound is not None:
        shown.append(f"(claimed: {text(claim.bound)})")
    shown.append("met" if claim.met else "NOT MET")
    return " ".join(shown)


_CLAIM_TEXTS = {
    "speedup": ratio_text,
    "no_slowdown": ratio_text,
    "resident_bytes": bytes_text,
    "parity": difference_text,
}
