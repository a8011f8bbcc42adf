"""A bare repository for one watch or look at a remote, gone afterwards: the checkout's refs stay untouched.

It keeps what the checkout's own configuration says about reaching a remote (credentials, proxies, SSH,
rewritten addresses); the user's and the system's apply to it anyway.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from bridge.bus.git import Git, quoted
from bridge.bus.objects import Store
from bridge.errors import BusError

_NETWORK_SETTINGS = r"^(credential|http|https|protocol|ssh|url)\.|^core\.(sshcommand|gitproxy|askpass)$"


@contextlib.contextmanager
def aside(git: Git, *, borrowing: bool = False) -> Generator[Git, None, None]:
    """An empty bare repository that reaches remotes as `git` does.

    Args:
        git: A checkout; any other folder will do, too.
        borrowing: Whether it reads the checkout's objects, so that they need not travel.

    Raises:
        BusError: The checkout's settings cannot be taken along.
    """
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-") as folder:
        top = Path(folder)
        layout = git.layout()
        algorithm = "sha1" if layout is None else layout[0].algorithm
        _make(top, algorithm)
        if layout is not None and borrowing:
            own, shallow = layout
            (top / "objects/info/alternates").write_text(f"{quoted(str(own.folder))}\n")
            if shallow.is_file():
                (top / "shallow").write_bytes(shallow.read_bytes())
        made = Git(
            top,
            timeout_s=git.timeout_s,
            environment=network_settings(git),
            store=Store(top / "objects", algorithm),
        )
        try:
            yield made
        finally:
            made.close()


def network_settings(git: Git) -> dict[str, str]:
    """The checkout's own settings of that kind, as the environment that gives them to another repository."""
    done = git.attempt("config", "--show-scope", "--null", "--get-regexp", _NETWORK_SETTINGS)
    fields = done.stdout.decode("utf-8", "surrogateescape").split("\0")
    own = [
        pair.partition("\n")
        for scope, pair in zip(fields[::2], fields[1::2], strict=False)
        if scope in ("local", "worktree")
    ]
    given = os.environ.get("GIT_CONFIG_COUNT", "")
    if not own:
        return {}
    if given and not given.isdigit():
        raise BusError(f"GIT_CONFIG_COUNT is {given!r}, which is no number", "unset it")
    first = int(given or 0)
    variables = {"GIT_CONFIG_COUNT": str(first + len(own))}
    for index, (key, line_end, value) in enumerate(own, start=first):
        variables[f"GIT_CONFIG_KEY_{index}"] = key
        variables[f"GIT_CONFIG_VALUE_{index}"] = value if line_end else "true"
    return variables


def _make(folder: Path, algorithm: str) -> None:
    """What `git init --bare` makes of an empty folder, without a process."""
    for name in ("objects/info", "refs"):
        (folder / name).mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/none\n")
    version, extension = (
        ("1", f"[extensions]\n\tobjectformat = {algorithm}\n") if algorithm != "sha1" else ("0", "")
    )
    (folder / "config").write_text(
        f"[core]\n\trepositoryformatversion = {version}\n\tbare = true\n{extension}"
    )
