"""The real server in this process, and a client that asks it over HTTP as any other does.

It listens on a free port of 127.0.0.1 or, where a sandbox closes that, on a Unix socket in a new folder.
"""

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Thread
from time import monotonic, sleep
from typing import Any

from pydantic import ValidationError

from engine.cache.stats import KVUse
from engine.decode import Round
from engine.detokenize import text_of
from engine.errors import EngineError
from engine.generate import Outcome
from engine.registry import Registry
from engine.server.scheduler import ModelFinder
from engine.server.schema import ChatCompletion, Provenance, TextCompletion, Usage
from engine.server.serve import ServerSettings, running_server
from engine.stops import Stops
from engine.target.loading import LoadedTarget

LOOPBACK = "127.0.0.1"
TRANSPORTS = ("tcp", "unix")
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
GRACE_S = 10.0  # for what is still decoded when the end is asked for
ENDED_S = 3 * GRACE_S
POLL_S = 0.02


class ServerFault(EngineError):
    """The server did not answer as it must; the message says what it did instead."""


@contextmanager
def served(
    registry: Registry, serving: ServerSettings, find: ModelFinder, *, transport: str | None = None
) -> Iterator["Client"]:
    """Run a server that has loaded its default model for as long as the block lasts."""
    key = secrets.token_urlsafe(24)
    serving = replace(serving, keys=(key,), grace_s=GRACE_S)
    serving.check()
    with listening(transport) as (listener, address), running_server(registry, serving, find) as server:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                server.run(sockets=[listener])
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=run, name="http", daemon=True)
        thread.start()
        try:
            until = monotonic() + ENDED_S
            while not server.started and thread.is_alive() and monotonic() < until:
                sleep(POLL_S)
            if not server.started:
                raise ServerFault(f"the server did not start in {ENDED_S:.0f} s {failed or ''}")
            yield Client(address, key)
        finally:
            server.should_exit = True
            thread.join(ENDED_S)
    if thread.is_alive() or failed:
        raise ServerFault(f"the server did not end in {ENDED_S:.0f} s {failed or ''}")


@contextmanager
def listening(transport: str | None = None) -> Iterator[tuple[socket.socket, int | str]]:
    """A socket that listens by this or the first of `TRANSPORTS` that works here, and its port or path."""
    refused = []
    for name in TRANSPORTS if transport is None else (transport,):
        with tempfile.TemporaryDirectory(prefix="kakeya-") as folder:
            path = os.path.join(folder, "http")
            path = min(path, os.path.relpath(path), key=len)  # such a path may have some hundred characters
            try:
                listener = listen(name, path)
            except OSError as error:
                refused.append(f"{name}: {error.strerror or error}")
                continue
            with listener:
                yield listener, path if name == "unix" else int(listener.getsockname()[1])
            return
    raise EngineError(
        f"this process may not listen, not even for itself ({'; '.join(refused)}); "
        "where it runs in a sandbox, that must leave it a loopback device or Unix sockets in its own folders"
    )


def listen(transport: str, path: str) -> socket.socket:
    """A socket that listens on a free port, or at a path."""
    if transport == "unix":
        return socket.create_server(path, family=socket.AF_UNIX)
    return socket.create_server((LOOPBACK, 0))


@dataclass(frozen=True)
class Answered:
    """The status of HTTP that came back, and the body: JSON read, or text of another kind."""

    status: int
    body: Any  # JSON read, or text of another kind


@dataclass(frozen=True)
class Client:
    """Asks one server, with a connection for each request; what cannot be read is a ServerFault."""

    address: int | str  # a port of 127.0.0.1, or the path of a Unix socket
    key: str | None = None  # sent as a bearer token
    timeout_s: float = 300.0  # without a byte from the server

    @property
    def transport(self) -> str:
        return "tcp" if isinstance(self.address, int) else "unix"

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> Answered:
        with self._asked(path, body) as response:
            data = response.read()
        if response.headers.get_content_type() != "application/json":
            return Answered(response.status, data.decode(errors="replace"))
        return Answered(response.status, _parsed("the answer", data))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any] | None]:
        """The documents of an answer's events, and None for the end; closing it closes the connection."""
        with self._asked(path, body) as response:
            kind = response.headers.get_content_type()
            if response.status != 200 or kind != "text/event-stream":
                raise ServerFault(
                    f"{path} answered {response.status} and {kind} where a stream was asked for"
                )
            ended = False
            while line := response.readline():
                if line.startswith(b"data:"):
                    data = line.removeprefix(b"data:").strip()
                    ended = data == b"[DONE]"
                    yield None if ended else _parsed(path, data)
            if not ended:
                raise ServerFault(f"{path} ended its stream without [DONE]")

    @contextmanager
    def _asked(self, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        method = "GET" if body is None else "POST"
        headers = {"content-type": "application/json"} if body is not None else {}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        port = self.address if isinstance(self.address, int) else None
        with closing(HTTPConnection(LOOPBACK, port, timeout=self.timeout_s)) as connection:
            try:
                if isinstance(self.address, str):
                    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    connection.sock.settimeout(self.timeout_s)
                    connection.sock.connect(self.address)
                connection.request(method, path, data, headers)
                yield connection.getresponse()
            except (OSError, HTTPException) as error:
                raise ServerFault(
                    f"{method} {path} got no whole answer: {type(error).__name__} {error}".strip()
                ) from error


def _parsed(what: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerFault(f"{what} holds what is no JSON: {data[:80]!r}") from None


@dataclass(frozen=True)
class Question:
    """A prompt and the request for it."""

    identifier: str  # of the prompt
    path: str  # of the endpoint
    fields: dict[str, Any]  # of the request
    tokens: list[int]  # of the prompt


@dataclass(frozen=True)
class Answer:
    """A whole answer, read and checked."""

    text: str  # as it was said, reasoning excepted
    split: bool  # whether reasoning or calls of tools are not in the text
    finish: str  # stop or length
    tokens: list[int]
    usage: Usage
    provenance: Provenance


def whole_answer(asked: Question, reply: Answered) -> Answer:
    """The answer in a reply; ServerFault where it is a refusal, malformed, or belongs to another prompt."""
    if reply.status != 200:
        raise ServerFault(f"{asked.identifier} was answered with {reply.status}: {str(reply.body)[:300]}")
    kind = ChatCompletion if asked.path == CHAT_PATH else TextCompletion
    try:
        read: ChatCompletion | TextCompletion = kind.model_validate(reply.body)
    except ValidationError as error:
        raise ServerFault(f"the answer to {asked.identifier} is not as clients expect it: {error}") from None
    if len(read.choices) != 1:
        raise ServerFault(f"{asked.identifier}: the answer has {len(read.choices)} choices, not one")
    finish = read.choices[0].finish_reason
    if read.usage is None or read.x_kakeya is None or finish is None:
        raise ServerFault(f"{asked.identifier}: the answer lacks its usage, x_kakeya or finish_reason")
    check_counts(asked, read.usage, read.x_kakeya)
    split = False
    if isinstance(read, ChatCompletion):
        message = read.choices[0].message
        text, split = message.content or "", bool(message.reasoning or message.tool_calls)
    else:
        text = read.choices[0].text
    finish, how = "length" if finish == "length" else "stop", read.x_kakeya
    return Answer(text, split, finish, how.token_ids or [], read.usage, how)


def check_counts(asked: Question, usage: Usage, how: Provenance) -> None:
    """Raise ServerFault where usage and provenance do not belong to a question, or to each other."""
    read, written = how.prompt_token_ids, how.token_ids
    if read != asked.tokens:
        raise ServerFault(f"{asked.identifier}: the server read other tokens than the prompt's")
    if not written:
        raise ServerFault(f"{asked.identifier}: the answer says no token ids")
    if (usage.prompt_tokens, usage.completion_tokens) != (len(read), len(written)):
        raise ServerFault(
            f"{asked.identifier}: usage says {usage.prompt_tokens} and {usage.completion_tokens} tokens, "
            f"and there are {len(read)} and {len(written)}"
        )


def outcome(asked: Question, answer: Answer, target: LoadedTarget) -> Outcome:
    """The outcome for a row, from what came over HTTP; a text that was split is that of its tokens."""
    how, text = answer.provenance, answer.text
    held, drafters, forwards = how.resident_bytes, how.drafter_resident_bytes, how.drafter_forwards
    if how.rounds is None or held is None or drafters is None or forwards is None:
        raise ServerFault(f"{asked.identifier}: the answer lacks x_kakeya.rounds, which were asked for")
    if answer.split:
        text = text_of(target.tokenizer, answer.tokens, Stops(target.stops), asked.tokens)
    coded = how.coded
    return Outcome(
        tokens=answer.tokens,
        text=text,
        finish=answer.finish,
        prefill_s=how.prefill_s,
        decode_s=how.decode_s,
        rounds=[Round(*each) for each in how.rounds],
        path=f"speculative:{how.drafter}" if how.drafter else "plain:kakeya.decode",
        cache_classes=how.cache_classes,
        resident_bytes=held - drafters,
        kv=KVUse(tuple(coded.layers), coded.values, coded.bytes) if coded else None,
        kept=how.kept_positions,
        drafter_forwards=forwards,
    )
