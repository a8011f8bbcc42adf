"""``scripts/setup_mac.sh`` against a Mac's programs: it sets up, and a second time it changes nothing."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.mac.options import SetupOptions, parser
from bridge.mac.setup import ACTIONS_LABEL, SERVE_LABEL, property_list
from tests.bridge.mac.tools import FULL, SCRIPT, TOKEN, URL, Mac


@pytest.mark.slow
def test_it_sets_a_mac_up_and_a_second_run_changes_nothing(mac: Mac) -> None:
    done = mac.setup(*FULL)
    assert done.code == 0, done.out + done.err
    first = done.json
    assert (first["ready"], first["changed"]) == (True, True)
    assert {step["state"] for step in first["steps"]} == {"done"}
    names = [step["name"] for step in first["steps"]]
    assert names[:4] == ["machine", "options", "environment", "git-lfs"]
    assert names[-1] == "self-test"
    assert {"actions runner", "remote access"} <= set(names)
    assert {"launchd", "tailnet"} <= {path.name for path in mac.fake.iterdir()}
    calls = mac.calls()
    assert not [call for call in calls if TOKEN in call]
    before = mac.tree()

    again = mac.setup(*FULL)
    assert again.code == 0, again.err
    assert (again.json["ready"], again.json["changed"]) == (True, False)
    assert mac.tree() == before
    assert mac.changes() == []
    assert "nothing had to be changed" in again.err


@pytest.mark.slow
def test_what_it_makes_is_what_a_runner_needs(mac: Mac) -> None:
    assert mac.setup(*FULL).code == 0
    runner = mac.prefix / "actions-runner"
    assert runner.stat().st_mode & 0o777 == 0o700, "it holds credentials"
    assert (runner / ".env").read_text() == "LANG=en_US.UTF-8\n"
    assert (runner / ".path").read_text().startswith(f"{mac.prefix}/env/bin:")
    assert (mac.home / "kakeya-models").is_dir()
    assert (mac.home / ".config" / "kakeya-mac" / "policy.toml").is_file()
    assert (mac.prefix / "env").is_symlink()
    assert (mac.prefix / "env" / "interpreter.json").exists()
    assert "AC Power:\n sleep 0\n" in (mac.fake / "power").read_text()
    for label in ("org.kakeya-mac.actions-runner", "org.kakeya-mac.serve"):
        file = mac.fake / "root" / "Library" / "LaunchDaemons" / f"{label}.plist"
        assert plistlib.loads(file.read_bytes())["Label"] == label


def test_property_lists_say_what_launchd_must_know(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(mac.home))
    monkeypatch.setenv("KAKEYA_CONFIG", "/somewhere")
    options = SetupOptions(parser().parse_args(["--url", URL, "--service", "both", "--name", "studio"]))
    monkeypatch.setattr(options, "user", "me")
    for label in (ACTIONS_LABEL, SERVE_LABEL):
        found = plistlib.loads(property_list(options, label).encode())
        assert (found["RunAtLoad"], found["KeepAlive"], found["AbandonProcessGroup"]) == (True, True, True)
        assert found["UserName"] == "me"
        assert found["StandardOutPath"] == found["StandardErrorPath"]
        assert Path(found["ProgramArguments"][0]).is_absolute()
        assert all(isinstance(value, str) for value in found["EnvironmentVariables"].values())
        assert found["EnvironmentVariables"]["KAKEYA_CONFIG"] == "/somewhere"
    assert found["ProgramArguments"][1:5] == ["runner", "serve", "--remote", URL]
    assert found["ExitTimeOut"] >= 3600, "a daemon that is told to stop finishes its job"


def test_a_dry_run_says_everything_and_does_nothing(mac: Mac) -> None:
    before = mac.tree()
    done = mac.setup(*FULL[:-1], "--dry-run")
    assert done.code == 0, done.err
    assert mac.tree() == before
    assert mac.changes() == []
    for part in (
        *(
            "-I -m venv",
            "uv sync --locked",
            "i.write(i.record_path()",
            "curl -fsSL",
            "shasum -a 256 -c",
            "tar -xzf",
        ),
        *("config.sh --unattended", "ACTIONS_RUNNER_INPUT_TOKEN=…", "runner policy init"),
        *(
            "sudo launchctl bootstrap system",
            "<key>AbandonProcessGroup</key>",
            "sudo pmset",
            "tailscale up --ssh",
        ),
        *("git lfs install", "kakeya-models", "kakeya_engine generate", "eval throughput --prompts code"),
        *("--claim none", "kakeya_mac gate", "do sleep 1; done", "ln -sfn envs/"),
    ):
        assert part in done.out, part


def test_a_dry_run_on_linux_needs_no_flag_and_no_mac(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", str(SCRIPT), "--dry-run"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "github.com/OWNER/NAME" in done.stdout
    assert "launchctl bootstrap" in done.stdout
    assert "not macOS" in done.stdout or os.uname().sysname == "Darwin"
    assert list(tmp_path.iterdir()) == []


ELSEWHERE = "http://127.0.0.1:3333/team/x"


@pytest.mark.parametrize(
    ("flags", "state", "service"),
    [
        (("--url", ELSEWHERE), "done", SERVE_LABEL),
        (("--remote", "ssh://git@git.example.org:2222/team/x"), "done", SERVE_LABEL),
        (("--url", ELSEWHERE, "--service", "actions"), "advice", ACTIONS_LABEL),
        (("--url", "https://acme.ghe.com/team/x"), None, ACTIONS_LABEL),
    ],
    ids=["a page", "a remote", "asked for all the same", "ghe.com"],
)
def test_other_servers_get_the_daemon(
    mac: Mac, flags: tuple[str, ...], state: str | None, service: str
) -> None:
    done = mac.run("--dry-run", "--json", *flags)
    assert done.code == 0, done.err
    steps = {step["name"]: step for step in done.json["steps"]}
    assert [name for name in steps if name.startswith("service file")] == [f"service file {service}"]
    server = steps.get("git server", {"state": None})
    assert server["state"] == state
    if state is not None:
        assert server["looked_at"] == flags[1], "with its scheme and port"
        assert "requests travel by a runner's daemon" in server["finding"]
    if state == "advice":
        assert server["fix"] == f"--service serve --remote {ELSEWHERE}: the daemon"


@pytest.mark.slow
def test_dry_run_ends_quietly_if_its_reader_goes_away(mac: Mac) -> None:
    argv = ["sh", "-c", f"sh '{SCRIPT}' --dry-run | head -n 1"]
    for _ in range(3):
        done = subprocess.run(argv, env={**os.environ, **mac.env}, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""


@pytest.mark.exhaustive
def test_without_sudo_it_prints_the_commands_and_is_not_ready(mac: Mac) -> None:
    done = mac.setup("--json")
    assert done.code == 1
    services = [step for step in done.json["steps"] if step["state"] == "missing"]
    assert [step["name"] for step in services] == ["service org.kakeya-mac.actions-runner"]
    assert "sudo launchctl bootstrap system" in services[0]["fix"]
    assert not [call for call in mac.calls() if call.startswith("sudo")]
    assert (mac.prefix / "services" / "org.kakeya-mac.actions-runner.plist").exists()


def fake(name: str, text: str = "") -> Callable[[Mac], object]:
    return lambda mac: (mac.fake / name).write_text(text)


FAILURES: dict[str, tuple[Callable[[Mac], object], str]] = {
    "an old macOS": (fake("macos", "13.6\n"), "update to macOS 14.0"),
    "an Intel Mac": (fake("machine", "x86_64\n"), "MLX needs Apple silicon"),
    "a shell under Rosetta": (
        lambda mac: (fake("machine", "x86_64\n")(mac), fake("translated", "1\n")(mac)),
        "use a native terminal",
    ),
    "little memory": (fake("memory", "8589934592\n"), "16 GiB are the least"),
    "no command line tools": (fake("no-tools"), "xcode-select --install"),
    "another archive": (fake("archive", "not a runner"), "does --runner-sha256 belong"),
    "a token that is refused": (fake("token", "another"), "404"),
    "launchd refuses": (fake("launchd-refuses"), "launchctl bootstrap"),
    "no git-lfs and no Homebrew": (fake("no-lfs"), "brew install git-lfs"),
}


@pytest.mark.sampled(16, 3)
@pytest.mark.parametrize("name", FAILURES)
def test_missing_part_is_reported_with_its_fix(mac: Mac, name: str) -> None:
    damage, said = FAILURES[name]
    damage(mac)
    done = mac.setup(*FULL)
    assert done.code == 1, done.out + done.err
    document = done.json
    assert document["ready"] is False
    wrong = [step for step in document["steps"] if step["state"] == "missing"]
    assert any(said in step["finding"] + step["fix"] for step in wrong), wrong
    assert all(step["fix"] for step in wrong)


@pytest.mark.exhaustive
def test_a_policy_that_is_there_is_never_touched(mac: Mac) -> None:
    path = mac.home / ".config" / "kakeya-mac" / "policy.toml"
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("allow_repo_code = true\n")
    path.chmod(0o600)
    done = mac.setup(*FULL)
    assert path.read_text() == "allow_repo_code = true\n"
    assert done.code == 0


@pytest.mark.exhaustive
def test_models_that_are_not_whole_are_named(mac: Mac) -> None:
    folder = mac.home / "kakeya-models" / "gemma"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    done = mac.setup(*FULL)
    models = next(step for step in done.json["steps"] if step["name"] == "models")
    assert (models["state"], "gemma holds no" in models["finding"]) == ("advice", True)


@pytest.mark.slow
def test_without_a_token_it_says_where_to_get_one(mac: Mac) -> None:
    done = mac.setup(*FULL, KAKEYA_RUNNER_TOKEN="")
    step = mac.step(done, "actions runner")
    assert (done.code, step["state"]) == (1, "missing")
    assert f"{URL}/settings/actions/runners" in step["fix"]
    assert not (mac.prefix / "actions-runner").exists()


def test_check_changes_nothing_and_says_what_setup_would_do(mac: Mac) -> None:
    before = mac.tree()
    done = mac.setup("check", "--json")
    assert done.code == 1
    assert {"environment", "actions runner"} <= {
        s["name"] for s in done.json["steps"] if s["state"] == "to do"
    }
    assert mac.tree() == before


ROOT = Path(__file__).resolve().parents[3]
USAGE = {
    "no url": (("--service", "actions"), "needs --url"),
    "a url that is none": (("--url", "git@github.com:a/b"), "is malformed"),
    "a password in the url": (("--url", "https://me:pw@github.com/a/b"), "--url holds credentials"),
    "a token in the remote": (("--remote", "https://pw@example.org/a.git"), "--remote holds credentials"),
    "a password in the remote": (("--remote", "HTTP://me:pw@example.org/a"), "--remote holds credentials"),
    "a password for ssh": (("--remote", "ssh://git:pw@example.org/a.git"), "--remote holds credentials"),
    "no label": (("--labels", ","), "--labels: '' is malformed"),
    "a name": (("--name", "a b"), "--name: 'a b' is malformed"),
    "a folder that macOS guards": (
        ("--prefix", "HOME/Documents/kakeya", "--remote", "https://example.org/a"),
        "lies in",
    ),
    "the checkout": (("--prefix", str(ROOT / "env"), "--remote", "https://example.org/a"), f"lies in {ROOT}"),
    "an unknown flag": (("--frobnicate",), "unrecognized arguments"),
    "a label": (("--labels", "a;b"), "--labels: 'a;b' is malformed"),
    "an organisation elsewhere": (("--url", "http://gitea.lan:3000/team"), "--service serve needs --remote"),
}


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("name", USAGE)
def test_flags_that_cannot_be_meant_are_refused_before_anything(mac: Mac, name: str) -> None:
    flags, said = USAGE[name]
    words = [word.replace("HOME", str(mac.home)) for word in flags]
    done = mac.run(*words)
    assert done.code == 2, done.out + done.err
    assert said in done.err
    assert "pw" not in done.err
    assert not mac.prefix.exists()


@pytest.mark.slow
def test_the_installed_command_runs_the_same(mac: Mac) -> None:
    program = shutil.which("kakeya_mac", path=str(Path(mac.env["REAL_KAKEYA"]).parent))
    assert program is not None
    env = {**os.environ, **mac.env}
    done = subprocess.run(
        [program, "runner", "check", "--json"], env=env, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout.splitlines()[-1])["command"] == "check"
    said = subprocess.run([program, "runner", "setup", "--help"], env=env, capture_output=True, text=True)
    assert "--runner-sha256" in said.stdout
    assert "examples:" in said.stdout


def test_the_script_is_one_that_bash_3_2_reads() -> None:
    text = SCRIPT.read_text()
    assert text.startswith("#!/bin/sh\n")
    for word in (
        "declare -A",
        "mapfile",
        "readarray",
        "${!",
        "|&",
        "&>>",
        "[[",
        "=~",
        "local -n",
        ",,}",
        "^^}",
    ):
        assert word not in text, word
    for shell in filter(shutil.which, ("sh", "dash", "bash")):
        assert subprocess.run([shell, "-n", str(SCRIPT)]).returncode == 0


def test_without_python_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/sh", str(SCRIPT)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20
    )
    found_elsewhere = any(Path(p).exists() for p in ("/opt/homebrew/bin/python3", "/usr/local/bin/python3"))
    assert found_elsewhere or (done.returncode == 1 and "no Python 3.11" in done.stderr)


@pytest.mark.slow
def test_flags_of_the_earlier_system_are_accepted(mac: Mac) -> None:
    flags = ("--runner-token", TOKEN, "--repo-url", URL, "--with-tailscale", "--sudo", "--json")
    own = ("--runner-sha256", mac.sha256, "--runner-version", "2.400.0", "--name", "studio")
    done = mac.run(*flags, *own, KAKEYA_RUNNER_TOKEN="")
    assert done.code == 0, done.err
    assert mac.step(done, "actions runner")["finding"].startswith(f"registered as studio for {URL} with")
    assert mac.step(done, "tailnet")["state"] == "done"
    assert not [call for call in mac.calls() if TOKEN in call]
    assert TOKEN not in (mac.prefix / "setup.json").read_text()
