"""Which variables of the runner's environment an owner may let jobs have, and why not the others."""

from __future__ import annotations

import re

from bridge.evidence.redact import is_secret_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# What each job gets of its own.
_OURS = frozenset(
    {"HOME", "PATH", "PWD", "TMPDIR", "TMP", "TEMP", "LANG", "LC_ALL", "HF_HUB_OFFLINE", "NO_COLOR"}
)
# Beginnings of names by which a program is made to load or run something else, or to reach credentials.
_STEERING = {
    "PYTHON": "it changes what the interpreter loads",
    "LD_": "it changes what the loader loads",
    "DYLD_": "it changes what the loader loads",
    "GLIBC_TUNABLES": "it changes the loader",
    "GCONV_PATH": "it changes what the C library loads",
    "LOCPATH": "it changes what the C library loads",
    "OPENSSL_": "it changes what the TLS library loads",
    "MALLOC_": "it changes the allocator",
    "GIT_": "it changes what git does, or names credentials",
    "SSH_": "it leads to the user's keys",
    "GPG_": "it leads to the user's keys",
    "GNUPG": "it leads to the user's keys",
    "KRB5": "it leads to the user's keys",
    "KAKEYA_": "it belongs to the runner",
    "XDG_": "it names the user's own folders",
    "DBUS_": "it leads to programs outside the job",
    "DOCKER_": "it leads to programs outside the job",
    "BASH_": "it changes what a shell runs",
    "ENV": "it changes what a shell runs",
    "IFS": "it changes what a shell runs",
    "SHELL": "it changes what a shell runs",
    "PERL": "it changes what an interpreter loads",
    "RUBY": "it changes what an interpreter loads",
    "NODE_": "it changes what an interpreter loads",
    "JAVA_TOOL_OPTIONS": "it changes what an interpreter loads",
    "_JAVA_OPTIONS": "it changes what an interpreter loads",
    "JDK_JAVA_OPTIONS": "it changes what an interpreter loads",
}
_WHOLE = frozenset({"ENV", "IFS", "SHELL"})


def why_not(name: str) -> str | None:
    """Why a variable may not pass to jobs; None: it may."""
    if not _NAME.fullmatch(name):
        return "that is no name of a variable (letters, digits and _)"
    if is_secret_name(name):
        return "its name says that it is a secret, and whatever a job prints is published"
    upper = name.upper()
    if upper in _OURS:
        return "every job gets its own"
    for beginning, reason in _STEERING.items():
        if upper == beginning or (beginning not in _WHOLE and upper.startswith(beginning)):
            return reason
    return None
