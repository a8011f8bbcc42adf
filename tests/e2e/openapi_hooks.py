"""What schemathesis makes of the published document, led past the first refusal: hooks, loaded by its CLI.

Names of models and channels are free text in the document, and nearly all of what is made up is refused with
404 before anything else is looked at. So most are given a name that there is, and answers stay short. Every
third request leaves out the path's version, as clients with another base URL do.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MODELS = ("demo", "demo@affine8", "demo@sink-window-256")
CHANNELS = ("native", "rotated4")
SHORT = 4  # tokens of an answer
VERSION = "/v1"


@schemathesis.hook
def map_body(_: Any, body: Any) -> Any:
    """The same body, of an existing model and with a short answer, but for one in eight."""
    if not isinstance(body, dict):
        return body
    draw = len(repr(body))
    if draw % 8 == 0:
        return body
    led = dict(body)
    if isinstance(body.get("model"), str):
        led["model"] = MODELS[draw % len(MODELS)]
    if isinstance(body.get("kv_channel"), str):
        led["kv_channel"] = CHANNELS[draw % len(CHANNELS)]
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and body[name] > SHORT:
            led[name] = SHORT
    if "input" in led and type(led.get("max_output_tokens", SHORT)) is int:
        led["max_output_tokens"] = SHORT  # without it an answer may be as long as the server allows
    return led


@schemathesis.hook
def before_call(_: Any, case: Any, **__: Any) -> None:
    """The same call at the path without its version, for every third."""
    if case.path.startswith(VERSION) and len(repr((case.body, case.path_parameters, case.query))) % 3 == 0:
        case.path = case.path.removeprefix(VERSION)
