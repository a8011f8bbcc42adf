"""What is noted of a request: a line of the log, figures for the metrics; no content, unless asked for."""

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

requests = logging.getLogger("kakeya.requests")


@dataclass
class Record:
    """One request, filled in as it goes on its way.

    Attributes:
        method, path: of HTTP.
        client: its address.
        status: of the answer; 499 where the client had gone before there was one.
        model, channel, drafter: that served it.
        stream: whether it was streamed.
        prompt_tokens, cached_tokens, completion_tokens: of the usage.
        drafted, accepted, verify_rounds: of speculation.
        first_s: until the first token was there, since the request came.
        seconds: until the last byte.
        finish: why the answer ended; gone where the client left before.
        error: the code of a refusal.
        content: prompt and answer, where they are logged.
        owner: whose key it came with, a part of its digest; empty without keys.
    """

    method: str
    path: str
    client: str
    started: float = field(default_factory=perf_counter)
    status: int = 0
    model: str | None = None
    channel: str | None = None
    drafter: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verify_rounds: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    finish: str | None = None
    error: str | None = None
    content: dict[str, str] | None = None
    owner: str = ""

    def saw_tokens(self, count: int) -> None:
        """Tokens are there."""
        self.completion_tokens += count
        if self.first_s is None:
            self.first_s = perf_counter() - self.started

    def end(self) -> None:
        """The last byte was sent, or will never be."""
        self.seconds = perf_counter() - self.started
        self.status = self.status or 499

    def line(self) -> str:
        """One JSON object; what is unknown or zero is left out."""
        fields = asdict(self)
        for name in ("started", "owner"):
            del fields[name]
        told: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        for name, value in fields.items():
            if value:  # zeros say nothing that their absence does not
                told[name] = round(value, 6) if isinstance(value, float) else value
        return json.dumps(told)


def log(record: Record) -> None:
    """Write a request to the log."""
    requests.info("%s", record.line())
