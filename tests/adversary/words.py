"""Hostile words: options, shell lines, odd characters and paths in every place that takes a text."""

from __future__ import annotations

from typing import Any

from bridge.protocol.result import Reason
from tests.adversary.attack import CANARY, NONCE, SERVER, WORKLOAD, Request, Table


def _manifest(**fields: Any) -> Request:
    """Refused before anybody looks what it asks for."""
    return Request(Reason.BAD_MANIFEST, fields)


def _value(preset: str, **params: Any) -> Request:
    """Refused by the preset's own bounds."""
    return Request(Reason.BAD_PARAMETER, {"preset": preset, "params": params})


def _elsewhere(audience: str) -> Request:
    """A well-formed text that names no bus of ours."""
    return Request(Reason.WRONG_AUDIENCE, {"audience": audience})


OPTIONS: Table = {
    "preset-is-help": _manifest(preset="--help"),
    "preset-is-a-proxy-command": _manifest(preset=f"-oProxyCommand=touch {CANARY}"),
    "preset-is-a-config-option": _manifest(preset="-c"),
    "ref-is-upload-pack": _manifest(result_ref=f"--upload-pack=touch {CANARY}"),
    "ref-is-receive-pack": _manifest(result_ref=f"--receive-pack=touch {CANARY}"),
    "ref-begins-with-a-plus": _manifest(result_ref=f"+refs/heads/mac-bridge/echo-{NONCE}"),
    "ref-is-a-refspec": _manifest(result_ref=f"refs/heads/mac-bridge/echo-{NONCE}:refs/heads/main"),
    "ref-part-is-an-option": _manifest(result_ref=f"refs/heads/mac-bridge/--exec=sh-{NONCE}"),
    "ref-last-part-is-an-option": _manifest(result_ref="refs/heads/-oProxyCommand"),
    "workload-is-an-option": _manifest(workload_sha=f"--output={CANARY}"),
    "workload-is-all": _manifest(workload_sha="--all"),
    "workload-is-a-revision": _manifest(workload_sha="HEAD"),
    "workload-is-a-path-of-a-revision": _manifest(workload_sha="HEAD:README.md"),
    "transport-is-an-option": _manifest(transport="--exec"),
    "nonce-is-an-option": _manifest(nonce="--force"),
    "parameter-named-like-an-option": _manifest(params={"--report": CANARY}),
    "parameter-named-like-a-short-option": _manifest(params={"-c": "import os"}),
    "parameter-named-with-an-equals-sign": _manifest(params={"word=--x": "y"}),
    "word-is-an-option": _value("echo", word=f"--upload-pack=touch {CANARY}"),
    "word-is-a-proxy-command": _value("echo", word=f"-oProxyCommand=touch {CANARY}"),
    "word-of-the-other-side-is-an-option": Request(
        Reason.BAD_PARAMETER,
        {
            "preset": "echo",
            "params": {"word": "x"},
            "against": {"workload_sha": WORKLOAD, "params": {"word": f"--upload-pack=touch {CANARY}"}},
        },
    ),
    "word-is-a-dash": _value("echo", word="-"),
    "word-ends-the-options": _value("echo", word="--"),
    "file-is-an-option": _value("gate", file="--help.json"),
    "file-is-a-short-option": _value("gate", file="-c.json"),
    "a-part-of-a-path-is-an-option": _value("gate", file="reports/-x.json"),
    "tests-are-an-option": _value("tests", path="--pyargs"),
    "a-test-folder-is-an-option": _value("tests", path="tests/--pdb"),
    "a-test-names-a-plugin": _value("tests", path="-p=evil"),
    "a-choice-is-an-option": _value("throughput", prompts=f"--report={CANARY}"),
    "a-choice-with-another-flag": _value("throughput", prompts="code --trust-remote-code"),
    "a-policy-with-another-flag": _value("kv", policies=f"affine:8,64 --report={CANARY}"),
    "audience-is-a-proxy-command": _elsewhere(f"-oProxyCommand=touch {CANARY}"),
    "audience-is-a-command": _elsewhere(f"ext::sh -c touch% {CANARY}"),
    "audience-is-a-server-of-theirs": _elsewhere(f"http://{SERVER}/repo.git"),
}

_SHELL = {
    "semicolon": f"x; touch {CANARY}",
    "command-substitution": f"$(touch {CANARY})",
    "backticks": f"`touch {CANARY}`",
    "pipe": f"x | tee {CANARY}",
    "and": f"x && touch {CANARY}",
    "redirection": f"x > {CANARY}",
    "quote": f"'; touch {CANARY}; '",
    "double-quote": f'"; touch {CANARY}; "',
    "brace-expansion": "{x,y}",
    "variable": "$HOME",
    "variable-with-braces": "${IFS}x",
    "tilde": "~/x",
    "glob": "*",
    "placeholder-of-ours": "${env:HOME}",
    "python-format": "{0.__class__}",
    "percent-format": "%(x)s",
}

SHELL: Table = {
    **{
        f"preset-with-{name}": _manifest(preset=f"echo{text}")
        for name, text in _SHELL.items()
        if "touch" in text
    },
    **{f"file-with-{name}": _value("gate", file=f"a{text}.json") for name, text in _SHELL.items()},
    **{f"choice-with-{name}": _value("throughput", prompts=text) for name, text in _SHELL.items()},
    # The owner of this machine wrote a preset that takes any word: it arrives as that word, and is no code.
    **{f"word-with-{name}": Request(Reason.OK, {"params": {"word": text}}) for name, text in _SHELL.items()},
}

_CONTROLS = {
    "nul": "\0",
    "newline": "\n",
    "carriage-return": "\r",
    "escape": "\x1b[2J",
    "bell": "\x07",
    "backspace": "\b",
    "delete": "\x7f",
    "c1-csi": "\x9b2J",
    "line-separator": "\u2028",
    "paragraph-separator": "\u2029",
    "half-a-surrogate": "\ud800",
}

CONTROLS: Table = {
    **{f"word-with-{name}": _manifest(params={"word": f"a{text}b"}) for name, text in _CONTROLS.items()},
    **{f"requester-with-{name}": _manifest(requested_by=f"a{text}b") for name, text in _CONTROLS.items()},
    "audience-with-a-newline": _manifest(audience="example.org/x\nexample.org/y"),
    "ref-with-a-newline": _manifest(result_ref=f"refs/heads/mac-bridge/echo-{NONCE}\n"),
    "ref-with-a-nul": _manifest(result_ref=f"refs/heads/mac-bridge/echo-{NONCE}\0x"),
    "preset-with-a-newline": _manifest(preset="echo\n"),
    "preset-with-a-nul": _manifest(preset="echo\0"),
    "workload-with-a-newline": _manifest(workload_sha="a" * 40 + "\n"),
    "nonce-with-a-newline": _manifest(nonce=f"{NONCE}\n"),
    "time-with-a-newline": _manifest(created_at="2026-03-01T12:00:00Z\n"),
    "parameter-name-with-a-nul": _manifest(params={"word\0": "x"}),
    "file-with-a-tab": _manifest(preset="gate", params={"file": "a\tb.json"}),
}

_BIDIRECTIONAL = {
    "right-to-left-override": "\u202e",
    "left-to-right-override": "\u202d",
    "right-to-left-embedding": "\u202b",
    "right-to-left-isolate": "\u2067",
    "first-strong-isolate": "\u2068",
    "pop-isolate": "\u2069",
    "arabic-letter-mark": "\u061c",
    "right-to-left-mark": "\u200f",
}

BIDIRECTIONAL: Table = {
    **{f"word-with-{name}": _manifest(params={"word": f"a{text}b"}) for name, text in _BIDIRECTIONAL.items()},
    **{
        f"requester-with-{name}": _manifest(requested_by=f"a{text}b") for name, text in _BIDIRECTIONAL.items()
    },
    "audience-with-an-override": _manifest(audience="example.org/\u202eoper"),
}

HOMOGLYPHS: Table = {
    "preset-with-a-cyrillic-letter": _manifest(preset="\u0435cho"),
    "preset-with-a-fullwidth-letter": _manifest(preset="\uff45cho"),
    "preset-with-a-soft-hyphen": _manifest(preset="ec\u00adho"),
    "preset-with-a-zero-width-space": _manifest(preset="ec\u200bho"),
    "preset-in-capitals": _manifest(preset="ECHO"),
    "nonce-with-other-digits": _manifest(nonce="\u0662\u0660260301t120000z0123456789ab"),
    "workload-with-fullwidth-digits": _manifest(workload_sha="\uff10" * 40),
    "time-with-other-digits": _manifest(created_at="\uff12026-03-01T12:00:00Z"),
    "ref-with-a-cyrillic-letter": _manifest(result_ref=f"refs/heads/mac-bridge/\u0435cho-{NONCE}"),
    "ref-with-a-division-slash": _manifest(result_ref=f"refs/heads/mac-bridge\u2215echo-{NONCE}"),
    "parameter-name-with-a-greek-letter": _manifest(params={"w\u03bfrd": "x"}),
    "transport-with-a-cyrillic-letter": _manifest(transport="\u0435mbedded"),
    "file-with-fullwidth-dots": _value("gate", file="\uff0e\uff0e/a.json"),
    "file-with-a-fraction-slash": _value("gate", file="a\u2044b.json"),
    "file-with-a-zero-width-joiner": _manifest(preset="gate", params={"file": "a\u200db.json"}),
    "file-with-a-tag-character": _manifest(preset="gate", params={"file": "a\U000e0041.json"}),
    "file-with-a-combining-mark": _value("gate", file="e\u0301.json"),
    "choice-with-a-cyrillic-letter": _value("throughput", prompts="\u0441ode"),
    "word-with-a-zero-width-space": _manifest(params={"word": "a\u200bb"}),
    "word-with-tag-characters": _manifest(params={"word": "a\U000e0068\U000e0069"}),
    "requester-with-a-zero-width-space": _manifest(requested_by="a\u200bb"),
    "requester-with-tag-characters": _manifest(requested_by="a\U000e0068\U000e0069"),
    "audience-with-a-cyrillic-letter": _elsewhere("ex\u0430mple.org/team/repo"),
}

PATHS: Table = {
    "up": _value("gate", file="../secret.json"),
    "up-in-the-middle": _value("gate", file="reports/../../secret.json"),
    "up-at-the-end": _value("gate", file="reports/..json/.."),
    "here": _value("gate", file="./secret.json"),
    "absolute": _value("gate", file="/etc/passwd.json"),
    "absolute-with-two-slashes": _value("gate", file="//etc/passwd.json"),
    "home": _value("gate", file="~/secret.json"),
    "home-of-another": _value("gate", file="~root/secret.json"),
    "backslashes": _value("gate", file="..\\secret.json"),
    "drive": _value("gate", file="C:/secret.json"),
    "url": _value("gate", file=f"http://{SERVER}/x.json"),
    "percent-encoded": _value("gate", file="%2e%2e/secret.json"),
    "empty-part": _value("gate", file="reports//secret.json"),
    "empty": _value("gate", file=""),
    "only-a-slash": _value("gate", file="/"),
    "hidden": _value("gate", file=".ssh/id.json"),
    "git-folder": _value("gate", file=".git/config.json"),
    "descriptor": _value("gate", file="/dev/fd/0.json"),
    "endless": _value("gate", file="a/" * 300 + "x.json"),
    "magic-of-git-paths": _value("gate", file=":(top)x.json"),
    "glob-of-git-paths": _value("gate", file="*.json"),
    "out-of-tests": _value("tests", path="tests/../setup.json"),
    "ref-climbs": _manifest(result_ref=f"refs/heads/mac-bridge/../main/echo-{NONCE}"),
    "ref-is-main": _manifest(result_ref="refs/heads/main"),
    "ref-is-a-tag": _manifest(result_ref=f"refs/tags/echo-{NONCE}"),
    "ref-is-another-request": _manifest(result_ref="refs/heads/mac-bridge/echo-20260301t120000z0123456789ab"),
    "ref-is-the-archive": _manifest(result_ref="refs/heads/mac-bridge-archive"),
    "ref-is-a-claim": _manifest(result_ref=f"refs/mac-bridge/claims/{NONCE}"),
    "ref-has-a-lock": _manifest(result_ref=f"refs/heads/mac-bridge/echo-{NONCE}.lock"),
    "nonce-is-a-path": _manifest(nonce="../../../etc/passwd"),
    "preset-is-a-path": _manifest(preset="../presets/echo"),
    "preset-is-a-file": _manifest(preset="/etc/passwd"),
}
