"""The steps of setup, in order. Each looks at one part of the Mac and says what would bring it there."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.errors import MachineError
from bridge.interpreter import NAME as RECORD
from bridge.mac import actions as act
from bridge.mac import launchd
from bridge.mac.actions import Action, StepReport, advice, answer, command, done, missing, succeeds, todo
from bridge.mac.options import ENVIRONMENTS, OPTIONS_FILE, TOKEN_VARIABLE, SetupOptions
from bridge.proc import run_program
from bridge.weights import faults

# A step's name, and the function that looks at it and changes nothing.
Steps = list[tuple[str, Callable[[], StepReport]]]

OLDEST_MACOS = (14, 0)
LEAST_MEMORY = 16 << 30
LEAST_DISK = 20 * 10**9
_RELEASES = "https://github.com/actions/runner/releases/download"
# https://docs.github.com/en/authentication/keeping-your-account-and-data-secure/githubs-ssh-key-fingerprints
_GITHUB_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


def setup_steps(options: SetupOptions) -> Steps:
    """What these options ask for, and the removal of what only an earlier run asked for."""
    wanted: dict[str, Callable[[SetupOptions], StepReport]]
    wanted = {"machine": _machine, "options": _stored_options, "environment": _environment}
    wanted |= {"git-lfs": _git_lfs, "models": _models, "policy": _policy}
    wanted |= {"actions runner": _actions_runner} if options.is_actions else {}
    wanted |= {"remote access": _remote_access} if options.is_serving else {}
    labels = [launchd.ACTIONS_LABEL] if options.is_actions else []
    labels += [launchd.SERVE_LABEL] if options.is_serving else []
    keep = {*wanted, *(f"service {label}" for label in labels), "deploy key" if options.is_serving else ""}
    steps: Steps = [(name, partial(look, options)) for name, look in wanted.items()]
    outdated = [step for step in removal_steps(options) if step[0] not in keep]
    steps += [(name, look) for name, look in outdated if look().state != "done"]
    for label in labels:
        steps.append((f"service file {label}", partial(_service_file, options, label)))
        steps.append((f"service {label}", partial(_service, options, label)))
    if not labels:
        fix = "--url URL for workflows of GitHub, --remote URL for the daemon; or start it by hand"
        steps.append(("service", partial(advice, "--service none", "nothing is kept running", fix)))
    steps.append(("power", partial(_power, options)))
    return [*steps, ("tailnet", _tailnet)] if options.tailnet else steps


def removal_steps(options: SetupOptions) -> Steps:
    """What uninstall removes, in order: services first, the options of the last run at the very end."""
    prefix, labels = options.prefix, launchd.SERVICE_LABELS
    return [
        *((f"service {label}", partial(_unwanted_service, options, label)) for label in labels),
        ("actions runner", partial(_unwanted_runner, options)),
        ("deploy key", partial(_unwanted_files, options.deploy_key.parent)),
        ("environment", partial(_unwanted_files, options.environment, prefix / ENVIRONMENTS)),
        ("options", partial(_unwanted_files, prefix / "services", prefix / OPTIONS_FILE)),
    ]


def self_test(options: SetupOptions, folder: Path) -> StepReport:
    """Decode and measure with the shipped pair, have the gate judge the report, check the policy."""
    report, own = folder / "report.json", {"KAKEYA_STATE": str(folder)}
    engine, program = str(options.program.with_name("kakeya_engine")), str(options.program)
    few = ("--prompts", "code", "--limit", "1", "--max-tokens", "16", "--claim", "none")
    where = "kakeya_engine generate, eval throughput; kakeya_mac gate, runner policy check"
    if report.is_file():
        return done(where, "the engine measures, the gate accepts its report")
    actions = [
        command(engine, "generate", "--max-tokens", "8", "class BaseProject:", env=own),
        command(engine, "eval", "throughput", *few, "--report", str(report), env=own),
        command(program, "gate", str(report), env=own),
        command(program, "runner", "policy", "check", env=options.folders),
    ]
    return todo(where, "done at the end of every setup", actions=actions)


def _machine(options: SetupOptions) -> StepReport:
    """The first thing that does not fit is the finding."""
    facts = []
    for looked_at, fact, fix in _host_checks(options):
        if fix:
            return missing(looked_at, fact, fix)
        facts.append(fact)
    return done("uname, sw_vers, sysctl, xcode-select", ", ".join(facts))


def _host_checks(options: SetupOptions) -> Iterator[tuple[str, str, str]]:
    """What was looked at, what was found, and the fix, which is empty where it fits."""
    system, version = answer("uname", "-s"), answer("sw_vers", "-productVersion") or ""
    fix = "" if system == "Darwin" else "run this on the Mac"
    yield "uname -s", f"{system}, not macOS" if fix else "macOS", fix
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    oldest = ".".join(map(str, OLDEST_MACOS))
    fix = "" if numbers >= OLDEST_MACOS else f"update to macOS {oldest} or later, which MLX needs"
    yield "sw_vers -productVersion", f"version {version}", fix
    arch, chip = answer("uname", "-m"), answer("sysctl", "-n", "machdep.cpu.brand_string") or "unknown chip"
    is_translated = answer("sysctl", "-n", "sysctl.proc_translated") == "1"
    native = "this shell runs under Rosetta: use a native terminal"
    fix = "" if arch == "arm64" else native if is_translated else "MLX needs Apple silicon"
    yield "uname -m, sysctl", f"{chip} ({arch})", fix
    is_root = answer("id", "-u") == "0"
    fix = "run it as the account that is to run jobs; only what needs an administrator takes sudo"
    yield "id -u", "this is root" if is_root else f"account {options.user}", fix if is_root else ""
    existing = [folder for folder in (options.prefix, *options.prefix.parents) if folder.exists()]
    for folder in existing:  # no other account may be able to replace a program that a service starts
        status, fix = folder.stat(), f"choose another --prefix, or change {folder}: chown, chmod go-w"
        if status.st_uid not in (0, os.getuid()):
            yield str(folder), "it belongs to another account, which could replace what is in it", fix
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            yield str(folder), "other accounts may write there, and replace what is in it", fix
    yield str(options.prefix), f"prefix {options.prefix}", ""
    memory = int(answer("sysctl", "-n", "hw.memsize") or 0)
    fix = "" if memory >= LEAST_MEMORY else f"{LEAST_MEMORY >> 30} GiB are the least that a model fits into"
    yield "sysctl hw.memsize", f"{memory / (1 << 30):.0f} GiB of memory", fix
    free = shutil.disk_usage(existing[0]).free
    fix = "" if free >= LEAST_DISK else f"free some space: {LEAST_DISK / 1e9:.0f} GB are needed"
    yield str(existing[0]), f"{free / 1e9:.0f} GB free", fix
    fix = "" if succeeds("xcode-select", "-p") else "xcode-select --install"
    yield "xcode-select -p", "no command line tools" if fix else "command line tools", fix
    yield sys.executable, f"Python {platform.python_version()}", ""


def _stored_options(options: SetupOptions) -> StepReport:
    return act.file_step(options.prefix / OPTIONS_FILE, options.stored(), f"service {options.service}")


def _environment(options: SetupOptions) -> StepReport:
    """Install this checkout with every package by version and digest, and record its interpreter.

    Environments lie side by side and a link points to one, so that a failed installation leaves the old one
    working, and a running daemon keeps its files. The next installation removes what is not in use.
    """
    where, python = str(options.environment), options.environment / "bin" / "python"
    check = "import sys; from bridge.interpreter import objection; sys.exit(objection() or 0)"
    problem = None
    if not python.exists():
        problem = "there is none"
    elif not (options.environment / RECORD).is_file():
        problem = "its interpreter was not recorded, so a replacement would go unnoticed"
    elif not succeeds(str(python), "-I", "-c", check):
        problem = "its interpreter or its packages are not those that were recorded"
    if not (options.source / "uv.lock").is_file():
        if problem is None:
            return done(where, "as it was installed; upgrade from a checkout")
        fix = "run scripts/setup_mac.sh of a checkout"
        return missing(where, f"{problem}; nothing can be installed without a checkout", fix)
    digest = _source_digest(options.source)
    if problem is None and act.is_written(options.environment / "installed.sha256", digest):
        return done(where, "this checkout, on the recorded interpreter")
    problem = problem or "another version than this checkout's is installed"
    return todo(where, problem, actions=_install_actions(options, digest))


def _install_actions(options: SetupOptions, digest: str) -> list[Action]:
    prefix, folder = options.prefix, options.prefix / ENVIRONMENTS
    made = next(p for n in itertools.count(1) if not (p := folder / f"{digest[:12]}-{n}").exists())
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    given = os.environ.get("KAKEYA_PYTHON") or sys.executable
    base = os.path.abspath(given) if os.sep in given else given
    python, pins = str(made / "bin" / "python"), str(options.source / "scripts" / "requirements-build.txt")
    pip = ("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
    # Without build isolation uv fetches no build backend, which it would not compare with a digest.
    sync = ("sync", "--locked", "--inexact", "--no-editable", "--no-build-isolation", "--extra", "engine")
    where = ("--project", str(options.source), "--python", python)
    record = "from bridge import interpreter as i; i.write(i.record_path(), i.observe())"
    return [
        act.make_folder(prefix),
        *(act.remove(path) for path in others if path != options.environment.resolve()),
        command(base, "-I", "-m", "venv", str(made), cwd=prefix),
        command(python, *pip, "--only-binary", ":all:", "-r", pins, cwd=prefix),
        command(str(made / "bin/uv"), *sync, *where, env={"UV_PROJECT_ENVIRONMENT": str(made)}, cwd=prefix),
        command(python, "-I", "-c", record, cwd=prefix),
        act.write(made / "installed.sha256", digest),
        command("ln", "-sfn", f"{ENVIRONMENTS}/{made.name}", str(options.environment)),
    ]


def _source_digest(root: Path) -> str:
    """SHA-256 over the names and contents of what is installed: lock file and packages."""
    total, files = hashlib.sha256(), [root / "uv.lock", root / "pyproject.toml"]
    for path in sorted([*files, *(root / "bridge").rglob("*"), *(root / "engine").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            total.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def _git_lfs(_options: SetupOptions) -> StepReport:
    """Install git-lfs, and have git fetch nothing by itself; a filter of the owner's is left as it is."""
    where, key = "git lfs version", "filter.lfs.process"
    version, own = answer("git", "lfs", "version"), answer("git", "config", "--global", "--get", key)
    actions = [command("git", "lfs", "install", "--skip-smudge", "--skip-repo")] if own is None else []
    if version is None and succeeds("brew", "--version"):
        return todo(where, "not installed", actions=[command("brew", "install", "git-lfs"), *actions])
    if version is None:
        fix = "brew install git-lfs (https://brew.sh), or the package of git-lfs.com"
        return missing(where, "not installed, and there is no Homebrew", fix)
    if own is None:
        return todo(f"git config --global {key}", "not set up for this account", actions=actions)
    if "--skip" not in own.split():
        finding = f"git fetches large files with every checkout of this account ({own})"
        return advice(f"git config --global {key}", finding, "git lfs install --skip-smudge --force")
    return done(where, version.split(" ")[0])


def _models(options: SetupOptions) -> StepReport:
    folder = options.models
    if not folder.is_dir():
        return todo(str(folder), "there is none", actions=[act.make_folder(folder)])
    found = {path.name: faults(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if broken := [f"{name}: {lacks[0]}" for name, lacks in found.items() if lacks]:
        return advice(str(folder), f"not complete: {'; '.join(broken)}", "fetch it again into that folder")
    return done(str(folder), f"complete: {', '.join(found)}" if found else "no models yet")


def _policy(options: SetupOptions) -> StepReport:
    path = options.config_dir / "policy.toml"
    if path.exists():
        return done(str(path), "the owner's; `kakeya_mac runner policy check` reads it")
    init = command(str(options.program), "runner", "policy", "init", env={"KAKEYA_CONFIG": str(path.parent)})
    return todo(str(path), "there is none", actions=[init])


def _actions_runner(options: SetupOptions) -> StepReport:
    """Install GitHub's runner by digest and register it. It updates itself afterwards, as GitHub demands."""
    folder, page, files = options.actions_runner, options.url or "", launchd.runner_settings(options)
    where, fix = str(folder / ".runner"), "kakeya_mac runner uninstall, then setup again"
    settings = [act.write(path, text) for path, text in files.items()]
    known, asked = _registration(folder), ",".join(options.labels)
    if known is None and not (options.token_file or options.token or succeeds("gh", "auth", "status")):
        fix = f"take a token from {page}/settings/actions/runners/new and give it in {TOKEN_VARIABLE} or"
        return missing(where, "not registered, no token", f"{fix} --token-file; or log in with gh")
    if known is None:
        # Registering writes the PATH of now, so the settings come last.
        return todo(where, "not registered", actions=[*_register_actions(options), *settings])
    url, name = str(known.get("gitHubUrl", "")).rstrip("/"), known.get("agentName")
    labels = folder / "registered-labels"
    found = labels.read_text(encoding="utf-8").strip() if labels.is_file() else asked
    if (url, name) != (page, options.name) or set(found.lower().split(",")) != set(asked.lower().split(",")):
        return missing(where, f"registered as {name} for {url} with the labels {found}", fix)
    if not all(act.is_written(path, text) for path, text in files.items()):
        return todo(str(folder / ".env"), "its variables or the PATH of jobs have changed", actions=settings)
    return done(where, f"registered as {name} for {url}")


def _registration(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / ".runner").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and (folder / "config.sh").exists() else None


def _register_actions(options: SetupOptions) -> list[Action]:
    folder, version, labels = options.actions_runner, options.runner_version, ",".join(options.labels)
    archive = options.prefix / "downloads" / f"actions-runner-osx-arm64-{version}.tar.gz"
    fetch = ("curl", "-fsSL", "--proto", "=https", "--retry", "3", "-o", str(archive))
    named = ("--name", options.name, "--labels", labels, "--work", "_work", "--replace")
    config = (str(folder / "config.sh"), "--unattended", "--url", options.url or "", *named)
    remedy = f"give one in {TOKEN_VARIABLE} or --token-file; or does gh's login administer it?"
    token = _token(options, "registration-token", options.url or "", remedy)
    digest, other = archive.with_suffix(".sha256"), "does --runner-sha256 belong to --runner-version?"
    return [
        act.make_folder(archive.parent),
        command(*fetch, f"{_RELEASES}/v{version}/{archive.name}"),
        act.write(digest, f"{options.runner_sha256}  {archive}\n"),
        command("shasum", "-a", "256", "-c", str(digest), remedy=other),
        act.make_folder(folder, "700"),
        command("tar", "-xzf", str(archive), "-C", str(folder)),
        command(*config, cwd=folder, secret=token),
        act.write(folder / "registered-labels", f"{labels}\n"),  # the runner does not keep them
    ]


def _token(options: SetupOptions, kind: str, page: str, remedy: str) -> tuple[str, Callable[[], str]]:
    """The variable in which GitHub's runner reads a token, and where the token comes from."""
    parts = urlsplit(page)
    slug = parts.path.strip("/")
    place = f"{'repos' if '/' in slug else 'orgs'}/{slug}/actions/runners/{kind}"

    def read() -> str:
        if options.token_file is not None:
            return options.token_file.read_text(encoding="utf-8").strip()
        ask = ("gh", "api", "--hostname", parts.hostname or "", "-X", "POST", place, "--jq", ".token")
        if token := options.token or answer(*ask):
            return token.strip()
        raise MachineError(f"there is no {kind} for {slug}", remedy)

    return "ACTIONS_RUNNER_INPUT_TOKEN", read


def _remote_access(options: SetupOptions) -> StepReport:
    """Check that the daemon can push to its remote without a login, and make a deploy key where it cannot."""
    key, where = options.deploy_key, f"git push --dry-run {options.bus}"
    if not options.program.exists():
        return todo(where, "checked once the environment is there", actions=_key_actions(options))
    problem = _push_problem(options)
    if problem is None:
        return done(where, f"the daemon may push{f' with {key}' if key.exists() else ''}")
    if options.ssh_remote is None:
        fix = "set up a credential helper that needs no login, or give --remote git@HOST:OWNER/NAME.git"
        return missing(where, problem, f"{fix}, for which setup makes a deploy key")
    if not key.exists():
        return todo(where, problem, actions=_key_actions(options))
    host, path = options.ssh_remote
    public = key.with_name(f"{key.name}.pub").read_text(encoding="utf-8").strip()
    fix = f"give this key write access to {path} at {host} (GitHub: Settings, Deploy keys): {public}"
    return missing(where, problem, fix)


def _push_problem(options: SetupOptions) -> str | None:
    """Why the daemon could not push; git runs without agents and prompts, as it does in a service."""
    login, key = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_ASKPASS", "GIT_ASKPASS"), options.deploy_key
    env = {name: value for name, value in act.owners_environment().items() if name not in login}
    env["GIT_SSH_COMMAND"] = launchd.ssh_command(key) if key.exists() else "ssh -o BatchMode=yes"
    env["GIT_TERMINAL_PROMPT"] = "0"
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-access-") as folder:
        run = partial(run_program, env=env, cwd=Path(folder), timeout_s=act.ANSWER_S)
        run(["git", "init", "-q", "--bare"])
        blob = run(["git", "hash-object", "-w", "--stdin"]).stdout.decode().strip()
        ended = run(["git", "push", "-q", "--dry-run", str(options.bus), f"{blob}:refs/mac-bridge/setup"])
    return None if ended.ok else act.last_words(ended) or f"git push ended with {ended.exit_code}"


def _key_actions(options: SetupOptions) -> list[Action]:
    """Make a key for the daemon, and have gh add it where gh is logged in."""
    if options.ssh_remote is None:
        return []
    key, title, (host, path) = options.deploy_key, f"kakeya-mac {options.name}", options.ssh_remote
    make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", title, "-f", str(key))
    actions = [act.make_folder(key.parent, "700"), command(*make)]
    if host == "github.com":
        actions.append(act.write(key.with_name("known_hosts"), f"{host} {_GITHUB_KEY}\n"))
    if succeeds("gh", "auth", "status", "--hostname", host):
        add = ("gh", "repo", "deploy-key", "add", f"{key}.pub", "--repo", f"{host}/{path}", "--title", title)
        actions.append(command(*add, "--allow-write", may_fail=True))
    return actions


def _service_file(options: SetupOptions, label: str) -> StepReport:
    """Have a service's property list in the prefix, and the folder of its log."""
    text, logs = launchd.property_list(options, label), launchd.log_file(options.prefix, label).parent
    report = act.file_step(launchd.staged(options.prefix, label), text, "as it should be")
    return replace(report, actions=[act.make_folder(logs), *report.actions]) if report.actions else report


def _service(options: SetupOptions, label: str) -> StepReport:
    """Have launchd run a service with what the options ask for."""
    prefix, target, found = options.prefix, str(launchd.installed(label)), launchd.query(label)
    if (other := launchd.foreign_prefix(label, prefix)) is not None:
        fix = "a machine has one service of a kind: run uninstall there, or choose another --service here"
        return missing(target, f"it is of the setup in {other}", fix)
    if found is None or not launchd.is_current(prefix, label):
        finding = "it has to be restarted with what is wanted now" if found else "launchd does not know it"
        return todo(target, finding, actions=launchd.start_actions(options, label))
    where = f"launchctl print system/{label}"
    if found.runs:
        return done(where, "runs, also after a restart")
    fix = f"see why: tail {launchd.log_file(prefix, label)}; launchd tries again by itself"
    return missing(where, f"launchd knows it, and it does not run: {found.said}", fix)


def _unwanted_service(options: SetupOptions, label: str) -> StepReport:
    """Remove our service; that of another setup is left alone."""
    target, own = str(launchd.installed(label)), launchd.staged(options.prefix, label)
    actions = [act.remove(own)] if own.exists() else []
    if launchd.is_present(label, options.prefix):
        actions = [*launchd.stop_actions(options, label), command("rm", "-f", target, sudo=True), *actions]
    return todo(target, "there, and not wanted", actions=actions) if actions else done(target, "none of ours")


def _unwanted_runner(options: SetupOptions) -> StepReport:
    """Unregister GitHub's runner, and only then remove it."""
    folder, known = options.actions_runner, _registration(options.actions_runner)
    if not folder.exists():
        return done(str(folder), "there is none")
    if launchd.is_present(launchd.ACTIONS_LABEL, options.prefix):
        return missing(str(folder), "there, not wanted, and it runs", "stop its service first, see there")
    actions = [act.remove(options.prefix / name) for name in (folder.name, "downloads", "hook")]
    if known is not None:
        page = str(known.get("gitHubUrl", "")).rstrip("/")
        remedy = f"give a token of {page}/settings/actions/runners (Remove) in {TOKEN_VARIABLE} or"
        remedy += f" --token-file, or log in with gh; or remove the runner there, and then delete {folder}"
        token = _token(options, "remove-token", page, remedy)
        actions.insert(0, command(f"{folder}/config.sh", "remove", cwd=folder, secret=token, remedy=remedy))
    return todo(str(folder), "there, and not wanted", actions=actions)


def _unwanted_files(*paths: Path) -> StepReport:
    found = [path for path in paths if os.path.lexists(path)]
    if not found:
        return done(str(paths[0]), "there is none")
    return todo(str(found[0]), "there, and not wanted", actions=[act.remove(path) for path in found])


def _power(options: SetupOptions) -> StepReport:
    """No sleep on mains power, and a start by itself after a power failure."""
    where, wanted = "pmset -g custom", {"sleep": "0", "autorestart": "1"}
    _, _, rest = (answer("pmset", "-g", "custom") or "").partition("AC Power:")
    mains = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = dict(re.findall(r"^\s*(sleep|autorestart)\s+(\d+)", mains, re.MULTILINE))
    if not found:
        return advice(where, "no power settings can be read", "see that the Mac stays awake")
    other = [f"{name} {found[name]}" for name, value in wanted.items() if found.get(name, value) != value]
    if not other:
        return done(where, "does not sleep")
    actions = [command("pmset", "-c", *(word for pair in wanted.items() for word in pair), sudo=True)]
    return (todo if options.sudo else advice)(where, f"it may sleep: {', '.join(other)}", actions=actions)


def _tailnet() -> StepReport:
    """Connect tailscale with its SSH server, for work by hand."""
    where = "tailscale status"
    try:
        status = json.loads(answer("tailscale", "status", "--json") or "")
        own, is_on = status.get("Self") or {}, status.get("BackendState") == "Running"
        keys, name = own.get("sshHostKeys"), own.get("DNSName", "its name")
    except (ValueError, AttributeError):
        fix = "brew install tailscale (the App Store's has no SSH server), and start tailscaled"
        return missing(where, "not installed, or not running", fix)
    if is_on and keys:
        return done(where, f"SSH at {name}")
    up = command("tailscale", "up", "--ssh", sudo=True)
    return todo(where, "SSH is off" if is_on else "not connected", actions=[up])
