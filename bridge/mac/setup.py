"""``setup``, ``check`` and ``uninstall``: the steps in their order.

Services are LaunchDaemons that run as the account's user: a LaunchAgent would wait for a login on the screen.
A label belongs to the whole machine, so a service is ours only if its output goes to our prefix.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import itertools
import json
import logging
import os
import plistlib
import re
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bridge import mac
from bridge.errors import BridgeError
from bridge.mac.options import ENVIRONMENTS, OPTIONS_FILE, SetupOptions, parser
from bridge.proc import run_program
from evidence_format.weights import faults

log = logging.getLogger("bridge.mac")

ACTIONS_LABEL = "org.kakeya-mac.actions-runner"
SERVE_LABEL = "org.kakeya-mac.serve"
SERVICE_LABELS = (ACTIONS_LABEL, SERVE_LABEL)
_STOPPED = "launchd knows it, and it does not run"
_AUTHORIZE = "give a token of {}/settings/actions/runners, or from gh, in KAKEYA_RUNNER_TOKEN or --token-file"
_REMOVED = """
Removed. Left: models (%s), policy (%s), state with the key that signs results (%s), logs (%s), git-lfs's \
filter (~/.gitconfig), power settings (pmset), tailscale, the daemon's SSH key, and results on the remote."""
_KEY_FIX = """make a key: ssh-keygen -t ed25519 -N '' -f ~/.ssh/kakeya-mac; give kakeya-mac.pub write access \
on the server (GitHub: the repository's Settings, Deploy keys); have the daemon's ssh use it, and \
know the server: printf 'Host {host}\\n  IdentityFile ~/.ssh/kakeya-mac\\n' >> ~/.ssh/config; \
ssh {port}-T {user}@{host}"""
_SSH = re.compile(  # ssh://user@host:port/path, or user@host:path
    r"(?P<url>ssh://)?(?:(?P<user>[^@/:]+)@)?(?P<host>[^/:@]+)(?::(?P<port>[0-9]+)(?=/))?(?(url)/|:)"
)


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
    os.environ.update(options.folders)  # for the programs that setup starts
    mode = "look" if name == "check" else "plan" if flags.dry_run else name
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-test-") as folder:
        steps = removal_steps(options) if name == "uninstall" else setup_steps(options)
        last = [("self-test", partial(_self_test, options, Path(folder)))] if name == "setup" else []
        last += [("doctor", partial(_doctor, options))] if name == "check" else []
        results = mac.walk(itertools.chain(steps, last), mode, options.sudo)
    changed = any(result["done"] for result in results if result["name"] != "self-test")
    failed = [result["name"] for result in results if result["state"] in ("to do", "missing")]
    unready = [step for step in failed if (step, mode) != ("self-test", "plan")]  # it is to do in every plan
    if mode == "plan":
        log.info("\nNothing was changed: this was a dry run.")
    elif unready:
        log.info("\nNot %s: %s.", "removed" if name == "uninstall" else "ready", ", ".join(unready))
    elif name == "uninstall":
        log.info(_REMOVED, options.models, options.config_dir, options.state_dir, options.prefix / "logs")
    else:
        log.info("\nReady." if changed else "\nReady; nothing had to be changed.")
    code = 0 if mode == "plan" or not unready else 1
    if flags.json:
        document = {"command": name, "dry_run": flags.dry_run, "ready": not unready, "changed": changed}
        print(json.dumps({**document, "steps": results, "exit_code": code}, sort_keys=True), flush=True)
    return code


def setup_steps(options: SetupOptions) -> Iterator[mac.Step]:
    """What these options ask for, and the removal of what only an earlier run asked for."""
    labels = [ACTIONS_LABEL] if options.is_actions else []
    labels += [SERVE_LABEL] if options.is_serving else []
    kept = {"environment", "options", *(f"service {label}" for label in labels)}
    yield "machine", partial(_machine, options)
    yield "options", partial(mac.have_files, {options.prefix / OPTIONS_FILE: options.stored()})
    if options.server.host and not options.server.has_artifacts:
        yield "git server", partial(_git_server, options)
    yield "environment", partial(_environment, options)
    yield "git-lfs", _git_lfs
    yield "models", partial(_models, options.models)
    yield "policy", partial(_policy, options)
    if options.is_actions:
        kept.add("actions runner")
        # What GitHub's runner reads when it starts: its variables, and the PATH of jobs.
        folder, path = options.actions_runner, f"{options.services_path}\n"
        files = {folder / ".env": "LANG=en_US.UTF-8\n", folder / ".path": path}
        yield "actions runner", partial(_actions_runner, options, files)
        if (folder / ".runner").exists():
            yield "actions settings", partial(mac.have_files, files)
    if options.is_serving:
        yield "remote access", partial(_remote_access, options)
    for name, look in removal_steps(options):
        if name not in kept and look().state != "done":
            yield name, look
    for label in labels:
        logs = mac.make_folder(log_file(options.prefix, label).parent)
        files = {staged(options.prefix, label): property_list(options, label)}
        yield f"service file {label}", partial(mac.have_files, files, logs)
        yield f"service {label}", partial(_service, options, label)
    if not labels:
        fix = "--url URL for workflows of github.com, --remote URL for the daemon; or start it by hand"
        yield "service", partial(mac.advice, "--service none", "nothing is kept running", fix)
    yield "power", partial(_power, options)
    if options.tailnet:
        yield "tailnet", _tailnet


def removal_steps(options: SetupOptions) -> Iterator[mac.Step]:
    """What uninstall removes, in order: services first, the options of the last run at the very end."""
    for label in SERVICE_LABELS:
        yield f"service {label}", partial(_unwanted_service, options, label)
    yield "actions runner", partial(_unwanted_runner, options)
    yield "environment", partial(_unwanted, options.environment, options.prefix / ENVIRONMENTS)
    yield "options", partial(_unwanted, options.prefix / "services", options.prefix / OPTIONS_FILE)


def _machine(options: SetupOptions) -> mac.StepReport:
    """The first thing that does not fit is the finding."""
    system, arch = mac.answer("uname", "-s"), mac.answer("uname", "-m")
    version = mac.answer("sw_vers", "-productVersion") or "unknown"
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    chip = mac.answer("sysctl", "-n", "machdep.cpu.brand_string") or "unknown chip"
    memory = int(mac.answer("sysctl", "-n", "hw.memsize") or 0) >> 30
    user = "this is root" if mac.answer("id", "-u") == "0" else f"account {options.user}"
    tools = mac.answer("xcode-select", "-p") or "no command line tools"
    folders = [folder for folder in (options.prefix, *options.prefix.parents) if folder.exists()]
    shared, free = next(filter(_is_shared, folders), None), shutil.disk_usage(folders[0]).free / 1e9
    place = f"prefix {options.prefix}" if shared is None else "other accounts may write there"
    native = "MLX needs Apple silicon; on it, Rosetta has this shell: use a native terminal"
    # Whether a part fits, what was looked at, what was found, and the fix.
    checks = (
        (system == "Darwin", "uname -s", f"system {system}", "it is not macOS: run this on the Mac"),
        (numbers >= (14, 0), "sw_vers", f"version {version}", "update to macOS 14.0 or later, for MLX"),
        (arch == "arm64", "uname -m, sysctl", f"{chip} ({arch})", native),
        (user != "this is root", "id -u", user, "run it as the account that is to run jobs"),
        (shared is None, shared or options.prefix, place, "chown, chmod go-w, or another --prefix"),
        (memory >= 16, "sysctl hw.memsize", f"{memory} GiB of memory", "16 GiB are the least for a model"),
        (free >= 20, folders[0], f"{free:.0f} GB free", "free some space: 20 GB are needed"),
        (tools.startswith("/"), "xcode-select -p", f"tools {tools}", "xcode-select --install"),
    )
    for fits, looked_at, fact, fix in checks:
        if not fits:
            return mac.missing(looked_at, fact, fix)
    return mac.done("uname, sw_vers, sysctl, xcode-select", ", ".join(fact for _, _, fact, _ in checks))


def _is_shared(folder: Path) -> bool:
    """Whether another account may replace what is in it, such as a program that a service starts."""
    status = folder.stat()
    may_write = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return bool(may_write) or status.st_uid not in (0, os.getuid())


def _git_server(options: SetupOptions) -> mac.StepReport:
    where, server = options.url or options.remote or "", options.server
    if not options.is_actions:
        return mac.done(where, server.summary)
    finding = (
        f"{server.summary}; GitHub's runner registers only with github.com, ghe.com and Enterprise Server"
    )
    return mac.advice(where, finding, f"--service serve --remote {options.bus or 'URL'}: the daemon")


def _environment(options: SetupOptions) -> mac.StepReport:
    """Install this checkout with every package by version and digest, and record its interpreter.

    Environments lie side by side and a link points to one, so that a failed installation leaves the old one
    working, and a running daemon keeps its files. The next installation removes what is not in use.
    """
    where, is_checkout = options.environment, (options.source / "uv.lock").is_file()
    digest = _source_digest(options.source) if is_checkout else ""
    check = "sys.exit(not i.record_path().is_file() or i.objection() or 0)"
    script = f"import sys; from bridge import interpreter as i; {check}"
    is_whole = mac.answer(where / "bin" / "python", "-I", "-c", script) is not None
    if is_whole and where.resolve().name.startswith(digest):
        return mac.done(where, "up to date, on the recorded interpreter")
    problem = "it is not this checkout's, or its interpreter was not recorded, or a package changed"
    if not is_checkout:
        return mac.missing(where, f"{problem}; this is no checkout", "run scripts/setup_mac.sh of a checkout")
    folder, source = options.prefix / ENVIRONMENTS, options.source
    made = next(p for n in itertools.count(1) if not (p := folder / f"{digest}-{n}").exists())
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    given = os.environ.get("KAKEYA_PYTHON") or sys.executable
    base = os.path.abspath(given) if os.sep in given else given
    python, pins = made / "bin" / "python", source / "scripts" / "requirements-build.txt"
    pip = ("-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
    # Without build isolation uv fetches no build backend, which it would not compare with a digest.
    sync = ("sync", "--locked", "--inexact", "--no-editable", "--no-build-isolation")
    extras = ("--extra", "engine", "--extra", "attest")
    uv = ("env", f"UV_PROJECT_ENVIRONMENT={made}", made / "bin" / "uv")
    record = "from bridge import interpreter as i; i.write(i.record_path(), i.observe())"
    return mac.todo(
        where,
        problem,
        *(mac.remove(path) for path in others if path != where.resolve()),
        mac.command(base, "-I", "-m", "venv", made),
        mac.command(python, *pip, "--only-binary", ":all:", "-r", pins),
        mac.command(*uv, *sync, *extras, "--project", source, "--python", python),
        mac.command(python, "-I", "-c", record),
        mac.command("ln", "-sfn", f"{ENVIRONMENTS}/{made.name}", where),
    )


def _source_digest(root: Path) -> str:
    """SHA-256 over the names and contents of what is installed: lock file and packages."""
    total, files = hashlib.sha256(), [root / "uv.lock", root / "pyproject.toml"]
    files += [path for name in ("bridge", "engine", "evidence_format") for path in (root / name).rglob("*")]
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            total.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:12]


def _git_lfs() -> mac.StepReport:
    """Install git-lfs, and have git fetch nothing by itself; a filter of the owner's is left as it is."""
    where, setting = "git lfs version", "git config --global filter.lfs.process"
    version, own = mac.answer(*where.split()), mac.answer(*setting.split())
    if version is None and mac.answer("brew", "--version") is None:
        fix = "brew install git-lfs (https://brew.sh), or the package of git-lfs.com"
        return mac.missing(where, "not installed, and there is no Homebrew", fix)
    actions = [mac.command("brew", "install", "git-lfs")] if version is None else []
    if own is None:
        actions.append(mac.command("git", "lfs", "install", "--skip-smudge", "--skip-repo"))
    if version is None or own is None:
        return mac.todo(where, "not installed, or not set up for this account", *actions)
    if "--skip" not in own.split():
        finding = f"git fetches large files with every checkout of this account ({own})"
        return mac.advice(setting, finding, "git lfs install --skip-smudge --force")
    return mac.done(where, version.split(" ")[0])


def _models(folder: Path) -> mac.StepReport:
    if not folder.is_dir():
        return mac.todo(folder, "there is none", mac.make_folder(folder))
    found = {path.name: faults(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if broken := [lacks[0] for lacks in found.values() if lacks]:
        return mac.advice(folder, f"not complete: {'; '.join(broken)}", "fetch it again into that folder")
    return mac.done(folder, f"complete: {', '.join(found)}" if found else "no models yet")


def _policy(options: SetupOptions) -> mac.StepReport:
    path = options.config_dir / "policy.toml"
    if path.exists():
        return mac.done(path, "the owner's; `kakeya_mac runner policy check` reads it")
    return mac.todo(path, "there is none", mac.command(options.program, "runner", "policy", "init"))


def _actions_runner(options: SetupOptions, files: dict[Path, str]) -> mac.StepReport:
    """Install GitHub's runner by digest and register it. It updates itself afterwards, as GitHub demands."""
    folder, version, labels = options.actions_runner, options.runner_version, ",".join(options.labels)
    where, asked = folder / "registered-as", f"{options.name} for {options.url} with the labels {labels}"
    if (folder / ".runner").exists():  # the runner does not keep its labels, so that file says more
        found = where.read_text(encoding="utf-8") if where.exists() else "an unknown runner"
        fix = "" if found == asked else "kakeya_mac runner uninstall, then setup again"
        return mac.StepReport("missing" if fix else "done", where, f"registered as {found}", fix)
    if not (options.token_file or options.token):
        return mac.missing(where, "not registered, and no token", _AUTHORIZE.format(options.url))
    archive = options.prefix / "downloads" / f"actions-runner-osx-arm64-{version}.tar.gz"
    fetch = ("curl", "-fsSL", "--proto", "=https", "--retry", "3", "-o", archive)
    register = (folder / "config.sh", "--unattended", "--url", options.url or "", "--name", options.name)
    named = ("--labels", labels, "--work", "_work", "--replace")
    digest, other = archive.with_suffix(".sha256"), "does --runner-sha256 belong to --runner-version?"
    return mac.todo(
        where,
        "not registered",
        mac.make_folder(archive.parent),
        mac.command(*fetch, f"https://github.com/actions/runner/releases/download/v{version}/{archive.name}"),
        mac.write(digest, f"{options.runner_sha256}  {archive}\n"),
        mac.command("shasum", "-a", "256", "-c", digest, remedy=other),
        mac.command("mkdir", "-p", "-m", "700", folder),
        mac.command("tar", "-xzf", archive, "-C", folder),
        mac.command(*register, *named, token=options.read_token, remedy=_AUTHORIZE.format(options.url)),
        mac.write(where, asked),
        *(mac.write(path, text) for path, text in files.items()),  # registering wrote those of now
    )


def _unwanted_runner(options: SetupOptions) -> mac.StepReport:
    """Unregister GitHub's runner, and only then remove it."""
    folder, downloads = options.actions_runner, options.prefix / "downloads"
    if folder.exists() and is_ours(options.prefix, ACTIONS_LABEL):
        return mac.missing(folder, "there, not wanted, and it runs", "stop its service first, see there")
    if not (folder / ".runner").exists():
        return _unwanted(folder, downloads)
    fix = f"{_AUTHORIZE.format(options.url)}; or remove the runner there, and then delete {folder}"
    if not (options.token_file or options.token):
        return mac.missing(folder, "registered, and no token to remove it with", fix)
    unregister = mac.command(folder / "config.sh", "remove", token=options.read_token, remedy=fix)
    return mac.todo(folder, "there, and not wanted", unregister, mac.remove(folder, downloads))


def _unwanted(*paths: Path) -> mac.StepReport:
    found = [path for path in paths if os.path.lexists(path)]
    if not found:
        return mac.done(paths[0], "there is none")
    return mac.todo(found[0], "there, and not wanted", mac.remove(*found))


def _remote_access(options: SetupOptions) -> mac.StepReport:
    """Check that the daemon can push to its remote; git runs without agents and prompts, as in a service."""
    where = f"git push --dry-run {options.bus}"
    if not options.program.exists():
        return mac.todo(where, "checked once the environment is there")
    env = mac.owners_environment() | dict.fromkeys(("SSH_AUTH_SOCK", "SSH_ASKPASS", "GIT_ASKPASS"), "")
    env |= {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes", "GIT_TERMINAL_PROMPT": "0"}
    with tempfile.TemporaryDirectory(prefix="kakeya-mac-access-") as folder:
        run = partial(run_program, env=env, cwd=Path(folder), timeout_s=mac.ANSWER_S)
        run(["git", "init", "-q", "--bare"])
        blob = run(["git", "hash-object", "-w", "--stdin"]).stdout.decode().strip()
        ended = run(["git", "push", "-q", "--dry-run", str(options.bus), f"{blob}:refs/mac-bridge/setup"])
    if ended.ok:
        return mac.done(where, "the daemon may push")
    fix = _key_fix(options.bus or "") or "set up a credential helper, or give an SSH address as --remote"
    return mac.missing(where, mac.last_words(ended) or f"git push ended with {ended.exit_code}", fix)


def _key_fix(remote: str) -> str | None:
    """What to type so that the daemon's ssh has a key for the remote; None: it is no SSH address."""
    ssh = _SSH.match(remote)
    if ssh is None or not (ssh["url"] or ssh["user"]):
        return None
    port = f"-p {ssh['port']} " if ssh["port"] else ""
    return _KEY_FIX.format(host=ssh["host"], user=ssh["user"] or "git", port=port)


def staged(prefix: Path, label: str) -> Path:
    """A property list in the prefix, where it needs no administrator."""
    return prefix / "services" / f"{label}.plist"


def _installed(label: str) -> Path:
    return Path("/Library/LaunchDaemons") / f"{label}.plist"


def log_file(prefix: Path, label: str) -> Path:
    """Output of a service."""
    return prefix / "logs" / f"{label}.log"


def property_list(options: SetupOptions, label: str) -> str:
    """What launchd is told of a service: see launchd.plist(5)."""
    user, output = options.user, str(log_file(options.prefix, label))
    variables = {"HOME": str(options.home), "USER": user, "LOGNAME": user, "LANG": "en_US.UTF-8"}
    variables |= {"PATH": options.services_path, **options.folders}
    if label == ACTIONS_LABEL:
        argv, folder = [str(options.actions_runner / "run.sh")], options.actions_runner
        variables["RUNNER_MANUALLY_TRAP_SIG"] = "1"  # its shell passes signals on, as in GitHub's own service
    else:
        serve = ("runner", "serve", "--remote", options.bus or "", "--name", options.name)
        argv, folder = [str(options.program), *serve], options.prefix
        # A service is restarted when its property list changes.
        variables["KAKEYA_SETUP"] = options.environment.resolve().name
    document = {
        "Label": label,
        "ProgramArguments": argv,
        "WorkingDirectory": str(folder),
        "UserName": user,
        "EnvironmentVariables": variables,
        "RunAtLoad": True,
        "KeepAlive": True,
        "AbandonProcessGroup": True,  # a job's supervisor outlives a restart of its runner
        "ExitTimeOut": 7200,  # so long it may finish its job, before launchd kills it
        "ProcessType": "Interactive",
        "StandardOutPath": output,
        "StandardErrorPath": output,
    }
    return plistlib.dumps(document).decode()


def read_installed(label: str) -> str | None:
    """The text of the installed property list; None if there is none."""
    return mac.answer("cat", _installed(label))


def query(label: str) -> str | None:
    """A service's state, ``running`` if it has a process; None if launchd does not know the label."""
    said = mac.answer("launchctl", "print", f"system/{label}")
    if said is None:
        return None
    # The first line of each name is the service's own.
    found = dict(reversed(re.findall(r"^\s*(state|last exit code) = (.+?)\s*$", said, re.MULTILINE)))
    state, code = found.get("state", "unknown"), found.get("last exit code", "unknown")
    return state if state == "running" else f"state {state}, last exit code {code}"


def is_ours(prefix: Path, label: str) -> bool | None:
    """Whether the installed service writes into our prefix; None if there is none."""
    text, output = read_installed(label), html.escape(str(log_file(prefix, label)), quote=False)
    return None if text is None else f"<string>{output}</string>" in text


def service_problem(prefix: Path, label: str) -> str | None:
    """Why a service does not run as setup wants it now; None: it does."""
    state, wanted = query(label), staged(prefix, label)
    if state is None:
        return "launchd does not know it"
    if not wanted.is_file() or wanted.read_text(encoding="utf-8").strip() != read_installed(label):
        return "it has to be restarted with what is wanted now"
    return None if state == "running" else f"{_STOPPED}: {state}"


def _service(options: SetupOptions, label: str) -> mac.StepReport:
    prefix, target, problem = options.prefix, _installed(label), service_problem(options.prefix, label)
    if is_ours(prefix, label) is False:
        fix = "a machine has one service of a kind: run uninstall there, or choose another --service here"
        return mac.missing(target, "it belongs to the setup of another folder", fix)
    if problem is None:
        return mac.done(target, "runs, also after a restart")
    if problem.startswith(_STOPPED):
        fix = f"see why: tail {log_file(prefix, label)}; launchd tries again by itself"
        return mac.missing(target, problem, fix)
    install = ("install", "-o", "root", "-g", "wheel", "-m", "644", staged(prefix, label), target)
    bootstrap = mac.command("launchctl", "bootstrap", "system", target, sudo=True)
    # For a moment after a service has gone launchd refuses another of that name, and a program that ends at
    # once runs for a moment, too; after that the service is looked at again.
    pause = mac.command("sleep", "5")
    restart = (*_stop_actions(options, label), mac.command(*install, sudo=True), pause, bootstrap, pause)
    return mac.todo(target, problem, *restart)


def _unwanted_service(options: SetupOptions, label: str) -> mac.StepReport:
    """Remove our service; that of another setup is left alone."""
    target, own = _installed(label), staged(options.prefix, label)
    actions = [mac.remove(own)] if own.exists() else []
    if is_ours(options.prefix, label):
        actions = [*_stop_actions(options, label), mac.command("rm", "-f", target, sudo=True), *actions]
    if not actions:
        return mac.done(target, "none of ours")
    return mac.todo(target, "there, and not wanted", *actions)


def _stop_actions(options: SetupOptions, label: str) -> list[mac.Action]:
    """Stop a service once it has no job: our daemon finishes its own, GitHub's runner would cancel it."""
    remedy = "an administrator types the commands that setup prints without --sudo"
    # Ask sudo first: a refusal halfway would leave the Mac without its service.
    actions = [mac.command("-v", sudo=True, remedy=remedy)]
    if label == ACTIONS_LABEL:
        runner = re.sub(r"([][().*+?{}|^$\\])", r"\\\1", str(options.actions_runner))
        worker = ("pgrep", "-f", f"{runner}/bin[^/]*/Runner.Worker")
        actions.append(_wait_while(worker, "GitHub's runner has a job"))
    return [
        *actions,
        # It fails where there is no service, and where the service takes its time to end.
        mac.command("launchctl", "bootout", f"system/{label}", sudo=True, may_fail=True),
        _wait_while(("launchctl", "print", f"system/{label}"), f"{label} finishes its job"),
    ]


def _wait_while(probe: Sequence[str], what: str) -> mac.Action:
    """Wait until a program fails, because the job that it finds has ended; `what` says which job."""

    def run() -> None:
        while mac.answer(*probe) is not None:
            log.info("      %s; waiting", what)
            # Keep the password valid: there may be no person to type it a second time.
            mac.command("-n", "-v", sudo=True, may_fail=True).run()
            time.sleep(10.0)

    return mac.Action(f"while {shlex.join(probe)} >/dev/null 2>&1; do sleep 1; done", run)


def _power(options: SetupOptions) -> mac.StepReport:
    """No sleep on mains power, and a start by itself after a power failure."""
    where = "pmset -g custom"
    mains = re.search(r"^AC Power:\n((?:\s.*\n?)*)", mac.answer(*where.split()) or "", re.MULTILINE)
    found = dict(re.findall(r"^\s*(sleep|autorestart)\s+(\d+)", mains[1] if mains else "", re.MULTILINE))
    if found.get("sleep") == "0" and found.get("autorestart", "1") == "1":
        return mac.done(where, "does not sleep")
    action = mac.command("pmset", "-c", "sleep", "0", "autorestart", "1", sudo=True)
    report = mac.todo(where, f"it may sleep: {', '.join(map(' '.join, found.items()))}", action)
    return report if options.sudo else replace(report, state="advice")


def _tailnet() -> mac.StepReport:
    where = "tailscale status --json"
    said = mac.answer(*where.split())
    if said is None:
        fix = "brew install tailscale (the App Store's has no SSH server), and start tailscaled"
        return mac.missing(where, "not installed, or not running", fix)
    status = json.loads(said)
    own = status.get("Self") or {}
    if status.get("BackendState") == "Running" and own.get("sshHostKeys"):
        return mac.done(where, f"SSH at {own.get('DNSName')}")
    return mac.todo(where, "not connected, or no SSH", mac.command("tailscale", "up", "--ssh", sudo=True))


def unready(prefix: Path) -> list[str]:
    """What `check` finds missing below a prefix, as the doctor tells it: a name and a finding each."""
    options = SetupOptions(parser().parse_args(["check", "--prefix", str(prefix)]))
    steps = mac.walk(setup_steps(options), "look", False)
    return [f"{step['name']}: {step['finding']}" for step in steps if step["state"] in ("to do", "missing")]


def _doctor(options: SetupOptions) -> mac.StepReport:
    """What the doctor fails, so that the two agree; it asks for these steps in turn, which are left out."""
    where = "kakeya_mac doctor --role runner"
    if not options.program.exists():
        return mac.todo(where, "asked once the environment is there")
    env = mac.owners_environment() | options.folders
    ended = run_program(
        [str(options.program), *where.split()[1:], "--json"], env=env, cwd=mac.ROOT, timeout_s=300.0
    )
    try:
        checks = json.loads(ended.stdout)["checks"]
    except (ValueError, KeyError, TypeError):
        return mac.missing(where, mac.last_words(ended), "run it by hand, and correct what it says")
    failed = [check for check in checks if check["level"] == "fail" and check["name"] != "setup"]
    if failed:
        found = "; ".join(f"{check['name']}: {check['finding']}" for check in failed)
        return mac.missing(where, found, "; ".join(check["fix"] for check in failed))
    warned = sum(check["level"] == "warn" for check in checks)
    return mac.done(where, f"nothing failed, {warned} warning(s)")


def _self_test(options: SetupOptions, folder: Path) -> mac.StepReport:
    """Decode and measure with the shipped pair, have the gate judge the report, check the policy."""
    report, program, state = folder / "report.json", options.program, f"KAKEYA_STATE={folder}"
    engine = ("env", state, program.with_name("kakeya_engine"))
    few = ("--prompts", "code", "--limit", "1", "--max-tokens", "16", "--claim", "none")
    where = "kakeya_engine generate, eval throughput; kakeya_mac gate, runner policy check"
    if report.is_file():
        return mac.done(where, "the engine measures, the gate accepts its report")
    return mac.todo(
        where,
        "done at the end of every setup",
        mac.command(*engine, "generate", "--max-tokens", "8", "class BaseProject:"),
        mac.command(*engine, "eval", "throughput", *few, "--report", report),
        mac.command("env", state, program, "gate", report),
        mac.command(program, "runner", "policy", "check"),
    )
