"""What a runner attests of a finished request, as in-toto statements that other tools verify.

Each is made of the result alone, so that a reader can tell what it should say. See docs/attestations.md.
Sources: https://in-toto.io/Statement/v1, https://in-toto.io/attestation/svr/v0.2,
https://in-toto.io/attestation/test-result/v0.1, https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bridge.errors import ResultError
from bridge.protocol.result import ATTESTATION_NAMES, RESULT_NAME, Result, Status, parse_result
from evidence_format.paired import NAME as PAIRED
from evidence_format.parse import parse

STATEMENT = "https://in-toto.io/Statement/v1"
SVR, TEST_RESULT = (
    "https://in-toto.io/attestation/svr/v0.2",
    "https://in-toto.io/attestation/test-result/v0.1",
)
PROVENANCE = "https://slsa.dev/provenance/v1"
_KINDS = dict(zip(ATTESTATION_NAMES, (SVR, TEST_RESULT, PROVENANCE), strict=True))
BUILD_TYPE = "urn:kakeya-mac:job:v1"
# Properties of the verification result; for each claim that the gate accepted, `CLAIM` with its name, too.
JOB_PASSED, GATE_PASSED = "KAKEYA_MAC_JOB_PASSED", "KAKEYA_MAC_GATE_PASSED"
COMMIT_MEASURED, CLAIM = "KAKEYA_MAC_COMMIT_MEASURED", "KAKEYA_MAC_CLAIM_"

Json = dict[str, Any]


def statements(data: bytes, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The statements about a result by the path of their envelope.

    `data` is the exact ``result.json``, `files` are the contents of the files that it lists, by path.
    """
    result = parse_result(data)
    subjects = _subjects(result, data)
    predicates = (_verification(result, files), _test_result(result), _provenance(result))
    made: dict[str, bytes] = {}
    for (path, kind), predicate in zip(_KINDS.items(), predicates, strict=True):
        statement = {"_type": STATEMENT, "subject": subjects, "predicateType": kind, "predicate": predicate}
        made[path] = json.dumps(statement, separators=(",", ":"), sort_keys=True).encode()
    return made


def check(path: str, statement: bytes, data: bytes) -> None:
    """Raise a `ResultError` where a signed statement is of another kind or another result."""
    try:
        document = json.loads(statement)
        said = [document[name] for name in ("_type", "predicateType", "subject")]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ResultError(f"{path} holds no in-toto statement: {type(error).__name__}") from None
    if said[:2] != [STATEMENT, kind := _KINDS[path]]:
        raise ResultError(f"{path} holds another statement than {kind}")
    if said[2] != _subjects(parse_result(data), data):
        raise ResultError(
            f"{path} is about other files or another commit than this result: it was copied here"
        )


def _subjects(result: Result, data: bytes) -> list[Json]:
    """The reports, ``result.json`` and the workload commit, where the request named one."""
    reports = [file for file in result.files if file.role in ("evidence", "report")]
    found: list[Json] = [{"name": file.path, "digest": {"sha256": file.sha256}} for file in reports]
    found.append({"name": RESULT_NAME, "digest": {"sha256": hashlib.sha256(data).hexdigest()}})
    return found + _commit("workload", result.workload_sha)


def _verification(result: Result, files: Mapping[str, bytes]) -> Json:
    """The gate's verdict; what did not pass is not named (Simple Verification Result)."""
    properties: list[str] = []
    if result.verdict.status is Status.PASSED:
        reports = [file.path for file in result.files if file.role == "evidence"]
        properties.append(JOB_PASSED)
        properties += [GATE_PASSED] if reports else []
        properties += [COMMIT_MEASURED] if result.engine_source == "workload" else []
        judged = [path for path in reports if path != PAIRED]  # the record of a paired run has no claims
        claims = {claim.name for path in judged for claim in parse(files[path]).claims}
        properties += [CLAIM + name.upper() for name in sorted(claims)]
    verifier = {"id": f"urn:kakeya-mac:gate:{result.runner.version}", "policies": _preset(result)}
    return {"verifier": verifier, "timeCreated": result.finished_at, "properties": properties}


def _test_result(result: Result) -> Json:
    """How the job ended; its two tests are the ``job``, which ran to its end, and the ``gate``."""
    status = result.verdict.status
    has_report = any(file.role == "evidence" for file in result.files)
    tests = {"job": status in (Status.PASSED, Status.REJECTED)}
    if status is Status.REJECTED or (status is Status.PASSED and has_report):
        tests["gate"] = status is Status.PASSED
    return {
        "result": "PASSED" if status is Status.PASSED else "FAILED",
        "configuration": [*_preset(result), *_commit("request", result.request_commit)],
        "passedTests": [name for name, passed in tests.items() if passed],
        "warnedTests": [],
        "failedTests": [name for name, passed in tests.items() if not passed],
    }


def _provenance(result: Result) -> Json:
    """How the result came about: who asked for what, from which commits, on which machine."""
    runner = result.runner
    logs = [file for file in result.files if file.role not in ("evidence", "report")]
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"preset": result.preset, "params": result.params, "nonce": result.nonce},
            "internalParameters": {
                "engineSource": result.engine_source,
                "machine": runner.machine,
                "tools": result.tools,
            },
            "resolvedDependencies": [
                *_commit("workload", result.workload_sha),
                *_commit("request", result.request_commit),
                *_preset(result),
            ],
        },
        "runDetails": {
            "builder": {
                "id": f"urn:kakeya-mac:runner:{runner.id}",
                "version": {"kakeya-mac": runner.version},
            },
            "metadata": {
                "invocationId": f"{result.nonce}/{result.attempt}",
                "startedOn": result.started_at,
                "finishedOn": result.finished_at,
            },
            "byproducts": [{"name": file.path, "digest": {"sha256": file.sha256}} for file in logs],
        },
    }


def _preset(result: Result) -> list[Json]:
    """The file of the preset, whose rules the gate applied; nothing where the runner knows no such preset."""
    digest = result.preset_digest
    return [] if digest is None else [{"name": f"preset {result.preset}", "digest": {"sha256": digest}}]


def _commit(name: str, sha: str | None) -> list[Json]:
    return [] if sha is None else [{"name": name, "digest": {"gitCommit": sha}}]
