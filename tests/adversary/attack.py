"""What a hostile request is, as data, and the builder that makes a commit of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from bridge.protocol import refs
from bridge.protocol.manifest import format_time
from bridge.protocol.result import Reason
from tests.adversary.trees import FOLDER, PLAIN, Row, Rows, write
from tests.objects import Objects

# In a table: a file that must not be made, and a server (host:port) that must not be contacted.
CANARY, SERVER = "@CANARY@", "@SERVER@"
# In a table: the value is left out, or is the one that an honest request has under another name.
ABSENT = object()
NONCE, WORKLOAD = "@NONCE@", "@WORKLOAD@"


@dataclass(frozen=True)
class Request:
    """One hostile request.

    Attributes:
        expected: With what reason it must be refused; ``ok``: it is harmless and must be served as it says.
        fields: What its manifest says in addition to an honest one; `ABSENT` leaves a key out.
        swap: Bytes of the manifest replaced by others, once each.
        raw: The whole manifest; None: as the fields say.
        workload: Rows of the workload commit, its parent.
        outside: Rows of the request commit outside ``.mac-bridge``.
        inside: Rows of ``.mac-bridge`` next to ``request.json``; one of that name replaces it.
        parents: How many of the workload are its parents.
        signature: Bytes of ``request.json.sig``.
        age: How long before now it was made.
        message: Of the request commit.
        whole: All its objects are there; git's own server takes no others.
    """

    expected: Reason
    fields: Mapping[str, Any] = field(default_factory=dict)
    swap: tuple[tuple[bytes, bytes], ...] = ()
    raw: bytes | None = None
    workload: Rows = ()
    outside: Rows = ()
    inside: Rows = ()
    parents: Literal[0, 1, 2, 3] = 1
    signature: bytes | None = None
    age: timedelta = timedelta(0)
    message: str = "hostile\n"
    whole: bool = True


Table = Mapping[str, Request]


@dataclass(frozen=True)
class HostileCommit:
    """A hostile request as a commit."""

    name: str
    attack: Request
    nonce: str
    branch: str
    commit: str


@dataclass
class CommitBuilder:
    """Makes commits of hostile requests.

    Args:
        objects: Writes into the repository.
        audience: Of an honest request.
        canary: The file that must never be made.
        server: ``host:port`` that must never be talked to.
    """

    objects: Objects
    audience: str
    canary: Path
    server: str = "127.0.0.1:9"

    def make(self, name: str, attack: Request) -> HostileCommit:
        """The commit of one hostile request, under a nonce of its own."""
        now = datetime.now(UTC).replace(microsecond=0) - attack.age
        nonce = refs.new_nonce(now, os.urandom(6))
        readme = Row(PLAIN, b"README.md", b"a workload\n")
        rows = (readme, *self._meant(attack.workload))
        workload = self.objects.commit(write(self.objects, rows), [], "workload\n")
        document = {
            "schema_version": 1,
            "nonce": nonce,
            "preset": "echo",
            "workload_sha": workload,
            "result_ref": refs.request_ref("echo", nonce, None),
            "created_at": format_time(now),
            "expires_at": format_time(now + timedelta(hours=1)),
            "audience": self.audience,
        }
        for key, value in attack.fields.items():
            if value is ABSENT:
                del document[key]
            else:
                document[key] = value
        data = json.dumps(document).encode() if attack.raw is None else attack.raw
        data = self._meant(
            data.replace(NONCE.encode(), nonce.encode()).replace(WORKLOAD.encode(), workload.encode())
        )
        for old, new in attack.swap:
            assert old in data, (name, old)
            data = data.replace(old, self._meant(new), 1)
        inside = {row.name: row for row in self._meant(attack.inside)}
        inside.setdefault(b"request.json", Row(PLAIN, b"request.json", data))
        if attack.signature is not None:
            inside[b"request.json.sig"] = Row(PLAIN, b"request.json.sig", attack.signature)
        dotted = Row(FOLDER, b".mac-bridge", tuple(inside.values()))
        outside = self._meant(attack.outside)
        over = {row.name for row in outside}
        kept = tuple(row for row in rows if row.name not in over)
        tree = write(self.objects, (*kept, dotted, *outside))
        other = self.objects.commit(write(self.objects, rows), [workload], "another\n")
        parents = [workload, other, workload]
        commit = self.objects.commit(tree, parents[: attack.parents], attack.message)
        return HostileCommit(name, attack, nonce, f"{refs.BRANCHES}echo-{nonce}", commit)

    def _meant(self, value: Any) -> Any:
        """A table's value with the canary and the server in it."""
        if isinstance(value, bytes):
            return value.replace(CANARY.encode(), os.fsencode(self.canary)).replace(
                SERVER.encode(), self.server.encode()
            )
        if isinstance(value, Row):
            return Row(value.mode, self._meant(value.name), self._meant(value.content))
        if isinstance(value, tuple):
            return tuple(self._meant(item) for item in value)
        return value
