"""``setup``, ``check`` and ``uninstall``: the steps in their order, and what runs them.

A step looks at one part of the Mac, changes nothing, and says what would bring it there.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge import mac
from bridge.errors import BridgeError, MachineError
from bridge.mac import launchd
from bridge.mac.options import ENVIRONMENT, ENVIRONMENTS, OPTIONS_FILE, TOKEN_VARIABLE, SetupOptions, parser
from bridge.proc import run_program
from bridge.weights import faults

log = logging.getLogger("bridge.mac")

Look = Callable[[SetupOptions], mac.StepReport]
Step = tuple[str, Look]

OLDEST_MACOS = (14, 0)
LEAST_MEMORY = 16 << 30
LEAST_DISK = 20 * 10**9
# Nothing after these makes sense while they are missing.
_STOPS = ("machine", "environment")
_REMOVED = """
Removed. Left: models (%s), the policy and its folder (%s), state with the key that signs results (%s), \
logs (%s), git-lfs's filter (~/.gitconfig), the power settings (pmset), tailscale, results on the remote, \
and a deploy key that the server was given."""
_RELEASES = "https://github.com/actions/runner/releases/download"
# https://docs.github.com/en/authentication/keeping-your-account-and-data-secure/githubs-ssh-key-fingerprints
_GITHUB_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


def main(argv: Sequence[str]) -> int:
    """Run ``setup`` (the default), ``check`` or ``uninstall`` with flags, and return the exit code."""
    flags = parser().parse_args(list(argv))
    log.handlers[:] = [logging.StreamHandler(sys.stderr if flags.json else sys.stdout)]
    log.setLevel(logging.INFO)
    log.propagate = False
    if flags.dry_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that went away (`| head`) ends it
    try:
        return _run(flags)
    except BridgeError as error:
        message, remedy, code = error.message, error.remedy, error.exit_code
    except KeyboardInterrupt:
        message, remedy, code = "interrupted; a second run goes on from here", None, 1
    except Exception as error:
        traceback.print_exc()
        message, remedy, code = f"our own bug: {type(error).__name__}: {error}", "please report it", 70
    print(f"error: {message}", *([f"  {remedy}"] if remedy else []), sep="\n", file=sys.stderr)
    if flags.json:
        print(json.dumps({"error": message, "remedy": remedy, "exit_code": code}, sort_keys=True))
    return code


def _run(flags: argparse.Namespace) -> int:
    options, name = SetupOptions(flags), flags.command
    mode = "look" if name == "check" else "plan" if flags.dry_run else name
    results = _walk(options, removal_steps() if name == "uninstall" else setup_steps(options), mode)
    changed = any(result["done"] for result in results)
    is_set_up = mode == "setup" and options.program.exists() and results[-1]["name"] not in _STOPS
    if is_set_up or (mode == "plan" and name == "setup"):
        with tempfile.TemporaryDirectory(prefix="kakeya-mac-test-") as folder:
            (test,) = _walk(options, [("self-test", partial(_self_test, folder=Path(folder)))], mode)
        results.append({**test, "done": []} | ({"state": "advice"} if mode == "plan" else {}))
    unready = [result["name"] for result in results if result["state"] not in ("done", "advice")]
    if mode == "plan":
        log.info("\nNothing was changed: this was a dry run.")
    elif unready:
        log.info("\nNot %s: %s.", "removed" if name == "uninstall" else "ready", ", ".join(unready))
    elif name == "uninstall":
        kept = (options.models, options.config_dir, options.state_dir, options.prefix / "logs")
        log.info(_REMOVED, *kept)
    else:
        log.info("\nReady." if changed else "\nReady; nothing had to be changed.")
    code = 0 if mode == "plan" or not unready else 1
    if flags.json:
        document = {"command": name, "dry_run": flags.dry_run, "ready": not unready, "changed": changed}
        print(json.dumps({**document, "steps": results, "exit_code": code}, sort_keys=True), flush=True)
    return code


def _walk(options: SetupOptions, steps: Iterable[Step], mode: str) -> list[dict[str, Any]]:
    """Report every step: in the mode ``plan`` with what would be done, else after it."""
    results: list[dict[str, Any]] = []
    for name, look in steps:
        failed = {result["name"] for result in results if result["state"] in ("to do", "missing")}
        if (mode == "setup" and not failed.isdisjoint(_STOPS)) or (
            mode == "uninstall" and failed and not name.startswith("service ")
        ):
            log.info("the rest waits until that is settled")
            break
        report, lines = _look(look, options), list[str]()
        if mode in ("setup", "uninstall") and report.state == "to do":
            log.info("%s: %s", name, report.finding)
            report, lines = _apply(report, look, options)
        log.info("%-8s %s: %s  [%s]", report.state, name, report.finding, report.looked_at)
        if report.fix:
            log.info("      fix: %s", report.fix)
        would = report.actions if mode == "plan" else ()
        for action in would:
            content = "".join(f"\n             | {line}" for line in action.content.splitlines())
            log.info("      would: %s%s", action.line, content)
        found = {key: str(getattr(report, key)) for key in ("state", "looked_at", "finding", "fix")}
        results.append({"name": name, **found, "done": lines, "would": [action.line for action in would]})
    return results


def _look(look: Look, options: SetupOptions) -> mac.StepReport:
    """A step's report; what needs an administrator is missing where setup may not use sudo."""
    report = look(options)
    if options.sudo or not any(action.sudo for action in report.actions):
        return report
    typed = "; ".join(action.line for action in report.actions)
    fix = f"setup with --sudo, or an administrator types: {typed}"
    return replace(report, state="missing" if report.state == "to do" else report.state, fix=fix)


def _apply(report: mac.StepReport, look: Look, options: SetupOptions) -> tuple[mac.StepReport, list[str]]:
    """Do what a step asks for; its report afterwards, and the lines that a person would have typed."""
    try:
        for action in report.actions:
            log.info("      $ %s", action.line)
            action.run()
        after = _look(look, options)
    except (MachineError, OSError) as error:
        fix = getattr(error, "remedy", None) or "mend that, and run it again"
        return mac.missing(report.looked_at, str(error), fix), []
    if after.state == "to do":
        after = replace(after, state="missing", fix="still so: please report this bug")
    return after, [action.line for action in report.actions]


def setup_steps(options: SetupOptions) -> Iterator[Step]:
    """What these options ask for, and the removal of what only an earlier run asked for."""
    labels = [launchd.ACTIONS_LABEL] if options.is_actions else []
    labels += [launchd.SERVE_LABEL] if options.is_serving else []
    kept = {"environment", "options", *(f"service {label}" for label in labels)}
    yield from (("machine", _machine), ("options", _stored_options), ("environment", _environment))
    yield from (("git-lfs", _git_lfs), ("models", _models), ("policy", _policy))
    if options.is_actions:
        kept.add("actions runner")
        yield "actions runner", _actions_runner
    if options.is_serving:
        kept.add("deploy key")
        yield "remote access", _remote_access
    yield from (step for step in removal_steps() if step[0] not in kept and step[1](options).state != "done")
    for label in labels:
        yield f"service file {label}", partial(launchd.service_file, label=label)
        yield f"service {label}", partial(launchd.service, label=label)
    if not labels:
        fix = "--url URL for workflows of GitHub, --remote URL for the daemon; or start it by hand"
        yield "service", lambda _: mac.advice("--service none", "nothing is kept running", fix)
    yield "power", _power
    if options.tailnet:
        yield "tailnet", _tailnet


def removal_steps() -> Iterator[Step]:
    """What uninstall removes, in order: services first, the options of the last run at the very end."""
    for label in launchd.SERVICE_LABELS:
        yield f"service {label}", partial(launchd.unwanted_service, label=label)
    yield "actions runner", _unwanted_runner
    yield "deploy key", partial(_unwanted, names=("ssh",))
    yield "environment", partial(_unwanted, names=(ENVIRONMENT, ENVIRONMENTS))
    yield "options", partial(_unwanted, names=("services", OPTIONS_FILE))


def _machine(options: SetupOptions) -> mac.StepReport:
    """The first thing that does not fit is the finding."""
    facts = []
    for fits, looked_at, fact, fix in _host_checks(options):
        if not fits:
            return mac.missing(looked_at, fact, fix)
        facts.append(fact)
    return mac.done("uname, sw_vers, sysctl, xcode-select", ", ".join(facts))


def _host_checks(options: SetupOptions) -> Iterator[tuple[bool, str | Path, str, str]]:
    """Whether a part fits, what was looked at, what was found, and the fix."""
    system, version = mac.answer("uname", "-s"), mac.answer("sw_vers", "-productVersion") or "unknown"
    fact = "macOS" if system == "Darwin" else f"{system}, not macOS"
    yield system == "Darwin", "uname -s", fact, "run this on the Mac"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    fix = f"update to macOS {'.'.join(map(str, OLDEST_MACOS))} or later, which MLX needs"
    yield numbers >= OLDEST_MACOS, "sw_vers -productVersion", f"version {version}", fix
    arch, chip = mac.answer("uname", "-m"), mac.answer("sysctl", "-n", "machdep.cpu.brand_string")
    fix = "MLX needs Apple silicon; where that is there, the shell runs under Rosetta: use a native terminal"
    yield arch == "arm64", "uname -m, sysctl", f"{chip or 'unknown chip'} ({arch})", fix
    is_root = mac.answer("id", "-u") == "0"
    fix = "run it as the account that is to run jobs; only what needs an administrator takes sudo"
    yield not is_root, "id -u", "this is root" if is_root else f"account {options.user}", fix
    existing = [folder for folder in (options.prefix, *options.prefix.parents) if folder.exists()]
    for folder in existing:  # no other account may be able to replace a program that a service starts
        status, fix = folder.stat(), f"choose another --prefix, or change {folder}: chown, chmod go-w"
        is_shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if is_shared or status.st_uid not in (0, os.getuid()):
            yield False, folder, "other accounts may write there, and replace what is in it", fix
    yield True, options.prefix, f"prefix {options.prefix}", ""
    memory, free = int(mac.answer("sysctl", "-n", "hw.memsize") or 0), shutil.disk_usage(existing[0]).free
    fix = f"{LEAST_MEMORY >> 30} GiB are the least that a model fits into"
    yield memory >= LEAST_MEMORY, "sysctl hw.memsize", f"{memory / (1 << 30):.0f} GiB of memory", fix
    fix = f"free some space: {LEAST_DISK / 1e9:.0f} GB are needed"
    yield free >= LEAST_DISK, existing[0], f"{free / 1e9:.0f} GB free", fix
    has_tools = mac.answer("xcode-select", "-p") is not None
    fact = "command line tools" if has_tools else "no command line tools"
    yield has_tools, "xcode-select -p", fact, "xcode-select --install"
    yield True, sys.executable, f"Python {platform.python_version()}", ""


def _stored_options(options: SetupOptions) -> mac.StepReport:
    path, text = options.prefix / OPTIONS_FILE, options.stored()
    if mac.is_written(path, text):
        return mac.done(path, f"service {options.service}")
    return mac.todo(path, "missing, or not what is wanted now", mac.write(path, text))


def _environment(options: SetupOptions) -> mac.StepReport:
    """Install this checkout with every package by version and digest, and record its interpreter.

    Environments lie side by side and a link points to one, so that a failed installation leaves the old one
    working, and a running daemon keeps its files. The next installation removes what is not in use.
    """
    where, is_checkout = options.environment, (options.source / "uv.lock").is_file()
    digest = _source_digest(options.source) if is_checkout else ""
    check = "sys.exit(not i.record_path().is_file() or i.objection() or 0)"
    script = f"import sys; from bridge import interpreter as i; {check}"
    problem = None
    if mac.answer(where / "bin" / "python", "-I", "-c", script) is None:
        problem = "there is none, or its interpreter was not recorded, or that or a package has changed"
    elif is_checkout and not mac.is_written(where / "installed.sha256", digest):
        problem = "another version than this checkout's is installed"
    if problem is None:
        return mac.done(where, "up to date, on the recorded interpreter")
    if is_checkout:
        return mac.todo(where, problem, *_install_actions(options, digest))
    return mac.missing(where, f"{problem}; this is no checkout", "run scripts/setup_mac.sh of a checkout")


def _install_actions(options: SetupOptions, digest: str) -> list[mac.Action]:
    prefix, folder, source = options.prefix, options.prefix / ENVIRONMENTS, options.source
    made = next(p for n in itertools.count(1) if not (p := folder / f"{digest[:12]}-{n}").exists())
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    given = os.environ.get("KAKEYA_PYTHON") or sys.executable
    base = os.path.abspath(given) if os.sep in given else given
    python, pins = made / "bin" / "python", source / "scripts" / "requirements-build.txt"
    pip = ("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
    # Without build isolation uv fetches no build backend, which it would not compare with a digest.
    sync = ("sync", "--locked", "--inexact", "--no-editable", "--no-build-isolation", "--extra", "engine")
    into = {"UV_PROJECT_ENVIRONMENT": str(made)}
    record = "from bridge import interpreter as i; i.write(i.record_path(), i.observe())"
    return [
        mac.make_folder(prefix),
        *(mac.remove(path) for path in others if path != options.environment.resolve()),
        mac.command(base, "-I", "-m", "venv", made, cwd=prefix),
        mac.command(python, *pip, "--only-binary", ":all:", "-r", pins, cwd=prefix),
        mac.command(made / "bin/uv", *sync, "--project", source, "--python", python, env=into, cwd=prefix),
        mac.command(python, "-I", "-c", record, cwd=prefix),
        mac.write(made / "installed.sha256", digest),
        mac.command("ln", "-sfn", f"{ENVIRONMENTS}/{made.name}", options.environment),
    ]


def _source_digest(root: Path) -> str:
    """SHA-256 over the names and contents of what is installed: lock file and packages."""
    total, files = hashlib.sha256(), [root / "uv.lock", root / "pyproject.toml"]
    for path in sorted([*files, *(root / "bridge").rglob("*"), *(root / "engine").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            total.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def _git_lfs(_options: SetupOptions) -> mac.StepReport:
    """Install git-lfs, and have git fetch nothing by itself; a filter of the owner's is left as it is."""
    where, setting = "git lfs version", "git config --global filter.lfs.process"
    version, own = mac.answer("git", "lfs", "version"), mac.answer(*setting.split())
    actions = [mac.command("git", "lfs", "install", "--skip-smudge", "--skip-repo")] if own is None else []
    if version is None and mac.answer("brew", "--version") is None:
        fix = "brew install git-lfs (https://brew.sh), or the package of git-lfs.com"
        return mac.missing(where, "not installed, and there is no Homebrew", fix)
    if version is None:
        return mac.todo(where, "not installed", mac.command("brew", "install", "git-lfs"), *actions)
    if own is None:
        return mac.todo(setting, "not set up for this account", *actions)
    if "--skip" not in own.split():
        finding = f"git fetches large files with every checkout of this account ({own})"
        return mac.advice(setting, finding, "git lfs install --skip-smudge --force")
    return mac.done(where, version.split(" ")[0])


def _models(options: SetupOptions) -> mac.StepReport:
    folder = options.models
    if not folder.is_dir():
        return mac.todo(folder, "there is none", mac.make_folder(folder))
    found = {path.name: faults(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if broken := [f"{name}: {lacks[0]}" for name, lacks in found.items() if lacks]:
        return mac.advice(folder, f"not complete: {'; '.join(broken)}", "fetch it again into that folder")
    return mac.done(folder, f"complete: {', '.join(found)}" if found else "no models yet")


def _policy(options: SetupOptions) -> mac.StepReport:
    path, env = options.config_dir / "policy.toml", {"KAKEYA_CONFIG": str(options.config_dir)}
    if path.exists():
        return mac.done(path, "the owner's; `kakeya_mac runner policy check` reads it")
    return mac.todo(path, "there is none", mac.command(options.program, "runner", "policy", "init", env=env))


def _actions_runner(options: SetupOptions) -> mac.StepReport:
    """Install GitHub's runner by digest and register it. It updates itself afterwards, as GitHub demands."""
    folder, page, files = options.actions_runner, options.url or "", launchd.runner_settings(options)
    settings = [mac.write(path, text) for path, text in files.items()]
    where, known, asked = folder / ".runner", _registration(folder), ",".join(options.labels)
    has_token = options.token_file or options.token or mac.answer("gh", "auth", "status") is not None
    if known is None and not has_token:
        fix = f"take a token from {page}/settings/actions/runners/new and give it in {TOKEN_VARIABLE} or"
        return mac.missing(where, "not registered, no token", f"{fix} --token-file; or log in with gh")
    if known is None:
        # Registering writes the PATH of now, so the settings come last.
        return mac.todo(where, "not registered", *_register_actions(options), *settings)
    url, name = str(known.get("gitHubUrl", "")).rstrip("/"), known.get("agentName")
    labels = folder / "registered-labels"
    found = labels.read_text(encoding="utf-8").strip() if labels.is_file() else asked
    if (url, name) != (page, options.name) or set(found.lower().split(",")) != set(asked.lower().split(",")):
        finding = f"registered as {name} for {url} with the labels {found}"
        return mac.missing(where, finding, "kakeya_mac runner uninstall, then setup again")
    if not all(mac.is_written(path, text) for path, text in files.items()):
        return mac.todo(folder / ".env", "its variables or the PATH of jobs have changed", *settings)
    return mac.done(where, f"registered as {name} for {url}")


def _registration(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / ".runner").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and (folder / "config.sh").exists() else None


def _register_actions(options: SetupOptions) -> list[mac.Action]:
    folder, version, labels = options.actions_runner, options.runner_version, ",".join(options.labels)
    archive = options.prefix / "downloads" / f"actions-runner-osx-arm64-{version}.tar.gz"
    fetch = ("curl", "-fsSL", "--proto", "=https", "--retry", "3", "-o", archive)
    named = ("--name", options.name, "--labels", labels, "--work", "_work", "--replace")
    url, digest = options.url or "", archive.with_suffix(".sha256")
    other = "does --runner-sha256 belong to --runner-version?"
    remedy = f"give one in {TOKEN_VARIABLE} or --token-file; or does gh's login administer it?"
    token = _token(options, "registration-token", url, remedy)
    return [
        mac.make_folder(archive.parent),
        mac.command(*fetch, f"{_RELEASES}/v{version}/{archive.name}"),
        mac.write(digest, f"{options.runner_sha256}  {archive}\n"),
        mac.command("shasum", "-a", "256", "-c", digest, remedy=other),
        mac.make_private_folder(folder),
        mac.command("tar", "-xzf", archive, "-C", folder),
        mac.command(folder / "config.sh", "--unattended", "--url", url, *named, cwd=folder, secret=token),
        mac.write(folder / "registered-labels", f"{labels}\n"),  # the runner does not keep them
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
        if token := options.token or mac.answer(*ask):
            return token.strip()
        raise MachineError(f"there is no {kind} for {slug}", remedy)

    return "ACTIONS_RUNNER_INPUT_TOKEN", read


def _unwanted_runner(options: SetupOptions) -> mac.StepReport:
    """Unregister GitHub's runner, and only then remove it."""
    folder, known = options.actions_runner, _registration(options.actions_runner)
    if folder.exists() and launchd.is_present(launchd.ACTIONS_LABEL, options.prefix):
        return mac.missing(folder, "there, not wanted, and it runs", "stop its service first, see there")
    if known is None:
        return _unwanted(options, (folder.name, "downloads"))
    page = str(known.get("gitHubUrl", "")).rstrip("/")
    remedy = f"give a token of {page}/settings/actions/runners (Remove) in {TOKEN_VARIABLE} or --token-file,"
    remedy += f" or log in with gh; or remove the runner there, and then delete {folder}"
    token = _token(options, "remove-token", page, remedy)
    unregister = mac.command(folder / "config.sh", "remove", cwd=folder, secret=token, remedy=remedy)
    downloads = mac.remove(options.prefix / "downloads")
    return mac.todo(folder, "there, and not wanted", unregister, mac.remove(folder), downloads)


def _unwanted(options: SetupOptions, names: Sequence[str]) -> mac.StepReport:
    paths = [options.prefix / name for name in names]
    found = [path for path in paths if os.path.lexists(path)]
    if not found:
        return mac.done(paths[0], "there is none")
    return mac.todo(found[0], "there, and not wanted", *map(mac.remove, found))


def _remote_access(options: SetupOptions) -> mac.StepReport:
    """Check that the daemon can push to its remote without a login, and make a deploy key where it cannot."""
    key, where = options.deploy_key, f"git push --dry-run {options.bus}"
    if not options.program.exists():
        return mac.todo(where, "checked once the environment is there", *_key_actions(options))
    problem = _push_problem(options)
    if problem is None:
        return mac.done(where, f"the daemon may push{f' with {key}' if key.exists() else ''}")
    if options.ssh_remote is None:
        fix = "set up a credential helper that needs no login, or give --remote git@HOST:OWNER/NAME.git"
        return mac.missing(where, problem, f"{fix}, for which setup makes a deploy key")
    if not key.exists():
        return mac.todo(where, problem, *_key_actions(options))
    host, path = options.ssh_remote
    public = key.with_name(f"{key.name}.pub").read_text(encoding="utf-8").strip()
    fix = f"give this key write access to {path} at {host} (GitHub: Settings, Deploy keys): {public}"
    return mac.missing(where, problem, fix)


def _push_problem(options: SetupOptions) -> str | None:
    """Why the daemon could not push; git runs without agents and prompts, as it does in a service."""
    login, key = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_ASKPASS", "GIT_ASKPASS"), options.deploy_key
    env = {name: value for name, value in mac.owners_environment().items() if name not in login}
    env["GIT_SSH_COMMAND"] = launchd.ssh_command(key) if key.exists() else "ssh -o BatchMode=yes"
    env["GIT_TERMINAL_PROMPT"] = "0"
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-access-") as folder:
        run = partial(run_program, env=env, cwd=Path(folder), timeout_s=mac.ANSWER_S)
        run(["git", "init", "-q", "--bare"])
        blob = run(["git", "hash-object", "-w", "--stdin"]).stdout.decode().strip()
        ended = run(["git", "push", "-q", "--dry-run", str(options.bus), f"{blob}:refs/mac-bridge/setup"])
    return None if ended.ok else mac.last_words(ended) or f"git push ended with {ended.exit_code}"


def _key_actions(options: SetupOptions) -> list[mac.Action]:
    """Make a key for the daemon, and have gh add it where gh is logged in."""
    if options.ssh_remote is None:
        return []
    key, title, (host, path) = options.deploy_key, f"kakeya-mac {options.name}", options.ssh_remote
    make = mac.command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", title, "-f", key)
    actions = [mac.make_private_folder(key.parent), make]
    if host == "github.com":
        actions.append(mac.write(key.with_name("known_hosts"), f"{host} {_GITHUB_KEY}\n"))
    if mac.answer("gh", "auth", "status", "--hostname", host) is not None:
        add = ("gh", "repo", "deploy-key", "add", f"{key}.pub", "--repo", f"{host}/{path}", "--title", title)
        actions.append(mac.command(*add, "--allow-write", may_fail=True))
    return actions


def _power(options: SetupOptions) -> mac.StepReport:
    """No sleep on mains power, and a start by itself after a power failure."""
    where = "pmset -g custom"
    _, _, rest = (mac.answer(*where.split()) or "").partition("AC Power:")
    mains = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = dict(re.findall(r"^\s*(sleep|autorestart)\s+(\d+)", mains, re.MULTILINE))
    if not found:
        return mac.advice(where, "no power settings can be read", "see that the Mac stays awake")
    if found.get("sleep", "0") == "0" and found.get("autorestart", "1") == "1":
        return mac.done(where, "does not sleep")
    report = mac.todo(
        where,
        f"it may sleep: {', '.join(map(' '.join, found.items()))}",
        mac.command("pmset", "-c", "sleep", "0", "autorestart", "1", sudo=True),
    )
    return report if options.sudo else replace(report, state="advice")


def _tailnet(_options: SetupOptions) -> mac.StepReport:
    """Connect tailscale with its SSH server, for work by hand."""
    where = "tailscale status"
    try:
        status = json.loads(mac.answer(*where.split(), "--json") or "")
        own, is_on = status.get("Self") or {}, status.get("BackendState") == "Running"
        keys, name = own.get("sshHostKeys"), own.get("DNSName", "its name")
    except (ValueError, AttributeError):
        fix = "brew install tailscale (the App Store's has no SSH server), and start tailscaled"
        return mac.missing(where, "not installed, or not running", fix)
    if is_on and keys:
        return mac.done(where, f"SSH at {name}")
    finding = "SSH is off" if is_on else "not connected"
    return mac.todo(where, finding, mac.command("tailscale", "up", "--ssh", sudo=True))


def _self_test(options: SetupOptions, folder: Path) -> mac.StepReport:
    """Decode and measure with the shipped pair, have the gate judge the report, check the policy."""
    report, own = folder / "report.json", {"KAKEYA_STATE": str(folder)}
    engine, program = options.program.with_name("kakeya_engine"), options.program
    few = ("--prompts", "code", "--limit", "1", "--max-tokens", "16", "--claim", "none")
    where = "kakeya_engine generate, eval throughput; kakeya_mac gate, runner policy check"
    if report.is_file():
        return mac.done(where, "the engine measures, the gate accepts its report")
    return mac.todo(
        where,
        "done at the end of every setup",
        mac.command(engine, "generate", "--max-tokens", "8", "class BaseProject:", env=own),
        mac.command(engine, "eval", "throughput", *few, "--report", report, env=own),
        mac.command(program, "gate", report, env=own),
        mac.command(program, "runner", "policy", "check", env=options.folders),
    )
