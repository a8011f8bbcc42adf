"""This machine: its facts, what it must not publish, and keeping it awake while a job runs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from bridge.errors import MachineError, describe
from bridge.evidence.redact import secrets_of
from bridge.git.remote import for_git
from bridge.interpreter import versions
from bridge.presets import Preset
from bridge.proc import helper_environment, run_program, spawn
from bridge.protocol.result import ENGINE_FACT, WEIGHTS_FACT
from bridge.runner.models import FoundModel, engine_folder
from bridge.runner.sandbox import NoSandbox, find_sandbox
from evidence_format import weights

log = logging.getLogger(__name__)

Fact = str | int | float | bool | None
CAFFEINATE = "caffeinate"  # macOS's own program against sleep

# Files of credentials, relative to the home; one named ``token`` holds that and nothing else.
_CREDENTIAL_FILES = (
    *(".cache/huggingface/token", ".huggingface/token"),
    *(".netrc", ".git-credentials", ".config/git/credentials", ".config/gh/hosts.yml", ".aws/credentials"),
    *(".docker/config.json", ".npmrc", ".pypirc", ".cache/huggingface/stored_tokens"),
)
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


def job_facts(preset: Preset, found: Mapping[str, FoundModel]) -> dict[str, Fact]:
    """Where each model of a job is, and digests with which a client compares what the report says of it."""
    facts: dict[str, Fact] = {f"model:{name}": str(model) for name, model in found.items()}
    for name, model in found.items():
        if files := weights.weight_files(model.folder):
            facts[WEIGHTS_FACT + name] = weights.digest(files)
    if preset.argv[0] == "${engine}" and (source := engine_digest()) is not None:
        facts[ENGINE_FACT] = source
    return facts


def engine_digest() -> str | None:
    """sha256 over the installed engine's Python files, as a report has it; None: there is no engine."""
    package = engine_folder()
    return None if package is None else weights.source_digest(package)


def tool_versions() -> dict[str, str]:
    """Versions of Python, git and the packages that jobs use; absent ones are left out."""
    found = {"python": platform.python_version(), **versions(("mlx", "mlx-lm", "kakeya-mac"))}
    if git := _first_line("git", "--version"):
        found["git"] = git.removeprefix("git version ")
    return found


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
    """Physical memory in bytes, as the engine's reports have it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _chip() -> str:
    if sys.platform == "darwin":
        return _first_line("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        return str(re.findall(r"(?m)^model name[^:]*: *(.*?)\s*$", Path("/proc/cpuinfo").read_text())[0])
    return platform.machine()


def _first_line(*argv: str) -> str:
    try:
        done = run_program(argv, timeout_s=10.0)
    except MachineError:
        return ""
    return done.stdout.decode("utf-8", "replace").partition("\n")[0].strip() if done.ok else ""


def secret_files(home: Path, config_dir: Path, keys: Mapping[str, Path]) -> dict[str, str]:
    """What programs of the user and this runner keep in files and must not be published, by where it is.

    `keys` are the runner's private ones; what each is called ends with ``key``.
    """
    files = {f"~/{name}": home / name for name in _CREDENTIAL_FILES}
    files["config.toml"] = config_dir / "config.toml"
    files |= keys
    values: dict[str, str] = {}
    for name, path in files.items():
        try:
            if not path.is_file():
                continue
            with path.open("rb") as file:
                text = file.read(256 * 1024).decode("utf-8", "surrogateescape")
        except OSError:  # a job of this user cannot read it either
            continue
        if name.endswith(("/token", "key")):
            values[name] = text
            continue
        found = list(_secrets_in_urls(text))
        if name != "config.toml":  # whose keys are names of files
            found += [match[1] for match in _ASSIGNED.finditer(text)]
        values |= {f"{name} ({number})": value for number, value in enumerate(dict.fromkeys(found), 1)}
    return values


def secrets_of_remote(remote: str) -> dict[str, str]:
    """What an address holds that must not be published, also as git is given it."""
    found = {f"the remote ({number})": word for number, word in enumerate(_secrets_in_urls(remote), 1)}
    return secrets_of(for_git(remote, {})[1]) | found


def _secrets_in_urls(text: str) -> Iterator[str]:
    """Passwords, and user names that are tokens, of the addresses in a text: as written and decoded."""
    for name, word in _IN_URL.findall(text):
        if word:
            yield from (word, unquote(word))
        elif len(name) >= _TOKEN_LENGTH:
            yield name


def can_sleep() -> bool:
    """Whether this machine may fall asleep while a job runs."""
    return sys.platform == "darwin"


@contextlib.contextmanager
def keep_awake() -> Iterator[bool | None]:
    """Keep a Mac awake inside the block: sleep would spoil a job's figures and let its lease expire.

    Yields whether it is kept awake; None: this machine does not fall asleep.
    """
    holder = None
    if can_sleep():
        # No idle sleep, no disk sleep, no system sleep on mains power; it ends with us.
        argv = [CAFFEINATE, "-i", "-m", "-s", "-w", str(os.getpid())]
        try:
            holder = spawn(argv, env=helper_environment())
        except MachineError as error:
            log.warning("the machine may fall asleep under this job: %s", describe(error))
    try:
        yield holder is not None if can_sleep() else None
    finally:
        if holder is not None:
            holder.kill()
