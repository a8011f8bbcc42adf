"""A real Gitea on this machine's loopback, with runners that execute workflow jobs as processes of this host.

`scripts/install_forge.sh` builds both. Everything a run of the scenarios makes lies in one folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import requests

from tests.e2e.acts import NETWORK, ROOT, STAND_INS, pinned
from tests.fixtures.repo import BIN

OWNER, MEMBER = "owner", "alice"
SLUG = "team/workload"
MAC, HOSTED = "studio", "hosted"
MAC_LABELS, HOSTED_LABELS = "self-hosted,macOS,ARM64,kakeya-mac", "ubuntu-latest"
_SETTINGS = """
RUN_MODE = prod
RUN_USER = {user}
I_AM_BEING_UNSAFE_RUNNING_AS_ROOT = true
WORK_PATH = {work}
[server]
HTTP_ADDR = 127.0.0.1
HTTP_PORT = {port}
ROOT_URL = {url}/
STATIC_ROOT_PATH = {static}
DISABLE_SSH = true
OFFLINE_MODE = true
[database]
DB_TYPE = sqlite3
PATH = {work}/gitea.db
[security]
INSTALL_LOCK = true
SECRET_KEY = of-a-server-on-loopback
[service]
DISABLE_REGISTRATION = true
[log]
MODE = file
LEVEL = Info
ROOT_PATH = {work}/log
[actions]
ENABLED = true
DEFAULT_ACTIONS_URL = self
ZOMBIE_TASK_TIMEOUT = 15s
[cron.stop_zombie_tasks]
SCHEDULE = @every 5s
[cron.update_checker]
ENABLED = false
"""


T = TypeVar("T")


def password(user: str) -> str:
    return f"{user}-password-1"


@dataclass
class Forge:
    """One Gitea with an owner, a member who may push, a project with the workflows, and two runners."""

    programs: Path  # where gitea and runner were built
    folder: Path
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def remote(self) -> str:
        """The project's address for the member."""
        return self.address(MEMBER)

    def address(self, user: str, slug: str = SLUG) -> str:
        return self.url.replace("://", f"://{user}:{password(user)}@") + f"/{slug}"

    def start(self) -> None:
        """Start the server with its users."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        work = self.folder / "gitea"
        work.mkdir(parents=True)
        values = {"user": _whoami(), "work": work, "port": self.port, "url": self.url}
        (work / "app.ini").write_text(_SETTINGS.format(**values, static=self.programs / "static"))
        self._gitea("migrate")
        for user, admin in ((OWNER, ["--admin"]), (MEMBER, [])):
            told = ["--username", user, "--password", password(user), "--email", f"{user}@example.org"]
            self._gitea("admin", "user", "create", *told, "--must-change-password=false", *admin)
        self._spawn("gitea", self._gitea_argv("web"), env=self._gitea_env())
        self.wait("the server answers", self._is_up, 60)

    def build_project(self) -> None:
        """Make the project, whose default branch is this checkout as it lies here, and the three actions."""
        for organisation in ("team", "actions"):
            self.api("POST", "/orgs", {"username": organisation, "visibility": "public"})
        self.api("POST", "/orgs/team/repos", {"name": "workload", "private": True, "default_branch": "main"})
        self.api("PUT", f"/repos/{SLUG}/collaborators/{MEMBER}", {"permission": "write"})
        for action, commit in pinned().items():
            name = action.removeprefix("actions/")
            self.api("POST", "/orgs/actions/repos", {"name": name, "default_branch": "main"})
            copy = self.folder / "stand-ins" / name
            shutil.copytree(STAND_INS / name, copy)
            self._first_commit(copy, f"a stand-in for {action}")
            # No commit can be made to have the pinned id, but a tag can have its name.
            tag = f"HEAD:refs/tags/{commit}"
            self.git("push", "--quiet", self.address(OWNER, action), "HEAD:main", tag, cwd=copy)
        project = self.folder / "project"
        listed = self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        for name in filter(None, listed.split("\0")):
            # The project's own tests are not what is tried here.
            if (ROOT / name).is_file() and name != ".github/workflows/ci.yaml":
                (project / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, project / name)
        self._first_commit(project, "the project")
        self.git("remote", "add", "origin", self.address(OWNER), cwd=project)
        self.git("push", "--quiet", "origin", "main", cwd=project)
        # Gitea makes the label "Array" of fromJSON(a list), so it gets a JSON string.
        self.set_variable("KAKEYA_RUNNER_LABELS", '"kakeya-mac"')

    def set_variable(self, name: str, value: str | None) -> None:
        """Set a repository variable; None deletes it."""
        path = f"/repos/{SLUG}/actions/variables/{name}"
        if any(each["name"] == name for each in self.api("GET", f"/repos/{SLUG}/actions/variables")):
            self.api("DELETE", path)
        if value is not None:
            self.api("POST", path, {"value": value})

    def token(self, user: str) -> str:
        """A new API token of a user."""
        asked = {"name": os.urandom(4).hex(), "scopes": ["write:repository", "read:user"]}
        return str(self.api("POST", f"/users/{user}/tokens", asked, user=user)["sha1"])

    def start_runner(self, name: str, labels: str, jobs: int = 1) -> None:
        """Start a runner; the environment of its jobs is that of a machine of its own."""
        home = self.home(name)
        credentials = self.folder / f"{name}.json"
        argv = [str(self.programs / "runner"), "-server", self.url]
        if not credentials.exists():
            token = self.api("POST", f"/repos/{SLUG}/actions/runners/registration-token")["token"]
            register = [*argv, "-registration", token, "-name", name, "-labels", labels]
            credentials.write_bytes(subprocess.run(register, check=True, capture_output=True).stdout)
        argv += ["-credentials", str(credentials), "-work", str(self.folder / f"{name}-jobs")]
        self._spawn(name, [*argv, "-jobs", str(jobs)], env=self.environment(name), cwd=home)

    def home(self, name: str) -> Path:
        path = self.folder / "homes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, name: str) -> dict[str, str]:
        """What a machine of this name has in its environment; kakeya_mac is installed on the Mac alone."""
        home = self.home(name)
        return {
            **{key: value for key, value in os.environ.items() if NETWORK.fullmatch(key)},
            "PATH": os.environ["PATH"] if name == HOSTED else f"{BIN}:{os.environ['PATH']}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "KAKEYA_STATE": str(home / "state"),
            "KAKEYA_CONFIG": str(home / "config"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv")),
            "STAND_IN_STORE": str(self.folder / "artifacts"),
            "STAND_IN_INTRUDER": str(self.folder / "intruder"),
        }

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Stop the server or a runner: as its owner would, or as a power failure does with its jobs."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        if kill:
            os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["pkill", "-KILL", "-f", f"{self.folder}/{name}-jobs"], check=False)
        else:
            process.terminate()
        process.wait(120)

    def close(self) -> None:
        for name in [*self.processes][::-1]:
            self.stop(name, kill=name != "gitea")

    def api(self, method: str, path: str, body: Any = None, *, user: str = OWNER) -> Any:
        """Call Gitea's API as a user; the JSON it answers, or None."""
        answer = self._call(method, path, body, user)
        return answer.json() if answer.content else None

    def _call(self, method: str, path: str, body: Any, user: str) -> requests.Response:
        url, who = f"{self.url}/api/v1{path}", (user, password(user))
        answer = requests.request(method, url, json=body, auth=who, timeout=60)
        if not answer.ok:
            raise AssertionError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer

    def runs(self) -> list[dict[str, Any]]:
        """The workflow runs, the newest first."""
        found = self.api("GET", f"/repos/{SLUG}/actions/runs?limit=50")
        return list(found["workflow_runs"] or [])

    def run_of(self, branch: str) -> dict[str, Any]:
        """The run that a request's branch started, once it is there."""

        def found() -> dict[str, Any] | None:
            name = branch.removeprefix("refs/heads/")
            return next(
                (run for run in self.runs() if name in (run["head_branch"], run["display_title"])), None
            )

        return self.wait(f"a run of {branch}", found, 30)

    def jobs(self, run: int) -> dict[str, dict[str, Any]]:
        """The jobs of a run by name."""
        return {job["name"]: job for job in self.api("GET", f"/repos/{SLUG}/actions/runs/{run}/jobs")["jobs"]}

    def wait_for_job(self, run: int, name: str, status: str, patience_s: float = 120) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            job = self.jobs(run).get(name)
            return job if job is not None and job["status"] == status else None

        return self.wait(f"the job {name} of run {run} is {status}", found, patience_s)

    def log(self, run: int, name: str) -> str:
        """The log of a job that has ended."""
        job = self.jobs(run)[name]["id"]
        return self._call("GET", f"/repos/{SLUG}/actions/jobs/{job}/logs", None, OWNER).text

    def cancel_on_page(self, run: int) -> None:
        """Cancel a run as a person does, on its page."""
        with requests.Session() as browser:
            form = {"user_name": OWNER, "password": password(OWNER)}
            browser.post(f"{self.url}/user/login", form, timeout=60).raise_for_status()
            browser.post(f"{self.url}/{SLUG}/actions/runs/{run}/cancel", timeout=60).raise_for_status()

    def git(self, *args: str, cwd: Path, **env: str) -> str:
        outside = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
        done = subprocess.run(
            ["git", *args], cwd=cwd, env={**os.environ, **outside, **env}, capture_output=True, timeout=120
        )
        if done.returncode != 0:
            raise AssertionError(f"git {args[0]} failed: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode(errors="replace").strip()

    def refs(self) -> dict[str, str]:
        """All refs of the project."""
        listed = self.git("ls-remote", self.address(OWNER), cwd=self.folder)
        rows = (line.split("\t") for line in listed.splitlines())
        return {ref: commit for commit, ref in rows}

    def wait(self, what: str, found: Callable[[], T | None], patience_s: float) -> T:
        """What `found` returns once it is something."""
        deadline = time.monotonic() + patience_s
        while not (value := found()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {patience_s:.0f} s: {what}")
            time.sleep(0.3)
        return value

    def _is_up(self) -> bool:
        try:
            return bool(self.api("GET", "/version"))
        except requests.ConnectionError:
            return False

    def _first_commit(self, folder: Path, message: str) -> None:
        who = ("-c", "user.name=owner", "-c", "user.email=owner@example.org")
        self.git("init", "--quiet", "--initial-branch=main", cwd=folder)
        self.git("add", "--all", cwd=folder)
        self.git(*who, "commit", "--quiet", "-m", message, cwd=folder)

    def _gitea_argv(self, *args: str) -> list[str]:
        return [str(self.programs / "gitea"), "--config", str(self.folder / "gitea" / "app.ini"), *args]

    def _gitea_env(self) -> dict[str, str]:
        home = str(self.home("gitea"))
        return {"PATH": os.environ["PATH"], "HOME": home, "GITEA_WORK_DIR": str(self.folder / "gitea")}

    def _gitea(self, *args: str) -> None:
        done = subprocess.run(
            self._gitea_argv(*args), env=self._gitea_env(), capture_output=True, timeout=120, text=True
        )
        if done.returncode != 0:
            raise AssertionError(f"gitea {args[0]} failed: {done.stdout}{done.stderr}")

    def _spawn(self, name: str, argv: list[str], *, env: dict[str, str], cwd: Path | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, env=env, cwd=cwd or self.folder, stdout=log, stderr=log, start_new_session=True
            )


def _whoami() -> str:
    return subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
