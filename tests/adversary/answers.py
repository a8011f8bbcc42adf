"""Forged results: what anyone with push rights may put in place of an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge import signing
from bridge.bus.results import TRAILER, ExpectedRequest, FetchedResult
from bridge.git.repo import FileChange
from bridge.protocol.result import RESULT_NAME, RESULT_ROOT, RESULT_SIGNATURE_NAME
from tests.adversary.attack import ABSENT
from tests.fixtures.repo import allowed_line

NONCE, OTHER_NONCE = "20260301t120000z0123456789ab", "20260301t120001z0123456789ab"
REQUEST, WORKLOAD, COMMIT = "b" * 40, "a" * 40, "c" * 40
FILES = {"report.json": b'{"kind": "probe"}\n', "log.txt": b"hello\n"}
FOLDER = f"{RESULT_ROOT}/{NONCE}"


@dataclass(frozen=True)
class Answer:
    """One forged result.

    Attributes:
        fields: What ``result.json`` says in addition to the honest one; `ABSENT` leaves a key out.
        swap: Bytes of it replaced by others.
        files: Other contents of the folder; `ABSENT`: missing.
        changes: What the commit changes outside the folder: (status, path, mode).
        parents: Of the commit.
        above: How many commits lie on the request.
        message: Of the commit; ``{digest}`` is that of ``result.json``.
        signer: Whose key signed: `trusted`, `mallory`, or none.
        namespace: For what the signature was made.
        signed: The bytes that were signed; None: those of ``result.json``.
        signature: The very bytes of the signature.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    swap: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[tuple[str, str, str], ...] = ()
    parents: tuple[str, ...] = (REQUEST,)
    above: int = 1
    message: str = f"kakeya-mac result: passed\n\n{TRAILER}: {{digest}}\n"
    signer: str | None = "trusted"
    namespace: str = signing.RESULT_NAMESPACE
    signed: bytes | None = None
    signature: bytes | None = None


def document() -> dict[str, Any]:
    """What an honest ``result.json`` says."""
    return {
        "schema_version": 1,
        "nonce": NONCE,
        "request_commit": REQUEST,
        "workload_sha": WORKLOAD,
        "preset": "probe",
        "preset_digest": "0" * 64,
        "params": {},
        "engine_source": "installed",
        "runner": {"name": "mac", "id": "0123456789abcdef", "version": "0.1.0", "machine": {}},
        "attempt": 1,
        "started_at": "2026-03-01T12:00:00Z",
        "finished_at": "2026-03-01T12:00:01Z",
        "phase_seconds": {"running": 1.0},
        "commands": [],
        "files": [
            {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "role": "other"}
            for path, data in FILES.items()
        ],
        "verdict": {"status": "passed", "reason": "ok", "message": "", "violations": []},
        "tools": {},
    }


EXPECTED = ExpectedRequest(NONCE, REQUEST, WORKLOAD, "probe")


def fetched(answer: Answer, sign: Callable[[str, str, bytes], bytes]) -> FetchedResult:
    """The forged result as a client finds it.

    Args:
        answer: The forgery.
        sign: Signs bytes with the key of that name, in a namespace.
    """
    fields = {key: value for key, value in (document() | dict(answer.fields)).items() if value is not ABSENT}
    text = json.dumps(fields)
    for old, new in answer.swap:
        assert old in text, old
        text = text.replace(old, new, 1)
    data = text.encode()
    files: dict[str, Any] = {**FILES, RESULT_NAME: data}
    if answer.signature is not None:
        files[RESULT_SIGNATURE_NAME] = answer.signature
    elif answer.signer is not None:
        files[RESULT_SIGNATURE_NAME] = sign(answer.signer, answer.namespace, answer.signed or data)
    files = {path: held for path, held in (files | dict(answer.files)).items() if held is not ABSENT}
    changes = [FileChange("A", f"{FOLDER}/{path}", "100644", "d" * 40) for path in files]
    changes += [FileChange(status, path, mode, "e" * 40) for status, path, mode in answer.changes]
    return FetchedResult(
        nonce=NONCE,
        ref=f"refs/heads/mac-bridge/probe-{NONCE}",
        commit=COMMIT,
        parents=answer.parents,
        above=answer.above,
        changes=tuple(changes),
        message=answer.message.format(digest=hashlib.sha256(data).hexdigest()),
        files=files,
        expected=EXPECTED,
    )


def _says(**fields: Any) -> Answer:
    return Answer(fields)


def _changes(status: str, path: str, mode: str = "100644") -> Answer:
    return Answer(changes=((status, path, mode),))


def _lists(**changes: Any) -> Answer:
    """Its first file is listed otherwise."""
    first, *rest = document()["files"]
    return Answer({"files": [{**first, **changes}, *rest]})


FORGED: Mapping[str, Answer] = {
    "unsigned": Answer(signer=None),
    "signed-by-another-key": Answer(signer="mallory"),
    "signed-as-a-request": Answer(namespace=signing.REQUEST_NAMESPACE),
    "signed-as-a-cancel-request": Answer(namespace=signing.CANCEL_NAMESPACE),
    "signed-as-a-registration": Answer(namespace=signing.RUNNER_NAMESPACE),
    "signed-as-a-claim": Answer(namespace=signing.CLAIM_NAMESPACE),
    "signed-as-a-file": Answer(namespace="file"),
    "signed-other-bytes": Answer(signed=b"{}"),
    "signature-of-rubbish": Answer(signature=b"rubbish"),
    "signature-of-nothing": Answer(signature=b""),
    "signature-in-a-frame": Answer(
        signature=b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"
    ),
    "signature-without-end": Answer(signature=b"-----BEGIN SSH SIGNATURE-----\n" + b"A" * (1 << 20)),
    "of-another-request": _says(nonce=OTHER_NONCE),
    "of-another-request-commit": _says(request_commit="f" * 40),
    "of-another-workload": _says(workload_sha="f" * 40),
    "of-no-workload": _says(workload_sha=None),
    "of-another-preset": _says(preset="tests"),
    "of-no-preset": _says(preset=None),
    "an-unknown-status": _says(verdict={"status": "won", "reason": "ok"}),
    "an-unknown-reason": _says(verdict={"status": "passed", "reason": "luck"}),
    "a-verdict-that-is-missing": _says(verdict=ABSENT),
    "an-unknown-key": _says(accepted=True),
    "another-schema": _says(schema_version=2),
    "a-schema-that-is-true": _says(schema_version=True),
    "seconds-that-are-no-number": Answer(swap=(('"running": 1.0', '"running": NaN'),)),
    "seconds-beyond-floats": Answer(swap=(('"running": 1.0', '"running": 1e999'),)),
    "a-key-twice": Answer(swap=(("{", '{"nonce": "x", '),)),
    "an-escape-in-the-message": _says(
        verdict={"status": "failed", "reason": "exit_code", "message": "\x1b]52;c;aWQ=\x07"}
    ),
    "an-override-in-the-message": _says(
        verdict={"status": "failed", "reason": "exit_code", "message": "\u202eko"}
    ),
    "a-zero-width-space-in-a-tool": _says(tools={"py\u200bthon": "3"}),
    "a-runner-that-is-a-path": _says(
        runner={"name": "../mac", "id": "0123456789abcdef", "version": "1", "machine": {}}
    ),
    "an-attempt-of-nothing": _says(attempt=0),
    "a-time-that-does-not-exist": _says(finished_at="2026-02-30T00:00:00Z"),
    "a-file-that-climbs": _lists(path="../../x"),
    "a-file-of-an-absolute-path": _lists(path="/etc/passwd"),
    "a-file-that-is-hidden": _lists(path=".git/config"),
    "a-file-that-is-an-option": _lists(path="-rf"),
    "a-file-with-a-newline": _lists(path="report\n.json"),
    "a-file-in-other-letters": _lists(path="r\u0435port.json"),
    "a-file-of-another-digest": _lists(sha256="0" * 64),
    "a-file-of-another-size": _lists(bytes=1),
    "a-file-below-no-size": _lists(bytes=-1),
    "a-file-that-is-the-result": _lists(path=RESULT_NAME),
    "a-file-listed-twice": Answer({"files": document()["files"] * 2}),
    "a-file-not-listed": Answer(files={"evil.sh": b"#!/bin/sh\n"}),
    "a-file-missing": Answer(files={"report.json": ABSENT}),
    "a-file-altered": Answer(files={"report.json": b"{}"}),
    "a-log-altered": Answer(files={"log.txt": b"hullo\n"}),
    "no-result": Answer(files={RESULT_NAME: ABSENT}),
    "the-result-altered": Answer(files={RESULT_NAME: json.dumps(document() | {"attempt": 2}).encode()}),
    "no-trailer": Answer(message="kakeya-mac result: passed\n"),
    "the-trailer-twice": Answer(message=f"x\n\n{TRAILER}: {{digest}}\n{TRAILER}: {{digest}}\n"),
    "the-trailer-of-other-bytes": Answer(message=f"x\n\n{TRAILER}: {'0' * 64}\n"),
    "changes-a-file-elsewhere": _changes("M", "README.md"),
    "adds-a-file-elsewhere": _changes("A", "evil.py"),
    "adds-a-workflow": _changes("A", ".github/workflows/x.yml"),
    "deletes-a-file-elsewhere": _changes("D", "README.md", "000000"),
    "changes-its-request": _changes("M", ".mac-bridge/request.json"),
    "adds-another-results-file": _changes("A", f"{RESULT_ROOT}/{OTHER_NONCE}/result.json"),
    "adds-a-folder-of-a-similar-name": _changes("A", f"{FOLDER}x/report.json"),
    "adds-a-link": _changes("A", f"{FOLDER}/link", "120000"),
    "adds-a-submodule": _changes("A", f"{FOLDER}/module", "160000"),
    "adds-a-program": _changes("A", f"{FOLDER}/run.sh", "100755"),
    "adds-a-folder-that-was-not-opened": _changes("A", f"{FOLDER}/deep", "040000"),
    "changes-an-earlier-result": _changes("M", f"{FOLDER}/report.json"),
    "stands-on-another-commit": Answer(parents=("f" * 40,)),
    "is-a-merge": Answer(parents=(REQUEST, "f" * 40)),
    "lies-on-another-result": Answer(above=2),
    "lies-on-thirty": Answer(above=30),
}


@dataclass(frozen=True)
class Keys:
    """A trusted runner's key, a stranger's key, and the client's list.

    Attributes:
        folder: Where they lie.
    """

    folder: Path

    @property
    def trusted(self) -> Path:
        """The client's list of runner keys."""
        return self.folder / "trusted_runners"

    def make(self) -> None:
        """Make them."""
        for name in ("trusted", "mallory"):
            signing.ensure_key(self.folder / name, name)
        public = signing.public_key(self.folder / "trusted")
        self.trusted.write_text(allowed_line(public, "mac", signing.RESULT_NAMESPACE))

    def sign(self, name: str, namespace: str, data: bytes) -> bytes:
        """Sign with one of them."""
        return signing.sign(self.folder / name, namespace, data)
