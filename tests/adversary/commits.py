"""Hostile commits: what a request changes besides its manifest, and what it is made of."""

from __future__ import annotations

from bridge.protocol.result import Reason
from tests.adversary.attack import CANARY, Request, Table
from tests.adversary.trees import FOLDER, GITLINK, LINK, PROGRAM, Row, file, folder, link

_EVIL = f"import pathlib\npathlib.Path({CANARY!r}).touch()\n"


def _next_to_manifest(*rows: Row) -> Request:
    return Request(Reason.BAD_COMMIT, outside=rows)


def _torn(*rows: Row) -> Request:
    return Request(Reason.BAD_COMMIT, outside=rows, whole=False)


def _inside(*rows: Row) -> Request:
    return Request(Reason.BAD_COMMIT, inside=rows)


SHAPES: Table = {
    "no-parent": Request(Reason.BAD_COMMIT, parents=0),
    "a-parent-that-the-manifest-does-not-name": Request(Reason.BAD_MANIFEST, parents=2),
    "three-parents": Request(Reason.BAD_COMMIT, parents=3),
    "no-manifest": _inside(Row(FOLDER, b"request.json", (file("x", "y"),))),
    "manifest-is-a-link": _inside(link("request.json", "/etc/passwd")),
    "manifest-is-a-link-out": _inside(link("request.json", "../../../secret.json")),
    "manifest-is-a-program": _inside(Row(PROGRAM, b"request.json", b"{}")),
    "manifest-is-a-submodule": _inside(Row(GITLINK, b"request.json", "1" * 40)),
    "signature-is-a-link": _inside(link("request.json.sig", "/etc/passwd")),
    "signature-is-a-program": _inside(Row(PROGRAM, b"request.json.sig", b"x")),
    "a-file-beside-the-manifest": _inside(file("argv.json", '["sh"]')),
    "a-result-beside-the-manifest": _inside(file("results/x/result.json", "{}")),
    "a-manifest-in-capitals-too": _inside(file("REQUEST.JSON", "{}")),
    "the-folder-in-capitals-too": _next_to_manifest(file(".MAC-BRIDGE/request.json", "{}")),
    "a-changed-file": _next_to_manifest(file("README.md", "changed\n")),
    "a-file-made-a-program": _next_to_manifest(file("README.md", "a workload\n", PROGRAM)),
    "a-file-made-a-link": _next_to_manifest(link("README.md", "/etc/passwd")),
    "a-folder-with-thousand-files": _next_to_manifest(folder("x", *(file(str(n), "y") for n in range(1000)))),
    "a-row-of-an-unknown-mode": _next_to_manifest(Row("100000", b"odd", b"x")),
    "an-empty-folder": _next_to_manifest(folder("empty")),
    "a-name-that-comes-twice": _next_to_manifest(file("x", "1"), file("x", "2")),
    "a-file-and-a-folder-of-one-name": _next_to_manifest(file("x", "1"), folder("x", file("y", "2"))),
    "a-file-that-is-not-there": _torn(Row("100644", b"gone", "2" * 40)),
    "a-folder-that-is-not-there": _torn(Row(FOLDER, b"gone", "3" * 40)),
    "a-submodule": _next_to_manifest(Row(GITLINK, b"module", "4" * 40)),
}

# What a workload may bring that would run if a program obeyed it, by what it imitates.
REPLACED = {
    "preset-file": file("bridge/presets/echo.toml", 'name = "echo"\nargv = ["/bin/sh", "-c", "id"]\n'),
    "owners-preset-file": file("presets/echo.toml", 'name = "echo"\nargv = ["/bin/sh", "-c", "id"]\n'),
    "policy": file("policy.toml", "allow_repo_code = true\n"),
    "policy-in-the-user's-folder": file(".config/kakeya-mac/policy.toml", "allow_repo_code = true\n"),
    "allowed-signers": file("allowed_signers", "* ssh-ed25519 AAAA\n"),
    "executor": file("bridge/runner/job.py", _EVIL),
    "package": file("bridge/__init__.py", _EVIL),
    "program": file("bridge/__main__.py", _EVIL),
    "engine": file("engine/__init__.py", _EVIL),
    "engines-program": file("engine/__main__.py", _EVIL),
    "sitecustomize": file("sitecustomize.py", _EVIL),
    "usercustomize": file("usercustomize.py", _EVIL),
    "json-module": file("json.py", _EVIL),
    "os-module": file("os.py", _EVIL),
    "encodings": file("encodings/__init__.py", _EVIL),
    "conftest": file("conftest.py", _EVIL),
    "test": file("tests/test_evil.py", _EVIL),
    "path-file": file("evil.pth", f"import pathlib; pathlib.Path({CANARY!r}).touch()\n"),
    "virtual-environment": file(".venv/bin/python", f"#!/bin/sh\ntouch {CANARY}\n", PROGRAM),
    "virtual-environment-settings": file("pyvenv.cfg", "home = /tmp\ninclude-system-site-packages = true\n"),
    "site-packages": file("lib/python3/site-packages/evil.pth", f"import os; open({CANARY!r}, 'w')\n"),
    "python-program": file("python3", f"#!/bin/sh\ntouch {CANARY}\n", PROGRAM),
    "git-program": file("git", f"#!/bin/sh\ntouch {CANARY}\n", PROGRAM),
    "makefile": file("Makefile", f"all:\n\ttouch {CANARY}\n"),
    "project-file": file("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-p evil"\n'),
    "package-settings": file("setup.py", _EVIL),
    "workflow": file(".github/workflows/x.yml", "on: push\n"),
    "hook": file(".githooks/post-checkout", f"#!/bin/sh\ntouch {CANARY}\n", PROGRAM),
    "attributes": file(".gitattributes", "* filter=evil\n"),
    "lfs-settings": file(".lfsconfig", "[lfs]\n\turl = http://x/\n"),
    "submodules": file(".gitmodules", '[submodule "x"]\n\tpath = x\n\turl = ext::sh\n'),
}

# In the request commit itself: refused, as it changes more than its manifest.
REPLACEMENTS: Table = {name: _next_to_manifest(row) for name, row in REPLACED.items()}

_LOOKALIKES = {
    "git-folder": b".git",
    "git-folder-in-capitals": b".GIT",
    "git-folder-mixed": b".Git",
    "git-folder-with-a-dot": b".git.",
    "git-folder-with-a-blank": b".git ",
    "git-folder-with-a-zero-width-joiner": ".g\u200dit".encode(),
    "git-folder-with-a-zero-width-non-joiner": ".g\u200cit".encode(),
    "git-folder-with-a-byte-order-mark": ".git\ufeff".encode(),
    "git-folder-with-an-ignorable": ".gi\u206at".encode(),
    "git-folder-of-another-file-system": b"git~1",
    "git-folder-as-a-stream": b".git::$INDEX_ALLOCATION",
    "git-folder-behind-a-backslash": b"x\\.git",
    "here": b".",
    "up": b"..",
}

GIT_FOLDERS_IN_REQUESTS: Table = {
    f"{name}-beside-the-manifest": _next_to_manifest(
        Row(FOLDER, raw, (file("config", f"[core]\n\tfsmonitor = touch {CANARY}\n"),))
    )
    for name, raw in _LOOKALIKES.items()
}

# Laid out as the workload of an honest request.
GIT_FOLDERS_IN_WORKLOADS: Table = {
    f"{name}-{what}": Request(reason, {"preset": "whole"}, workload=(row,))
    for name, raw in _LOOKALIKES.items()
    for what, reason, row in (  # names at the top are read when the commit is compared with its parent
        ("as-a-folder", Reason.BAD_COMMIT, Row(FOLDER, raw, (file("config", "x"),))),
        ("as-a-file", Reason.BAD_COMMIT, Row("100644", raw, b"gitdir: /tmp\n")),
        ("as-a-link", Reason.BAD_COMMIT, Row(LINK, raw, b"README.md")),
        (
            "in-a-folder",
            Reason.BAD_WORKLOAD,
            folder("deep", Row(FOLDER, raw, (file("hooks/post-checkout", "x", PROGRAM),))),
        ),
    )
}
