"""Hostile claims, registrations, cancel requests, presets, policies and reports.

Each is an honest document with something changed in it, as data; `honest` has the honest ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.adversary.attack import ABSENT


@dataclass(frozen=True)
class Record:
    """One hostile document.

    Attributes:
        fields: What it says in addition to an honest one; `ABSENT` leaves a key out.
        swap: Bytes of it replaced by others, once each.
        raw: The whole document; None: as the fields say.
        words: Part of what its reader says of it.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    swap: tuple[tuple[bytes, bytes], ...] = ()
    raw: bytes | None = None
    words: str = ""

    def made_of(self, honest: bytes) -> bytes:
        """The document."""
        data = honest if self.raw is None else self.raw
        if self.fields:
            document = json.loads(honest)
            document.update({key: value for key, value in self.fields.items() if value is not ABSENT})
            for key in [key for key, value in self.fields.items() if value is ABSENT]:
                del document[key]
            data = json.dumps(document).encode()
        for old, new in self.swap:
            assert old in data, old
            data = data.replace(old, new, 1)
        return data


Records = Mapping[str, Record]


def _of(**fields: Any) -> Record:
    return Record(fields)


def _swap(old: str, new: str) -> Record:
    return Record(swap=((old.encode(), new.encode()),))


# What is no document of any kind.
_RUBBISH: Records = {
    "nothing": Record(raw=b""),
    "a-list": Record(raw=b"[]"),
    "not-utf-8": Record(raw=b'{"a": "\xff"}'),
    "nul-bytes": Record(raw=b"\0" * 64),
    "deep": Record(raw=b'{"a":' * 5000),
    "an-lfs-pointer": Record(raw=b"version https://git-lfs.github.com/spec/v1\n"),
}
# What every strict reader of JSON refuses in a document with a key of this name.
_STRICT: Records = {
    **_RUBBISH,
    "a-key-twice": Record(swap=((b"{", b'{"schema_version": 1, '),)),
    "nan": Record(swap=((b"{", b'{"x": NaN, '),)),
    "more-than-a-float": Record(swap=((b"{", b'{"x": 1e999, '),)),
    "an-unknown-key": _of(argv=["sh"]),
    "another-schema": _of(schema_version=2),
    "a-schema-that-is-true": _of(schema_version=True),
    "rubbish-after-it": Record(swap=((b"{", b"{} {"),)),
}

CLAIMS: Records = {
    **_STRICT,
    "no-nonce": _of(nonce=ABSENT),
    "another-nonce": _of(nonce="20200101t000000z000000000000"),
    "a-nonce-that-is-a-path": _of(nonce="../../x"),
    "a-commit-that-is-an-option": _of(request_commit="--upload-pack=x"),
    "a-process-of-no-number": _of(pid=-1),
    "a-process-beyond-any": _of(pid=1 << 40),
    "an-attempt-of-nothing": _of(attempt=0),
    "an-attempt-beyond-counting": _of(attempt=10**9),
    "an-attempt-of-four-thousand-digits": _swap('"attempt": 1', '"attempt": 1' + "0" * 4000),
    "a-beat-before-the-first": _of(beat=-1),
    "a-beat-beyond-counting": _of(beat=1 << 60),
    "a-lease-of-nothing": _of(lease_s=0),
    "a-negative-lease": _of(lease_s=-1),
    "a-lease-without-end": _swap('"lease_s": 120.0', '"lease_s": Infinity'),
    "an-unknown-phase": _of(phase="winning"),
    "a-time-that-does-not-exist": _of(updated_at="2026-02-30T00:00:00Z"),
    "a-time-of-another-zone": _of(updated_at="2026-03-01T12:00:00+02:00"),
    "progress-without-end": _of(progress={"done": 1 << 60, "total": 1}),
    "thousand-lines-of-log": _of(log_tail=["x"] * 1000),
    "a-line-without-end": _of(log_tail=["x" * 5000]),
    "a-log-that-is-a-text": _of(log_tail="x"),
    "a-runner-without-end": _of(runner="x" * 1000),
    "an-id-that-is-a-path": _of(runner_id="../../../../etc/x"),
    "a-session-in-capitals": _of(session="A" * 16),
    "a-megabyte-of-blanks": Record(raw=b" " * (5 << 20)),
}

REGISTRATIONS: Records = {
    **_STRICT,
    "a-name-that-is-a-path": _of(name="../mac"),
    "a-name-that-is-an-option": _of(name="--mac"),
    "a-name-with-a-newline": _of(name="mac\n"),
    "an-override-in-the-audience": _of(audience="example.org/\u202eoper"),
    "an-escape-in-the-version": _of(version="\x1b]0;owned\x07"),
    "a-zero-width-space-in-a-tool": _of(tools={"py\u200bthon": "3"}),
    "a-key-that-is-a-command": _of(public_key='command="sh" ssh-ed25519 AAAA'),
    "a-key-of-two-lines": _of(public_key="ssh-ed25519 " + "A" * 64 + "\nssh-ed25519 " + "B" * 64),
    "a-key-with-a-principal": _of(public_key="* ssh-ed25519 " + "A" * 64),
    "an-interval-of-nothing": _of(interval_s=0),
    "an-interval-of-a-year": _of(interval_s=3e7),
    "an-unknown-state": _of(state="root"),
    "presets-by-the-thousand": _of(presets=[{}] * 1000),
    "a-preset-without-a-digest": _of(presets=[{"name": "x"}]),
    "a-machine-that-nests": _of(machine={"a": {"b": 1}}),
    "a-machine-beyond-floats": Record(swap=((b'"machine": {}', b'"machine": {"a": 1e400}'),)),
    "models-by-the-thousand": _of(models={str(n): "x" for n in range(1000)}),
    "limits-that-are-missing": _of(limits=ABSENT),
    "seen-in-no-time": _of(seen_at="9999-99-99T00:00:00Z"),
}

CANCELS: Records = {
    **_STRICT,
    "a-commit-that-is-an-option": _of(request_commit="--all"),
    "a-commit-in-capitals": _of(request_commit="A" * 40),
    "a-nonce-with-a-newline": _of(nonce="20260301t120000z0123456789ab\n"),
    "an-escape-in-the-reason": _of(reason="\x1b[2J"),
    "an-override-in-the-name": _of(requested_by="\u202eroot"),
    "a-reason-without-end": _of(reason="x" * 600),
    "a-reason-of-two-lines": _of(reason="a\nb"),
    "a-time-as-a-number": _of(created_at=1772366400),
    "more-than-is-read": Record(raw=b" " * (9 * 1024)),
    "no-time": _of(created_at=ABSENT),
}

PRESETS: Records = {
    "not-utf-8": Record(raw=b'name = "\xff"'),
    "not-toml": Record(raw=b"{}[}"),
    "json": Record(raw=b'{"name": "guarded"}'),
    "nul-bytes": Record(raw=b"\0" * 64),
    "more-than-is-read": Record(raw=b"#" * (65 * 1024)),
    "deep-lists": Record(raw=b"a = " + b"[" * 30_000),
    "deep-tables": Record(raw=b"a = " + b"{a=" * 10_000),
    "a-key-of-ten-thousand-parts": Record(raw=b".".join([b"a"] * 10_000) + b" = 1"),
    "a-key-twice": _swap('name = "guarded"', 'name = "guarded"\nname = "guarded"'),
    "an-unknown-key": _swap('name = "guarded"', 'name = "guarded"\nshell = true'),
    "another-name-than-its-file": _swap('name = "guarded"', 'name = "other"'),
    "a-name-that-is-a-path": _swap('name = "guarded"', 'name = "../guarded"'),
    "a-shell-line": _swap('argv = ["/bin/true", "{n}", "--word={word}"]', 'argv = "/bin/true {n}"'),
    "a-placeholder-inside-a-word": _swap('"--word={word}"', '"word {word}"'),
    "a-placeholder-in-a-shell-line": _swap('"--word={word}"', '"-c", "echo {word}"'),
    "a-placeholder-that-is-unknown": _swap('"--word={word}"', '"${secret:word}"'),
    "a-secret-of-the-environment": _swap('"--word={word}"', '"--word={word}", "${env:API_TOKEN}"'),
    "a-parameter-that-is-not-declared": _swap('"--word={word}"', '"--word={other}"'),
    "an-argv-with-nul": _swap('"/bin/true"', '"/bin/true\\u0000x"'),
    "an-argv-of-nothing": _swap('argv = ["/bin/true", "{n}", "--word={word}"]', "argv = []"),
    "a-text-without-bounds": _swap('pattern = "[a-z]+"', "#"),
    "a-number-without-a-maximum": _swap("maximum = 9", "#"),
    "a-maximum-that-is-no-number": _swap("maximum = 9", "maximum = nan"),
    "a-minimum-that-is-no-number": _swap("minimum = 1", "minimum = -nan"),
    "a-maximum-without-end": _swap("maximum = 9", "maximum = inf"),
    "a-maximum-beyond-any-float": _swap("maximum = 9", "maximum = 9" + "0" * 400),
    "a-maximum-of-five-thousand-digits": _swap("maximum = 9", "maximum = 9" + "0" * 5000),
    "a-default-beyond-the-bounds": _swap("default = 5", "default = 99"),
    "a-default-of-another-type": _swap("default = 5", 'default = "5"'),
    "a-default-that-is-a-date": _swap("default = 5", "default = 1979-05-27"),
    "a-broken-pattern": _swap('pattern = "[a-z]+"', 'pattern = "["'),
    "a-pattern-deeper-than-the-stack": _swap('pattern = "[a-z]+"', f'pattern = "{"(" * 20_000}"'),
    "a-pattern-that-repeats-without-end": _swap('pattern = "[a-z]+"', 'pattern = "x{99999999999}"'),
    "seconds-as-a-fraction": _swap("timeout_s = 10", "timeout_s = 10.0"),
    "seconds-as-true": _swap("timeout_s = 10", "timeout_s = true"),
    "seconds-of-a-year": _swap("timeout_s = 10", "timeout_s = 31536000"),
    "a-network-as-text": _swap("timeout_s = 10", 'timeout_s = 10\nnetwork = "true"'),
    "an-unknown-engine": _swap('engine = "installed"', 'engine = "anything"'),
    "code-of-the-workload-without-it": _swap('engine = "installed"', 'engine = "workload"'),
    "memory-that-is-no-number": _swap("[params.n]", "[requires]\nmemory_gb = nan\n[params.n]"),
    "modules-with-a-path": _swap("[params.n]", '[requires]\nmodules = ["os; import x"]\n[params.n]'),
}

POLICIES: Records = {
    "not-utf-8": Record(raw=b'x = "\xff"'),
    "not-toml": Record(raw=b"{}[}"),
    "nul-bytes": Record(raw=b"\0" * 64),
    "more-than-is-read": Record(raw=b"#" * (65 * 1024)),
    "deep-lists": Record(raw=b"allow_presets = " + b"[" * 30_000),
    "deep-tables": Record(raw=b"limits = " + b"{a=" * 10_000),
    "a-key-twice": _swap("allow_repo_code = false", "allow_repo_code = false\nallow_repo_code = true"),
    "an-unknown-key": _swap("allow_repo_code", "allow_repo_cod"),
    "a-key-that-looks-like-another": _swap("allow_repo_code", '"\u0430llow_repo_code"'),
    "true-as-text": _swap("allow_repo_code = false", 'allow_repo_code = "false"'),
    "true-as-a-number": _swap("require_signature = true", "require_signature = 1"),
    "presets-as-a-text": _swap('allow_presets = ["probe"]', 'allow_presets = "probe"'),
    "presets-that-nest": _swap('allow_presets = ["probe"]', 'allow_presets = [["probe"]]'),
    "seconds-as-true": _swap("max_timeout_s = 60", "max_timeout_s = true"),
    "seconds-that-are-none": _swap("max_timeout_s = 60", "max_timeout_s = 0"),
    "seconds-that-are-no-number": _swap("max_timeout_s = 60", "max_timeout_s = nan"),
    "seconds-without-end": _swap("max_timeout_s = 60", "max_timeout_s = inf"),
    "seconds-of-four-thousand-digits": _swap("max_timeout_s = 60", "max_timeout_s = 1" + "0" * 4000),
    "a-quota-below-nothing": _swap("unsigned = 2", "unsigned = -1"),
    "a-quota-of-a-name-with-an-escape": _swap("unsigned = 2", '"\\u001b[2J" = 2'),
    "a-quota-of-nobody": _swap("unsigned = 2", '" " = 2'),
    "a-model-of-no-absolute-path": _swap('x = "/models/x"', 'x = "models/x"'),
    "a-model-of-an-unknown-user": _swap('x = "/models/x"', 'x = "~nobody-of-that-name/x"'),
    "a-model-with-a-nul": _swap('x = "/models/x"', 'x = "/models\\u0000/x"'),
    "memory-in-words": _swap('memory = "1 GiB"', 'memory = "plenty"'),
    "memory-of-an-unknown-unit": _swap('memory = "1 GiB"', 'memory = "1 GiX"'),
    "memory-below-nothing": _swap('memory = "1 GiB"', "memory = -1"),
    "memory-that-is-no-number": _swap('memory = "1 GiB"', "memory = nan"),
    "memory-beyond-any": _swap('memory = "1 GiB"', 'memory = "999999999999999 TiB"'),
    "a-limit-that-is-unknown": _swap('memory = "1 GiB"', 'memry = "1 GiB"'),
    "a-secret-for-jobs": _swap('environment = ["TZ"]', 'environment = ["API_TOKEN"]'),
    "a-loader-for-jobs": _swap('environment = ["TZ"]', 'environment = ["LD_PRELOAD"]'),
    "a-loader-of-macs-for-jobs": _swap('environment = ["TZ"]', 'environment = ["DYLD_INSERT_LIBRARIES"]'),
    "a-path-of-modules-for-jobs": _swap('environment = ["TZ"]', 'environment = ["PYTHONPATH"]'),
    "a-helper-of-git-for-jobs": _swap('environment = ["TZ"]', 'environment = ["GIT_SSH_COMMAND"]'),
    "an-agent-for-jobs": _swap('environment = ["TZ"]', 'environment = ["SSH_AUTH_SOCK"]'),
    "a-variable-with-a-value": _swap('environment = ["TZ"]', 'environment = ["A=B"]'),
    "a-variable-with-a-newline": _swap('environment = ["TZ"]', 'environment = ["A\\nB"]'),
    "branches-outside-branches": _swap("[quotas]", 'allow_refs = ["refs/tags/*"]\n[quotas]'),
    "a-bound-that-is-unknown": _swap("[quotas]", "[presets.throughput.params.limit]\nmaximun = 1\n[quotas]"),
    "a-bound-that-is-no-number": _swap(
        "[quotas]", "[presets.throughput.params.limit]\nmaximum = nan\n[quotas]"
    ),
    "a-bound-that-widens": _swap("[quotas]", "[presets.throughput.params.limit]\nmaximum = 201\n[quotas]"),
    "a-bound-of-a-preset-that-is-not-there": _swap(
        "[quotas]", "[presets.gone.params.n]\nmaximum = 1\n[quotas]"
    ),
    "a-network-as-text": _swap("[quotas]", '[presets.probe]\nnetwork = "yes"\n[quotas]'),
}

# Reports in addition to the hundreds of forgeries in tests/bridge/evidence.
REPORTS: Records = {
    **_RUBBISH,
    "a-key-twice": Record(swap=((b"{", b'{"kind": "probe", '),)),
    "nan": Record(swap=((b"{", b'{"x": NaN, '),)),
    "a-number-beyond-floats": Record(swap=((b"{", b'{"x": 1e999, '),)),
    "a-number-of-five-thousand-digits": Record(swap=((b"{", b'{"x": 1' + b"0" * 5000 + b", "),)),
    "an-unknown-key": _of(accepted=True),
    "no-schema": _of(schema=ABSENT),
    "a-schema-of-before": _of(schema="k3-evidence-2"),
    "a-schema-of-tomorrow": _of(schema="kakeya.evidence/2"),
    "an-unknown-kind": _of(kind="triumph"),
    "a-kind-that-is-a-list": _of(kind=["probe"]),
    "a-claim-of-nothing-known": _of(claims=[{"name": "fastest"}]),
    "a-claim-that-rows-must-bear": _of(
        claims=[{"name": "speedup", "arm": "a", "against": "b", "bound": 2.0}]
    ),
    "no-claims": _of(claims=ABSENT),
    "a-time-that-does-not-exist": _of(started_at="2026-02-31T00:00:00Z"),
    "an-end-before-its-beginning": _of(finished_at="2020-01-01T00:00:00Z"),
    "an-escape-in-a-setting": _of(configuration={"command": "\x1b[2J"}),
    "an-override-in-a-setting": _of(configuration={"command": "\u202eeborp"}),
    "no-environment": _of(environment=ABSENT),
    "a-summary-of-rows-that-are-not-there": _of(
        summary={"arms": {}, "comparisons": [{"arm": "a", "against": "b"}]}
    ),
    "brackets-by-the-million": Record(raw=b'{"a": [' + b"[]," * 300_000 + b"[]]}"),
}
