"""A bus seen from outside: the installed `kakeya_mac` as a process, plain git, and golden records of both.

Nothing here imports the project, so these tests hold for any rewrite of it. Volatile values become
placeholders (`normalise`), sentences for people become ``<text>``, and everything else stays exact.
``KAKEYA_UPDATE_GOLDEN=1`` writes the records in place of comparing with them.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("KAKEYA_UPDATE_GOLDEN") == "1"
BIN = Path(sys.executable).parent
WAIT_S = 300  # on a machine with far too much to do; nothing here takes a second otherwise
UNKNOWN = "20200101t000000z000000000000"

# Programs of the presets: inline, because a job need not see any folder but its own.
PROGRAMS = {
    "echo": "import sys; print('hello', sys.argv[1])",
    "fail": "import sys; print('about to fail'); sys.exit(3)",
    "rejecting": "import sys; print('evidence looks wrong'); sys.exit(9)",
    "endless": "import time; time.sleep(60)",
    "hold": (
        "import pathlib, time; print('progress 1/4 holding still', flush=True); pathlib.Path('up').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        "print('released')"
    ),
    "forge": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('[]')",
}
_EXTRA = {
    "rejecting": "rejected_exit_code = 9\n",
    "endless": "timeout_s = 1\n",
    "forge": '[evidence]\nkind = "probe"\n',
}
_WORD = '[params.word]\ntype = "string"\npattern = "[^-].*"\ndefault = "test"\ndescription = "a word"\n'


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of standard output."""
        assert self.code != 70, self.err  # a bug
        assert self.out.strip(), f"exit code {self.code} and nothing on stdout; stderr: {self.err}"
        document = json.loads(self.out.strip().splitlines()[-1])
        assert isinstance(document, dict)
        return document


@dataclass
class Site:
    """A bare remote, a clone of it with an unpushed commit, private folders, presets of small programs.

    Attributes:
        root: Everything lies in it.
        env: Of every program that is run.
        bin: Where `kakeya_mac` lies.
        name: Of the runner.
    """

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    bin: Path = BIN
    name: str = "mac"

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    @property
    def clone(self) -> Path:
        return self.root / "clone"

    @property
    def config(self) -> Path:
        return self.root / "config"

    def git(self, *args: str, cwd: Path | None = None, data: bytes | None = None, **env: str) -> str:
        return self.program("git", *args, cwd=cwd, data=data, **env).decode().strip()

    def program(
        self, *argv: str, cwd: Path | None = None, data: bytes | None = None, check: bool = True, **env: str
    ) -> bytes:
        """Standard output of any other program."""
        done = subprocess.run(
            argv,
            cwd=cwd or self.clone,
            env={**self.env, **env},
            input=data,
            capture_output=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0 or not check, f"{' '.join(argv)}: {done.stderr.decode()}"
        return done.stdout

    def kakeya(self, *args: str, cwd: Path | None = None, **env: str) -> Done:
        done = subprocess.run(
            [str(self.bin / "kakeya_mac"), *args],
            cwd=cwd or self.clone,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def request(self, preset: str, *args: str) -> str:
        """Ask for a preset; the nonce."""
        done = self.kakeya("run", "--preset", preset, "--json", *args)
        return str(done.json["nonce"])

    @contextlib.contextmanager
    def runner(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """A runner in the background, which is stopped at the end."""
        command = [str(self.bin / "kakeya_mac"), *self._serve(*args)]
        with (self.root / "runner.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.env, cwd=self.root, stdout=log, stderr=log)
        try:
            yield process
        finally:
            for stop in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                process.send_signal(stop)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                    break

    def _serve(self, *args: str) -> list[str]:
        where = ["--remote", str(self.remote), "--name", self.name]
        pace = ["--idle", "0.2", "--beat", "0.3", "--lease", "600"]
        return ["runner", "serve", *where, *pace, "--no-prune", *args]

    def runner_log(self) -> str:
        return (self.root / "runner.log").read_text(errors="replace")

    def refs(self, pattern: str = "refs/") -> dict[str, str]:
        """Refs of the remote, and what each holds."""
        listed = self.git("for-each-ref", "--format=%(refname) %(objectname)", pattern, cwd=self.remote)
        return dict(line.split() for line in listed.splitlines())

    def show(self, rev: str, path: str) -> bytes:
        """A file of a commit of the remote."""
        return self.program("git", "cat-file", "blob", f"{rev}:{path}", cwd=self.remote)

    def documents(self, rev: str, below: str = "") -> dict[str, dict[str, Any]]:
        """Every JSON document of a commit, by path."""
        paths = self.git("ls-tree", "-r", "--name-only", rev, cwd=self.remote).splitlines()
        found = [path for path in paths if path.endswith(".json") and path.startswith(below)]
        return {path: json.loads(self.show(rev, path)) for path in found}

    def wait_answered(self, *nonces: str) -> None:
        """Until the results of all these requests are on the remote."""

        def answered() -> bool:
            names = " ".join(self.refs("refs/mac-bridge/inbox"))
            return not any(nonce in names for nonce in nonces)

        wait_until(answered, "the results", self.runner_log)

    def wait_running(self, nonce: str) -> Path:
        """Until the preset `hold` of this request runs and a heartbeat says so; the job's folder."""

        def running() -> bool:
            ref = f"refs/mac-bridge/claims/{nonce}"
            if ref not in self.refs("refs/mac-bridge/claims"):
                return False
            status = self.documents(ref)["status.json"]
            return status["phase"] == "running" and status["progress"] is not None

        wait_until(running, "a heartbeat of the running job", self.runner_log)
        walked = os.walk(self.env["KAKEYA_STATE"])  # which passes over what vanishes meanwhile
        [folder] = [Path(at) for at, _, files in walked if "up" in files and "go" not in files]
        return folder

    def trust_runner(self, *, make: tuple[str, ...] = ("--make",)) -> dict[str, Any]:
        """Let the client trust the key of the runner, which is made; that key's document."""
        key = self.kakeya("runner", "key", "--name", self.name, *make, "--json").json
        assert self.kakeya("runners", "trust", self.name, "--key", key["key"]).code == 0
        return key


def wait_until(condition: Callable[[], bool], what: str, log: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {WAIT_S} s\n{log()}"
        time.sleep(0.1)


def next_second() -> None:
    time.sleep(1.05 - time.time() % 1)


def build_site(root: Path) -> Site:
    """A remote with one commit on ``main``; the clone is one commit ahead of it."""
    foreign = ("KAKEYA_", "GIT_", "SSH_AUTH", "GITHUB_", "GH_", "ACTIONS_", "RUNNER_", "CI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    home = root / "home"
    for folder in (home, root / "tmp"):
        folder.mkdir(parents=True)
    site = Site(root)
    site.env = {
        **kept,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_STATE_HOME": str(home / ".state"),
        "KAKEYA_STATE": str(root / "state"),
        "KAKEYA_CONFIG": str(site.config),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "Tester",
        "GIT_AUTHOR_EMAIL": "tester@example.org",
        "GIT_COMMITTER_NAME": "Tester",
        "GIT_COMMITTER_EMAIL": "tester@example.org",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(root / "tmp"),
        "TZ": "UTC",
    }
    site.git("init", "--quiet", "--bare", "--initial-branch=main", str(site.remote), cwd=root)
    # The first push of a claim ref is kept here while the ref lives.
    site.git("config", "core.logAllRefUpdates", "always", cwd=site.remote)
    site.git("clone", "--quiet", str(site.remote), str(site.clone), cwd=root)
    site.git("checkout", "--quiet", "-B", "main")
    for number in ("first", "second"):
        (site.clone / "README.md").write_text(f"the {number} version\n")
        site.git("add", "--all")
        site.git("commit", "--quiet", "--message", f"the {number} commit")
        if number == "first":
            site.git("push", "--quiet", "origin", "main")
    folder = site.config / "presets"
    folder.mkdir(parents=True)
    for name, program in PROGRAMS.items():
        (folder / f"{name}.toml").write_text(_preset(name, program))
    return site


def _preset(name: str, program: str) -> str:
    argument = "${out:report}" if name == "forge" else "{word}"
    lines = [
        f'name = "{name}"',
        'summary = "A test program."',
        f"argv = {json.dumps(['${python}', '-I', '-c', program, argument])}",
        *(["timeout_s = 900"] if "timeout_s" not in _EXTRA.get(name, "") else []),
        'engine = "installed"',
        'workspace = "none"',
        _EXTRA.get(name, ""),
        _WORD if argument == "{word}" else "",
    ]
    return "\n".join(lines)


# --- normalising -----------------------------------------------------------------------------------------

_TEXTS = {
    *(
        "authenticity",
        "command",
        "clients",
        "macs",
        "comment",
        "description",
        "finding",
        "fix",
        "line",
        "looked_at",
    ),
    *("message", "rejected_when", "remedy", "signed_with", "source", "summary", "transport_why", "why"),
}
_LISTED_TEXTS = {"not_asked", "not_compared", "notes", "warnings", "would"}
_NUMBERS = {
    *("age_s", "beat", "beat_age_s", "bytes", "elapsed_s", "expected_s", "load_1m", "memory_bytes", "pid"),
    *("seconds", "typical_s"),
}
_IDS = {"id", "runner_id", "session", "unique"}
_EXACT = {"preset_digest", "lease_s"}
_PATTERNS = [
    ("nonce", re.compile(r"\b[0-9]{8}t[0-9]{6}z[0-9a-f]{12}\b")),
    ("commit", re.compile(r"\b[0-9a-f]{40}\b")),
    ("sha256", re.compile(r"\b[0-9a-f]{64}\b")),
    ("fingerprint", re.compile(r"SHA256:[A-Za-z0-9+/]{43}")),
    ("public key", re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]+")),
]
_PLAIN = [
    (re.compile(r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z"), "<time>"),
    (re.compile(r"\buid[ -][0-9]+\b"), "<user>"),
    (re.compile(r"\b[0-9]{8}t[0-9]{6}z[0-9a-f]{1,11}\b"), "<prefix>"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "<id>"),
    (re.compile(r"^(<root>)?/\S*/report\.json$"), "<folder of the job>/report.json"),
]


@dataclass
class Names:
    """The placeholders of one record: equal values get equal names, numbered as they are met."""

    site: Site
    known: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def text(self, text: str) -> str:
        for path in (str(self.site.root), str(self.site.root.resolve())):
            text = text.replace(path, "<root>")
        text = text.replace(str(BIN), "<bin>")
        for value, name in self.known.items():
            text = text.replace(value, name)
        for kind, pattern in _PATTERNS:
            for value in pattern.findall(text):
                text = text.replace(value, self._name(kind, value))
        for pattern, name in _PLAIN:
            text = pattern.sub(name, text)
        return text

    def _name(self, kind: str, value: str) -> str:
        if value not in self.known:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.known[value] = f"<{kind} {self.counts[kind]}>"
        return self.known[value]


def normalise(value: Any, names: Names, key: str = "") -> Any:
    """A JSON value with placeholders for whatever another machine, day or wording would change."""
    if isinstance(value, dict):
        return _normalised_object(value, names, key)
    if isinstance(value, list):
        if key in _LISTED_TEXTS and all(isinstance(item, str) for item in value):
            return ["<text>"] if value else []
        return [normalise(item, names, key) for item in value]
    if value is None or isinstance(value, bool) or key in _EXACT:
        return value
    if isinstance(value, int | float):
        return "<number>" if key in _NUMBERS or isinstance(value, float) else value
    if key in _TEXTS or (key in {"reason", "error"} and " " in value):
        return "<text>" if value else ""
    if key in _IDS and re.fullmatch("[0-9a-f]{16,64}", value):
        return "<id>"
    if key == "version" or (key == "signature" and value.startswith("LS0t")):  # the base64 of `---`
        return f"<{key}>"
    return names.text(value)


def _normalised_object(value: dict[str, Any], names: Names, key: str) -> Any:
    if key == "machine":  # how jobs are isolated may change, and what else there is depends on the machine
        return {k: "<machine>" for k in sorted(value) if not k.startswith("isolation") and k != "survivors"}
    if key == "properties" and "chip" in value:
        return dict.fromkeys(sorted(value), "<machine>")
    if key == "tools":
        return dict.fromkeys(sorted(value), "<version>")
    if key in {"phase_seconds", "load"} and all(isinstance(v, int | float | None) for v in value.values()):
        return dict.fromkeys(sorted(value), "<number>")
    if key in {"unable", "unavailable"}:
        return dict.fromkeys(sorted(names.text(k) for k in value), "<text>")
    if key == "models":
        return {"<model>": "<text>"} if value else {}
    if "seen_at" in value:  # a runner: what it does just now is a matter of moments, `answered` one of design
        value = {k: v for k, v in value.items() if k not in {"state", "job", "answered"}}
    if "argv" in value and (value.get("exit_code") or 0) not in range(126):
        value = {**value, "exit_code": "<killed>"}
    if value.get("digest") and "name" in value:  # a preset's, which stays; others are those of files
        return {**_normalised_object({**value, "digest": None}, names, key), "digest": value["digest"]}
    if value.get("status") == "error":  # which of its texts may quote the bus depends on their wording
        value = {**value, "remedy": value.get("remedy") or "-"}
        value |= {"untrusted": ["<fields>"]} if "untrusted" in value else {}
    return {names.text(k): normalise(value[k], names, k) for k in sorted(value)}


# --- golden records --------------------------------------------------------------------------------------


def check_golden(name: str, seen: Any) -> None:
    """Compare with the record of this name, or write it."""
    path = GOLDEN / f"{name}.json"
    text = json.dumps(seen, indent=2, sort_keys=True) + "\n"
    if UPDATE:
        path.write_text(text)
        return
    expected = path.read_text()
    if text != expected:
        difference = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{path.name}", "now", lineterm="", n=6
        )
        pytest.fail("\n".join(difference), pytrace=False)


@dataclass
class Transcript:
    """Commands of one test: exit code and JSON of each, by a name for the step."""

    site: Site
    names: Names = field(init=False)
    steps: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Names(self.site)

    def run(
        self,
        step: str,
        *args: str,
        cwd: Path | None = None,
        only: str | None = None,
        until: Callable[[dict[str, Any]], bool] = bool,
        **env: str,
    ) -> dict[str, Any]:
        """Run a command with ``--json``, again and again until it says what a heartbeat has yet to bring.

        Args:
            step: Its name in the record.
            args: The command's words.
            cwd: Where it is typed; None: in the clone.
            only: Of what runners offer, record this preset alone, because others come and go.
            until: Whether its document is the one to record.
            env: Changes of its environment.

        Returns:
            What it said, as it is.
        """
        done = self.site.kakeya(*args, "--json", cwd=cwd, **env)
        for _ in range(20):
            if until(done.json):
                break
            done = self.site.kakeya(*args, "--json", cwd=cwd, **env)
        document = done.json
        shown = document if only is None else _without_other_presets(document, only)
        self.steps[step] = {
            "command": " ".join(map(self.names.text, args)),
            "exit_code": done.code,
            "json": normalise(shown, self.names),
        }
        return document

    def check(self, name: str) -> None:
        check_golden(name, self.steps)


def _without_other_presets(document: dict[str, Any], preset: str) -> dict[str, Any]:
    """What a command says of runners, with one preset of those that they offer."""
    runners = [
        {
            **runner,
            "presets": [offer for offer in runner["presets"] if _name(offer) == preset],
            "unavailable": {name: why for name, why in runner["unavailable"].items() if name == preset},
        }
        if "presets" in runner
        else runner
        for runner in document["runners"]
    ]
    return {**document, "runners": runners}


def _name(offer: str | dict[str, Any]) -> str:
    return offer if isinstance(offer, str) else str(offer["name"])


def describe(site: Site, rev: str, names: Names) -> dict[str, Any]:
    """A commit of the remote: tree, parents, message, author, and its JSON documents; once in a record."""
    commit = site.git("rev-parse", rev, cwd=site.remote)
    if commit in names.known:
        return {"commit": names.text(commit)}
    header, _, message = site.git("cat-file", "commit", rev, cwd=site.remote).partition("\n\n")
    fields = [line.split(" ", 1) for line in header.splitlines()]
    listed = site.git("ls-tree", "-r", rev, cwd=site.remote).splitlines()
    modes = {line.split("\t", 1)[1]: line.split()[0] for line in listed}
    for path in modes:
        if "/results/" in path:
            digest = hashlib.sha256(site.show(rev, path)).hexdigest()
            names.known[digest] = f"<sha256 of {path.rpartition('/')[2]}>"
    return {
        "commit": names.text(commit),
        "parents": [names.text(value) for key, value in fields if key == "parent"],
        "author": next(value.rsplit(" ", 2)[0] for key, value in fields if key == "author"),
        "message": [names.text(line) for line in message.splitlines()],
        "tree": {names.text(path): mode for path, mode in modes.items()},
        "documents": {
            names.text(path): normalise(document, names) for path, document in site.documents(rev).items()
        },
    }


def verified(site: Site, rev: str, path: str, namespace: str, key: str) -> bool:
    """Whether the ``.sig`` beside a file was made by this public key in this namespace."""
    folder = site.root / "check"
    folder.mkdir(exist_ok=True)
    (folder / "allowed").write_text(f'somebody namespaces="{namespace}" {key}\n')
    (folder / "sig").write_bytes(site.show(rev, f"{path}.sig"))
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(folder / "allowed"), "-I", "somebody", "-n", namespace]
    done = site.program(*argv, "-s", str(folder / "sig"), data=site.show(rev, path), check=False)
    return done.startswith(b"Good ")


def plant_old(site: Site, source: str, days: int) -> str:
    """Put a copy of an answered request on the remote as if it had been asked and answered days ago.

    Written with plain git and ssh-keygen alone, as another implementation of the protocol would.

    Returns:
        The nonce of the copy, which the key `old` signed; the client trusts it.
    """
    [ref] = (ref for ref in site.refs("refs/heads/mac-bridge") if source in ref)
    asked = datetime.now(UTC) - timedelta(days=days)
    nonce = f"{asked:%Y%m%dt%H%M%Sz}{source[-12:]}"
    at = dict.fromkeys(("created_at", "started_at", "finished_at"), f"{asked:%Y-%m-%dT%H:%M:%SZ}")
    request = json.loads(site.show(ref, ".mac-bridge/request.json"))
    below = f".mac-bridge/results/{nonce}"
    new_ref = ref.replace(source, nonce)
    request |= {"nonce": nonce, "result_ref": new_ref, "created_at": at["created_at"]}
    request |= {"expires_at": f"{asked + timedelta(hours=24):%Y-%m-%dT%H:%M:%SZ}"}
    workload = request["workload_sha"]
    files = {".mac-bridge/request.json": _canonical(request)}
    commit = _commit(site, workload, files, f"kakeya-mac request: {request['preset']} {nonce}")
    result = json.loads(site.show(ref, f".mac-bridge/results/{source}/result.json"))
    result |= {"nonce": nonce, "request_commit": commit} | {k: v for k, v in at.items() if k in result}
    data = _canonical(result)
    for file in result["files"]:
        files[f"{below}/{file['path']}"] = site.show(ref, f".mac-bridge/results/{source}/{file['path']}")
    files |= {f"{below}/result.json": data, f"{below}/result.json.sig": _signed(site, data)}
    message = f"kakeya-mac result: {result['verdict']['status']} {nonce} [skip ci]"
    message += f"\n\nResult-SHA256: {hashlib.sha256(data).hexdigest()}"
    answer = _commit(site, commit, files, message)
    site.git("push", "--quiet", "origin", f"{answer}:{new_ref}")
    return nonce


def _canonical(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _commit(site: Site, parent: str, files: dict[str, bytes], message: str) -> str:
    """A commit in the clone that adds files to its parent's tree, made without a work tree."""
    site.git("fetch", "--quiet", "origin", "+refs/heads/*:refs/remotes/origin/*")
    index = {"GIT_INDEX_FILE": str(site.root / "planted-index")}
    site.git("read-tree", parent, **index)
    for path, data in files.items():
        blob = site.git("hash-object", "-w", "--stdin", data=data)
        site.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", **index)
    return site.git("commit-tree", site.git("write-tree", **index), "-p", parent, "-m", message)


def _signed(site: Site, data: bytes) -> bytes:
    """A result's signature by the key `old`, which is made and trusted when it is first needed."""
    key = site.root / "old_key"
    if not key.exists():
        site.program("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "old", "-f", str(key))
        done = site.kakeya("runners", "trust", "old", "--key", (site.root / "old_key.pub").read_text())
        assert done.code == 0, done.err
    return site.program(
        "ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", "kakeya-mac-result", data=data
    )
