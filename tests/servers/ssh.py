"""Git over SSH: sshd and an account that may run git alone."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.servers.processes import INSTALLER, PATH, free_port, program, running, wait_for_port
from tests.servers.server import Server

ACCOUNT = "kakeya-test-git"

_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {keys}
AllowUsers {account}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin forced-commands-only
AcceptEnv GIT_PROTOCOL
LogLevel INFO
"""


@contextlib.contextmanager
def ssh_server(repo: Path, folder: Path) -> Iterator[Server]:
    """Git over SSH. Started by root, sshd lets in one account of its own, else the user who started it.

    The account may run nothing but git and read nothing of the tester's, so the repository moves to a folder
    of the account's; a link stays in its place.
    """
    sshd, keygen, ssh = program("sshd"), program("ssh-keygen"), program("ssh")
    folder.mkdir(parents=True)
    for name in ("host", "client"):
        argv = [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="git-", dir="/tmp")))
        account, path = stack.enter_context(_account_of(repo, place))
        public = (folder / "client.pub").read_text()
        (place / "authorized_keys").write_text(
            f'restrict,command="git-shell -c \\"$SSH_ORIGINAL_COMMAND\\"" {public}'
        )
        (folder / "sshd_config").write_text(
            _SSHD.format(port=port, folder=folder, keys=place / "authorized_keys", account=account)
        )
        host = (folder / "host.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host}")
        log = stack.enter_context((folder / "server.log").open("ab"))
        env = {"PATH": PATH}
        stack.enter_context(running([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], log, env))
        wait_for_port(port, log.name)
        yield Server("ssh", port, str(path), account, "", ssh_env(folder, ssh), folder)


def ssh_env(folder: Path, ssh: str | None = None, *, key: str = "client") -> dict[str, str]:
    """How git reaches an `ssh_server` with one of the keys in its folder, whatever port is asked for."""
    options = (
        "-F /dev/null -o BatchMode=yes -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes"
        f" -o HostKeyAlias=[127.0.0.1]:{(folder / 'known_hosts').read_text().split(']:')[1].split()[0]}"
        f" -o UserKnownHostsFile={folder}/known_hosts -o ConnectTimeout=10 -i {folder}/{key}"
    )
    return {"GIT_SSH_COMMAND": f"{ssh or program('ssh')} {options}"}


@contextlib.contextmanager
def _account_of(repo: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """The account git runs under, and where it finds the repository."""
    if os.getuid() != 0:
        yield pwd.getpwuid(os.getuid()).pw_name, repo
        return
    try:
        entry = pwd.getpwnam(ACCOUNT)
    except KeyError:
        raise AssertionError(f"there is no account {ACCOUNT}: run {INSTALLER} as root") from None
    moved = place / repo.name
    shutil.move(repo, moved)
    repo.symlink_to(moved)
    for path in (place, moved, *moved.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
    place.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    try:
        yield ACCOUNT, moved
    finally:
        repo.unlink()
