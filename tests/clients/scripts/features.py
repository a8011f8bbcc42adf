"""What the scripts of Python clients share: the server, the prompts, and the lines they print.

A script runs in its client's environment, where nothing else of this project is. Each feature is a JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Any

GIVEN: dict[str, Any] = json.loads(os.environ["KAKEYA_CLIENTS"])
URL: str = GIVEN["url"]  # with /v1
ROOT: str = GIVEN["root"]  # without
KEY: str = GIVEN["key"]
LIST: str = GIVEN["list"]  # what the shipped pair answers with LISTED and more
LISTED: str = GIVEN["listed"]
WEATHER: dict[str, Any] = GIVEN["weather"]  # a tool as chat completions have it
ASKED: str = GIVEN["asked"]  # what the model `heart` answers with a call of WEATHER for Oslo
TOLD: str = GIVEN["told"]  # what the tool tells
ANSWER: str = GIVEN["answer"]  # what `heart` makes of it
RIDDLE: str = GIVEN["riddle"]  # what `heart` answers with THOUGHT, its reasoning, and WORD
THOUGHT: str = GIVEN["thought"]
WORD: str = GIVEN["word"]
SCHEMA: dict[str, Any] = GIVEN["schema"]
OSLO = {"city": "Oslo"}


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def version(package: str) -> None:
    """Tell which version of the client this is."""
    tell(version=installed_version(package))


def feature(protocol: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Run the function at once, and tell whether it raised; what it returns is told as the detail."""

    def run(function: Callable[[], Any]) -> Callable[[], Any]:
        began, ok = time.monotonic(), True
        try:
            detail = function()
        except Exception as error:  # whatever the client raises
            traceback.print_exc(file=sys.stderr)
            ok, detail = False, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 2)
        tell(protocol=protocol, feature=name, ok=ok, detail=str(detail)[:300], seconds=seconds)
        return function

    return run


def check_listed(text: str) -> str:
    """Refuse a text that is not the shipped pair's answer to LIST."""
    if not text.startswith(LISTED):
        raise AssertionError(f"the answer does not begin with {LISTED!r}: {text!r}")
    return text


def check_same(found: Any, expected: Any) -> Any:
    if found != expected:
        raise AssertionError(f"{found!r} instead of {expected!r}")
    return found


def check_parts(parts: list[str]) -> list[str]:
    """Refuse a stream that came in one piece."""
    if len([part for part in parts if part]) < 2:
        raise AssertionError(f"it came in one piece: {parts!r}")
    return parts


def check_schema(value: Any) -> Any:
    """Refuse what SCHEMA forbids."""
    properties = SCHEMA["properties"]
    if isinstance(value, str):
        value = json.loads(value)
    check_same(set(value), set(properties))
    if value["color"] not in properties["color"]["enum"] or not 1 <= value["count"] <= 9:
        raise AssertionError(f"the schema forbids {value}")
    return value


def absent(protocol: str, name: str, why: str) -> None:
    """Tell of a feature that the client has not."""
    tell(protocol=protocol, feature=name, ok=None, detail=why)
