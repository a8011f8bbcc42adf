"""Hostile workloads: the parent of an honest request's commit, and what is laid out of it."""

from __future__ import annotations

from bridge.protocol.result import Reason
from tests.adversary.attack import CANARY, SERVER, Request, Table
from tests.adversary.trees import FOLDER, GITLINK, PROGRAM, Row, file, folder, link

_WHOLE = {"preset": "whole"}
_TOUCH = f"#!/bin/sh\ntouch {CANARY}\n"


def _refused(*rows: Row) -> Request:
    return Request(Reason.BAD_WORKLOAD, _WHOLE, workload=rows)


def _broken(*rows: Row) -> Request:
    """No tree that git would write, seen when it is compared with the request's."""
    return Request(Reason.BAD_COMMIT, _WHOLE, workload=rows)


def _harmless(*rows: Row) -> Request:
    """It is laid out as plain files, which no program obeys."""
    return Request(Reason.OK, _WHOLE, workload=rows)


def _asks(path: str, *rows: Row, expected: Reason = Reason.BAD_WORKLOAD) -> Request:
    """One file of the workload is asked for."""
    return Request(expected, {"preset": "gate", "params": {"file": path}}, workload=rows)


LINKS: Table = {
    "to-a-file-of-the-machine": _refused(link("x", "/etc/passwd")),
    "to-a-folder-of-the-machine": _refused(link("x", "/")),
    "up": _refused(link("x", "..")),
    "up-and-down": _refused(link("x", "../other/secret")),
    "up-from-a-folder": _refused(link("a/x", "../../secret")),
    "up-through-a-folder-that-is-not-there": _refused(link("x", "a/../../secret")),
    "out-by-another-link": _refused(link("a", "b/.."), link("b", "..")),
    "out-in-two-steps": _refused(link("a/b/up", "../.."), link("x", "a/b/up/../secret")),
    "to-itself": _harmless(link("x", "x")),
    "in-a-circle": _harmless(link("x", "y"), link("y", "x")),
    "to-nothing": _refused(link("x", "")),
    "with-a-nul": _refused(link("x", b"a\0b")),
    "endless": _refused(link("x", "a/" * 2500)),
    "to-the-processes": _refused(link("x", "/proc/self/root")),
    "to-a-descriptor": _refused(link("x", "/dev/fd/0")),
    "and-a-file-below-it": _broken(link("x", "a"), folder("x", file("y", "z")), file("a/b", "c")),
    "and-a-file-of-its-name": _broken(link("x", f"{CANARY}"), file("x", "through it")),
    "and-a-file-below-it-in-a-folder": _refused(
        folder("d", link("x", "../a"), folder("x", file("y", "z"))), file("a/b", "c")
    ),
    "and-a-file-of-its-name-in-a-folder": _refused(folder("d", link("x", CANARY), file("x", "through it"))),
    "a-manifest-that-was-a-link": Request(
        Reason.BAD_COMMIT, workload=(link(".mac-bridge", "/tmp"),), inside=(), outside=()
    ),
    "one-file-asked-for-is-a-link-out": _asks("x.json", link("x.json", "/etc/passwd")),
    "one-file-asked-for-lies-behind-a-link": _asks("x/passwd.json", link("x", "/etc")),
    "one-file-asked-for-is-not-there": _asks("gone.json"),
    "one-file-asked-for-is-a-folder-that-is-not-there": _asks("x/y/z.json", file("x/y", "a file")),
}

NAMES: Table = {
    "up": _broken(Row(FOLDER, b"..", (file("secret", "x"),))),
    "up-as-a-file": _broken(Row("100644", b"..", b"x")),
    "here": _broken(Row("100644", b".", b"x")),
    "absolute": _broken(Row("100644", b"/etc/canary", b"x")),
    "with-a-slash": _broken(Row("100644", b"a/../../b", b"x")),
    "twice": _broken(file("x", "1"), file("x", "2")),
    "a-file-and-a-folder": _broken(file("x", "1"), folder("x", file("y", "2"))),
    "twice-in-a-folder": _refused(folder("d", file("x", "1"), file("x", "2"))),
    "a-file-and-a-folder-in-a-folder": _refused(folder("d", file("x", "1"), folder("x", file("y", "2")))),
    "with-a-backslash": _refused(file(b"a\\..\\..\\b", "x")),
    "too-long-for-a-file-system": _refused(file("x" * 300, "y")),
    "a-hundred-folders-deep": _refused(file("/".join("d" * 101), "x")),
}

GIT_OBEYS: Table = {
    "attributes-with-a-filter": _harmless(
        file(".gitattributes", "* filter=evil diff=evil merge=evil ident export-subst\n"),
        file("evil.sh", _TOUCH, PROGRAM),
    ),
    "attributes-with-an-encoding": _harmless(
        file(".gitattributes", "* working-tree-encoding=UTF-16 eol=crlf text\n")
    ),
    "attributes-in-a-folder": _harmless(file("a/.gitattributes", "* filter=lfs\n"), file("a/b", "c")),
    "hooks": _harmless(
        *(
            file(f"hooks/{name}", _TOUCH, PROGRAM)
            for name in ("post-checkout", "pre-push", "reference-transaction")
        )
    ),
    "hooks-path": _harmless(
        file(".githooks/post-checkout", _TOUCH, PROGRAM),
        file(".gitconfig", "[core]\n\thooksPath = .githooks\n"),
    ),
    "a-bare-repository-inside": _harmless(
        file("x/HEAD", "ref: refs/heads/main\n"),
        file("x/config", f"[core]\n\tbare = true\n\tfsmonitor = touch {CANARY}\n"),
        file("x/objects/info/alternates", "/tmp\n"),
        file("x/refs/heads/main", "0" * 40),
    ),
    "submodules": _harmless(
        file(
            ".gitmodules",
            f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c touch% {CANARY}\n\tupdate = !touch {CANARY}\n',
        ),
        Row(GITLINK, b"x", "6" * 40),
    ),
    "a-submodule-of-a-server": _harmless(
        file(".gitmodules", f'[submodule "x"]\n\tpath = x\n\turl = http://{SERVER}/x.git\n'),
        Row(GITLINK, b"x", "7" * 40),
    ),
    "mailmap-and-ignore": _harmless(file(".mailmap", "a <b> c <d>\n"), file(".gitignore", "*\n")),
    "sparse-and-blame": _harmless(
        file(".git-blame-ignore-revs", "--output=x\n"), file(".gitconfig", "[alias]\n\tlog = !id\n")
    ),
}

_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"

LFS: Table = {
    "a-pointer": _asks("x.json", file("x.json", _POINTER.format("a" * 64, 400))),
    "a-pointer-of-no-size": _asks("x.json", file("x.json", _POINTER.format("b" * 64, 0))),
    "a-pointer-of-an-exabyte": _asks("x.json", file("x.json", _POINTER.format("c" * 64, 1 << 60))),
    "a-pointer-to-a-path": _asks("x.json", file("x.json", _POINTER.format("../" * 20 + "etc/passwd", 4))),
    "a-pointer-with-an-extension": _asks(
        "x.json",
        file("x.json", "version https://git-lfs.github.com/spec/v1\next-0-evil sha256:" + "d" * 64 + "\n"),
    ),
    "a-pointer-behind-a-link": _asks(
        "x.json",
        link("x.json", "real.json"),
        file("real.json", _POINTER.format("e" * 64, 4)),
        expected=Reason.BAD_PARAMETER,
    ),
    "settings-that-name-a-server": _refused(
        file(
            ".lfsconfig",
            f'[lfs]\n\turl = http://{SERVER}/lfs\n[remote "origin"]\n\tlfsurl = http://{SERVER}/\n',
        ),
        file(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n"),
        file("x.bin", _POINTER.format("f" * 64, 4)),
    ),
    "settings-that-name-a-program": _refused(
        file(
            ".lfsconfig",
            f'[lfs "customtransfer.evil"]\n\tpath = touch\n\targs = {CANARY}\n'
            "[lfs]\n\tstandalonetransferagent = evil\n",
        ),
        file("x.bin", _POINTER.format("0" * 64, 4)),
    ),
}
