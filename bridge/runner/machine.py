"""This machine: its facts, what it must not publish, and keeping it awake while a job runs.

A job reports what it measured about the machine; this is what the runner itself knows and signs in every
result, refusals included. Nothing here imports mlx.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from bridge import weights
from bridge.errors import MachineError, describe
from bridge.evidence.redact import secrets_of
from bridge.git.remote import for_git
from bridge.interpreter import versions
from bridge.presets import Preset
from bridge.proc import find_program, helper_environment, run_program, spawn
from bridge.protocol.result import ENGINE_FACT, WEIGHTS_FACT
from bridge.runner.models import FoundModel, engine_folder
from bridge.runner.sandbox.base import NoSandbox, Sandbox
from bridge.runner.sandbox.linux import find_bubblewrap
from bridge.runner.sandbox.macos import find_sandbox_exec

log = logging.getLogger(__name__)

Fact = str | int | float | bool | None
CAFFEINATE = "caffeinate"  # macOS's own program against sleep
_PROGRAM_S = 10.0

# Files that hold one token and nothing else, and others of credentials, relative to the home.
_TOKEN_FILES = (".cache/huggingface/token", ".huggingface/token")
_CREDENTIAL_FILES = (
    *(".netrc", ".git-credentials", ".config/git/credentials", ".config/gh/hosts.yml", ".aws/credentials"),
    *(".docker/config.json", ".npmrc", ".pypirc", ".cache/huggingface/stored_tokens"),
)
_MAX_CREDENTIAL_BYTES = 256 * 1024
# A user name in an address is a token when it is as long as one: ``https://ghp_…@example.org``.
_TOKEN_LENGTH = 20
# ``_authToken=…``, ``oauth_token: …``, ``"auth": "…"``, ``aws_secret_access_key = …``, netrc's ``password …``
_ASSIGNED = re.compile(
    r"""(?:token|secret|passw(?:or)?d|passphrase|auth|key)[\w-]*["']?[ \t]*[ \t:=][ \t]*["']?"""
    r"""([^\s"',{}\[\]]+)""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"://([^\s/@:]*)(?::([^\s/@]*))?@")


def machine_facts() -> dict[str, Fact]:
    """What the runner knows of this machine."""
    return {
        "system": platform.system(),
        "os_release": platform.release(),
        "machine": platform.machine(),
        "chip": _chip(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "metal": has_metal(),
        "python": platform.python_version(),
    }


def model_facts(found: Mapping[str, FoundModel]) -> dict[str, Fact]:
    """Where each model of a job was found, and which shipped model stood in for it."""
    return {f"model:{name}": str(model) for name, model in found.items()}


def input_facts(preset: Preset, found: Mapping[str, FoundModel]) -> dict[str, Fact]:
    """What the report must name as what ran: digests of the engine's source and of the models' weights.

    The runner computes them, not the job, so that a client can compare the report with them.
    """
    digests = {WEIGHTS_FACT + name: weights.digest(model.folder) for name, model in found.items()}
    if preset.argv[0] == "${engine}":
        digests[ENGINE_FACT] = engine_digest()
    return {name: digest for name, digest in digests.items() if digest is not None}


def engine_digest() -> str | None:
    """sha256 over the installed engine's Python files, as a report has it; None: there is no engine.

    It covers lines ``<sha256>  <path>`` in path order.
    """
    if (package := engine_folder()) is None:
        return None
    lines = [
        f"{weights.file_sha256(file)}  {file.relative_to(package).as_posix()}\n"
        for file in sorted(package.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tool_versions() -> dict[str, str]:
    """Versions of Python, git and the packages that jobs use; absent ones are left out."""
    found = {"python": platform.python_version(), **versions(("mlx", "mlx-lm", "kakeya-mac"))}
    if git := _first_line("git", "--version"):
        found["git"] = git.removeprefix("git version ")
    return found


def find_sandbox() -> Sandbox:
    """The sandbox of this machine; `NoSandbox`, which says why, where there is none that works."""
    try:
        return find_sandbox_exec() if sys.platform == "darwin" else find_bubblewrap()
    except MachineError as error:
        return NoSandbox(f"{error.message} ({error.remedy})")


def unfit(preset: Preset, *, allow_unsandboxed: bool) -> str | None:
    """Why this machine cannot run the preset, or None; `allow_unsandboxed` is the policy's."""
    if preset.runs_repo_code and not allow_unsandboxed and isinstance(sandbox := find_sandbox(), NoSandbox):
        return (
            f"it runs code of the requested commit, and there is no sandbox: {sandbox.why};"
            " the owner can set allow_unsandboxed = true in policy.toml"
        )
    missing = [name for name in preset.requires.modules if importlib.util.find_spec(name) is None]
    if missing:
        return f"the runner's Python ({sys.executable}) lacks {', '.join(missing)}"
    if preset.requires.metal and not has_metal():
        return f"it needs Metal, and this machine is {platform.system()} {platform.machine()}"
    wanted = preset.requires.memory_gb
    if wanted is not None and memory_bytes() < wanted * 1e9:
        return f"it needs {wanted:g} GB of memory, and this machine has {memory_bytes() / 1e9:.0f} GB"
    return None


def has_metal() -> bool:
    """Whether this is an Apple Silicon Mac."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def memory_bytes() -> int:
    """Physical memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _chip() -> str:
    if sys.platform == "darwin":
        return _first_line("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _first_line(*argv: str) -> str:
    try:
        done = run_program(argv, timeout_s=_PROGRAM_S)
    except MachineError:
        return ""
    return done.stdout.decode("utf-8", "replace").partition("\n")[0].strip() if done.ok else ""


def secret_files(home: Path, config_dir: Path, key: Path | None) -> dict[str, str]:
    """What programs of the user and this runner keep in files and must not be published, by where it is."""
    files = {f"~/{name}": home / name for name in (*_CREDENTIAL_FILES, *_TOKEN_FILES)}
    files["config.toml"] = config_dir / "config.toml"
    if key is not None:
        files["the runner's key"] = key
    values: dict[str, str] = {}
    for name, path in files.items():
        try:
            if not path.is_file():
                continue
            with path.open("rb") as file:
                text = file.read(_MAX_CREDENTIAL_BYTES).decode("utf-8", "surrogateescape")
        except OSError:  # a job of this user cannot read it either
            continue
        if name.endswith(("/token", "key")):
            values[name] = text
            continue
        found = [word for _, word in _secrets_in_urls(text)]
        if name != "config.toml":  # whose keys are names of files
            found += [match[1] for match in _ASSIGNED.finditer(text)]
        values |= {f"{name} ({number})": value for number, value in enumerate(dict.fromkeys(found), 1)}
    return values


def secrets_of_remote(remote: str) -> dict[str, str]:
    """What an address holds that must not be published, also as git is given it."""
    found = {f"{name} of the remote": word for name, word in _secrets_in_urls(remote)}
    return secrets_of(for_git(remote, {})[1]) | found


def _secrets_in_urls(text: str) -> Iterator[tuple[str, str]]:
    """Passwords, and user names that are tokens, of the addresses in a text: as written and decoded."""
    for match in _IN_URL.finditer(text):
        name, word = match[1], match[2]
        if word:
            yield "password", word
            yield "decoded password", unquote(word)
        elif len(name) >= _TOKEN_LENGTH:
            yield "token", name


def can_sleep() -> bool:
    """Whether this machine may fall asleep while a job runs."""
    return sys.platform == "darwin"


@contextlib.contextmanager
def keep_awake() -> Iterator[bool | None]:
    """Keep a Mac awake inside the block: sleep would spoil a job's figures and let its lease expire.

    Yields:
        Whether it is kept awake; None: this machine does not fall asleep.
    """
    if not can_sleep():
        yield None
        return
    try:
        # No idle sleep, no disk sleep, no system sleep on mains power; it ends with us.
        holder = spawn(
            [find_program(CAFFEINATE) or CAFFEINATE, "-i", "-m", "-s", "-w", str(os.getpid())],
            env=helper_environment(),
        )
    except MachineError as error:
        log.warning("the machine may fall asleep under this job: %s", describe(error))
        yield False
        return
    try:
        yield True
    finally:
        holder.kill()
