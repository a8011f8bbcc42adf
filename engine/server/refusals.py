"""A request that is refused: its status, and the error document that OpenAI's clients make exceptions of.

400 invalid_request_error    a value, with ``param`` naming the field; a prompt that does not fit
401 authentication_error     no API key, or another one
403, 408, 413, 415, 421      what the guard in front of the routes does not let in, see `guard`
404 not_found_error          a model or a path that does not exist
405 invalid_request_error    a method that the path does not have
429 rate_limit_error         the queue is full
501 not_implemented_error    a feature of OpenAI's that this server does not have
500 server_error             our own fault, or a model folder that is broken
"""

from typing import Any

from engine.errors import (
    ConfigurationError,
    EngineError,
    GenerationError,
    InputError,
    ModelError,
    PromptError,
    UnknownModel,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "server_error",
}


class Refusal(Exception):
    """Ends a request with a status and an error document."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Refuse.

        Args:
            status: a key of `TYPES`.
            message: what was wrong, with which value, and what to do.
            param: the field of the request, such as ``messages.0.content``.
            code: a word for programs.
            headers: of the answer.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {
            "message": self.message,
            "type": TYPES[self.status],
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class FieldError(ConfigurationError):
    """A field of a request does not go together with the model."""

    def __init__(self, field: str, message: str) -> None:
        """Say which field, and what is wrong."""
        super().__init__(message)
        self.field = field


class ShuttingDownError(GenerationError):
    """The server ends, and with it the request."""


class UnsupportedError(FieldError):
    """A field asks for what this model's engine does not have."""


def unsupported(what: str, param: str | None = None) -> Refusal:
    """The refusal of a feature that is OpenAI's and not ours."""
    return Refusal(501, f"{what} is not supported by this server", param=param, code="unsupported_feature")


def refusal_of(error: EngineError, param: str | None = None) -> Refusal:
    """How an error of the engine is told to a client.

    Args:
        error: what was raised.
        param: the field that most likely caused it, where the error is of input.
    """
    match error:
        case ShuttingDownError():
            return Refusal(503, str(error), code="shutting_down")
        case UnknownModel():
            return Refusal(404, str(error), param="model", code="model_not_found")
        case ModelError():
            return Refusal(500, str(error), code="model_unusable")
        case PromptError():
            return Refusal(400, str(error), param=param or "messages", code="invalid_prompt")
        case UnsupportedError():
            return Refusal(501, str(error), param=error.field, code="unsupported_feature")
        case FieldError():
            return Refusal(400, str(error), param=error.field, code="invalid_value")
        case ConfigurationError() | InputError():
            return Refusal(400, str(error), param=param, code="invalid_value")
    return Refusal(500, str(error), code="generation_failed")
