"""Names of refs that are no request's, however much they look like one's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.adversary.honest import NONCE

_BRANCH = "refs/heads/mac-bridge/"
_AGENT = "refs/heads/AgentMemory/mac-bridge-"

# Git's own server takes these.
PUSHED: Mapping[str, str] = {
    "an-option": f"{_BRANCH}--upload-pack=touch-{NONCE}",
    "a-proxy-command": f"{_BRANCH}-oProxyCommand=x-{NONCE}",
    "a-command": f"{_BRANCH}$(touch${{IFS}}canary)-{NONCE}",
    "backticks": f"{_BRANCH}`id`-{NONCE}",
    "a-semicolon": f"{_BRANCH}echo;id-{NONCE}",
    "a-pipe": f"{_BRANCH}echo|id-{NONCE}",
    "quotes": f"{_BRANCH}'echo\"-{NONCE}",
    "capitals": f"{_BRANCH}ECHO-{NONCE}",
    "a-cyrillic-letter": f"{_BRANCH}\u0435cho-{NONCE}",
    "a-right-to-left-override": f"{_BRANCH}echo\u202e-{NONCE}",
    "a-zero-width-space": f"{_BRANCH}ec\u200bho-{NONCE}",
    "other-digits": f"{_BRANCH}echo-\u0662\u0660260301t120000z0123456789ab",
    "a-nonce-in-capitals": f"{_BRANCH}echo-{NONCE.upper()}",
    "no-nonce": f"{_BRANCH}echo",
    "a-nonce-alone": f"{_BRANCH}{NONCE}",
    "a-nonce-too-long": f"{_BRANCH}echo-{NONCE}00",
    "a-folder-behind": f"{_BRANCH}echo-{NONCE}/x",
    "a-folder-before": f"{_BRANCH}x/echo-{NONCE}",
    "a-suffix": f"{_BRANCH}echo-{NONCE}-x",
    "a-preset-without-end": f"{_BRANCH}{'x' * 200}-{NONCE}",
    "two-hyphens": f"{_BRANCH}a--b-{NONCE}",
    "an-underscore": f"{_BRANCH}a_b-{NONCE}",
    "another-folder": f"refs/heads/mac-bridge2/echo-{NONCE}",
    "a-tag": f"refs/tags/mac-bridge/echo-{NONCE}",
    "an-agents-option": f"{_AGENT}--exec=x-{NONCE}",
    "an-agents-suffix-with-a-dot": f"{_AGENT}echo-{NONCE}-a.b",
    "an-agents-suffix-without-end": f"{_AGENT}echo-{NONCE}-{'x' * 100}",
}

# It does not take these; another server might.
BROKEN: Mapping[str, str] = {
    "a-newline": f"{_BRANCH}echo-{NONCE}\n",
    "a-nul": f"{_BRANCH}echo-{NONCE}\0",
    "a-blank": f"{_BRANCH}echo x-{NONCE}",
    "an-escape": f"{_BRANCH}\x1b[2J-{NONCE}",
    "up": f"{_BRANCH}../echo-{NONCE}",
    "up-at-the-end": f"{_BRANCH}echo-{NONCE}/..",
    "a-lock": f"{_BRANCH}echo-{NONCE}.lock",
    "a-colon": f"{_BRANCH}echo:x-{NONCE}",
    "a-star": f"{_BRANCH}*-{NONCE}",
    "a-caret": f"{_BRANCH}echo^-{NONCE}",
    "a-tilde": f"{_BRANCH}echo~1-{NONCE}",
    "a-backslash": f"{_BRANCH}echo\\x-{NONCE}",
    "a-reflog": f"{_BRANCH}echo@{{1}}-{NONCE}",
    "two-slashes": f"{_BRANCH}/echo-{NONCE}",
    "nothing": "",
    "half-a-surrogate": f"{_BRANCH}\udcff-{NONCE}",
}

NAMES: Mapping[str, str] = PUSHED | BROKEN
