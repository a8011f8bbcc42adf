"""``--no-speculation`` is ``--drafter none``, and contradicts another drafter."""

from __future__ import annotations

from typing import Any

import click
import pytest

from engine.cli.options import settle_speculation


@pytest.mark.parametrize(
    ("drafter", "is_given", "meant"),
    [(None, True, "none"), ("none", True, "none"), ("prompt-lookup:3", False, "prompt-lookup:3")],
)
def test_it_means_no_drafter(drafter: str | None, is_given: bool, meant: str):
    values: dict[str, Any] = {"drafter": drafter, "no_speculation": is_given}
    settle_speculation(values)
    assert values == {"drafter": meant}


def test_with_another_drafter_it_is_refused():
    with pytest.raises(click.UsageError, match="contradicts --drafter prompt-lookup; give one of them"):
        settle_speculation({"drafter": "prompt-lookup", "no_speculation": True})
