"""What OpenAI's endpoints have and this server has not: refused by name (501), never silently ignored.

These fields are not part of the published OpenAPI document. Values that ask for nothing (null, false, one
choice) are taken, because clients send them by default.
"""

from collections.abc import Mapping
from typing import Any

from engine.server.refusals import Refusal, unsupported

# field -> (values that ask for nothing, what it would be)
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "more than one choice"),
    "best_of": ((None, 1), "more than one choice"),
    "echo": ((None, False), "echo of the prompt"),
    "suffix": ((None, ""), "insertion before a suffix"),
    "functions": ((None, []), "functions, replaced by tools,"),
    "function_call": ((None, "none"), "function_call, replaced by tool_choice,"),
    "audio": ((None,), "audio"),
    "modalities": ((None, ["text"]), "output other than text"),
    "prediction": ((None,), "predicted output"),
    "web_search_options": ((None,), "web search"),
    "verbosity": ((None, "medium"), "verbosity"),
}
# fields of an answer's message that may be sent back with it
ANSWERED = ("annotations", "audio", "function_call")
# kinds of content besides text
PARTS = ("image_url", "input_image", "image", "input_audio", "file", "video_url")
PATHS = (
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/images",
    "/v1/audio",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning",
    "/v1/assistants",
    "/v1/threads",
)


def refuse_unsupported(fields: Any) -> Any:
    """The fields of a request without those that ask for nothing.

    Raises:
        Refusal: 501, of the first field that asks for what is not there.
    """
    if not isinstance(fields, Mapping):
        return fields
    for name, (nothing, what) in UNSUPPORTED.items():
        value = fields.get(name)
        if name in {"n", "best_of"} and value is not None and (type(value) is not int or value < 1):
            shown = ascii(value)[:100]
            raise Refusal(
                400, f"{name} must be a number from 1, not {shown}", param=name, code="invalid_value"
            )
        if not any(value is each or (type(value) is type(each) and value == each) for each in nothing):
            raise unsupported(what, name)
    taken = {name: value for name, value in fields.items() if name not in UNSUPPORTED}
    if isinstance(messages := fields.get("messages"), list):
        taken["messages"] = [_message(message, index) for index, message in enumerate(messages)]
    if (
        isinstance(prompts := fields.get("prompt"), list)
        and any(isinstance(each, str | list) for each in prompts)
        and len(prompts) != 1
    ):
        raise Refusal(
            400, f"a request takes one prompt, not {len(prompts)}", param="prompt", code="invalid_value"
        )
    return taken


def _message(message: Any, index: int) -> Any:
    """A message without the fields of answers that say nothing, which come back with a conversation."""
    if not isinstance(message, Mapping):
        return message
    _refuse_parts(message, f"messages.{index}.content")
    for name in ANSWERED:
        if message.get(name):
            raise unsupported(f"{name} in a message", f"messages.{index}.{name}")
    return {name: value for name, value in message.items() if name not in ANSWERED}


def _refuse_parts(message: Mapping[str, Any], param: str) -> None:
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PARTS:
            raise unsupported(f"content of the type {kind}", f"{param}.{index}")
