"""``--no-speculation`` is ``--drafter none``, and contradicts another drafter."""

from __future__ import annotations

from typing import Any

import click
import pytest

from engine.cli.options import settle_speculation


@pytest.mark.parametrize("drafter", [None, "none"])
def test_it_means_no_drafter(drafter: str | None):
    values: dict[str, Any] = {"drafter": drafter, "no_speculation": True}
    settle_speculation(values)
    assert values == {"drafter": "none"}


def test_without_it_the_drafter_stays():
    values: dict[str, Any] = {"drafter": "prompt-lookup:3", "no_speculation": False}
    settle_speculation(values)
    assert values == {"drafter": "prompt-lookup:3"}


def test_with_another_drafter_it_is_refused():
    with pytest.raises(click.UsageError, match="contradicts --drafter prompt-lookup; give one of them"):
        settle_speculation({"drafter": "prompt-lookup", "no_speculation": True})
