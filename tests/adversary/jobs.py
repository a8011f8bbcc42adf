"""Hostile jobs: what code may try that an owner allowed, or that took over a program of the machine.

Each is a program of an owner's preset, so that only the sandbox of the job protects the machine from it.
`arg` is the path of a file it must not make. None does what would harm a machine without a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bridge.protocol.result import Reason


@dataclass(frozen=True)
class HostileJob:
    """One program.

    Attributes:
        program: Python.
        expected: How its request may end.
        needs: What the machine must enforce for that, an item of `Enforced`; empty: nothing.
        evidence: It is to write a report to ``out``.
        timeout_s: Seconds it gets.
        log: What its log must hold.
        silent: What its log must not hold.
    """

    program: str
    expected: frozenset[Reason]
    needs: Literal["", "network", "tree", "writes", "credentials", "processes", "memory", "disk"] = ""
    evidence: bool = False
    timeout_s: int = 30
    log: str = ""
    silent: str = ""


_OK = frozenset({Reason.OK})
_LIMIT = frozenset({Reason.RESOURCE_LIMIT, Reason.EXIT_CODE})
_NO_REPORT = frozenset({Reason.NO_EVIDENCE, Reason.EVIDENCE})
_SLEEPER = "signal.signal(15, signal.SIG_IGN); signal.signal(1, signal.SIG_IGN); time.sleep(300)"

JOBS: Mapping[str, HostileJob] = {
    "processes-by-the-hundred": HostileJob(
        "for _ in range(8): os.fork()\ntime.sleep(60)", _LIMIT, needs="memory"
    ),
    "threads-by-the-hundred": HostileJob(
        "import threading\nfor _ in range(300): threading.Thread(target=time.sleep, args=(60,)).start()",
        _LIMIT,
        needs="memory",
    ),
    "a-child-that-outlives-it": HostileJob(
        f"if os.fork() == 0:\n    {_SLEEPER}\nprint('left', flush=True)", _OK, needs="tree", log="left"
    ),
    "a-daemon": HostileJob(
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    for number in range(3): os.close(number)\n"
        f"    {_SLEEPER}\n"
        "os.wait(); print('left', flush=True)",
        _OK,
        needs="tree",
        log="left",
    ),
    "a-daemon-of-daemons": HostileJob(
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        for _ in range(2):\n"
        "            if os.fork() == 0: os.setsid()\n"
        f"        {_SLEEPER}\n"
        "print('left', flush=True)",
        _OK,
        needs="tree",
        log="left",
    ),
    "a-child-that-is-born-at-the-end": HostileJob(
        "import atexit\n"
        "def last():\n"
        f"    if os.fork() == 0:\n        os.setsid(); {_SLEEPER}\n"
        "atexit.register(last)",
        _OK,
        needs="tree",
    ),
    "a-job-that-does-not-end": HostileJob(_SLEEPER, frozenset({Reason.TIMEOUT}), timeout_s=2),
    "a-job-that-stops-itself": HostileJob(
        "os.kill(os.getpid(), signal.SIGSTOP)", frozenset({Reason.TIMEOUT}), timeout_s=2
    ),
    "a-flood": HostileJob(
        "while True: print('x' * 100_000)", frozenset({Reason.OUTPUT_LIMIT, Reason.EXIT_CODE})
    ),
    "a-flood-of-errors": HostileJob(
        "while True: os.write(2, b'x' * 65_536)", frozenset({Reason.OUTPUT_LIMIT, Reason.EXIT_CODE})
    ),
    "a-flood-of-progress": HostileJob(
        "for n in range(200_000): print('progress', n, '/', 7)", frozenset({Reason.OUTPUT_LIMIT, Reason.OK})
    ),
    "progress-beyond-counting": HostileJob(
        "print('progress 9' + '9' * 5000 + '/1 x')\n"
        "print('progress -1/0 y')\nprint('progress 1/1 ' + 'z' * 5000)",
        _OK,
    ),
    "a-log-that-drives-a-terminal": HostileJob(
        "sys.stdout.buffer.write(b'\\x1b]52;c;aWQ=\\x07\\x1b[2J\\x9b\\xff\\0end\\n')",
        _OK,
        log="end",
    ),
    "a-log-that-says-it-passed": HostileJob(
        'print(\'{"verdict": {"status": "passed"}}\'); sys.exit(3)', frozenset({Reason.EXIT_CODE})
    ),
    "an-exit-that-says-killed": HostileJob("os.kill(os.getpid(), 9)", frozenset({Reason.EXIT_CODE})),
    "memory-by-the-gigabyte": HostileJob(
        "held = []\nfor _ in range(40):\n    held.append(b'x' * (32 << 20)); time.sleep(0.1)\ntime.sleep(30)",
        frozenset({Reason.RESOURCE_LIMIT, Reason.EXIT_CODE}),
        needs="memory",
    ),
    "a-disk-full": HostileJob(
        "with open('big', 'wb') as sink:\n"
        "    for _ in range(300): sink.write(b'x' * (1 << 20))\ntime.sleep(30)",
        _LIMIT,
        needs="disk",
    ),
    "files-by-the-thousand": HostileJob(
        "for n in range(3000): open(f'f{n}', 'w').close()\ntime.sleep(30)", _LIMIT, needs="disk"
    ),
    "a-file-outside": HostileJob(
        "try: open(arg, 'w')\nexcept OSError as error: print('refused', error.errno)",
        _OK,
        needs="writes",
    ),
    "a-link-to-a-file-outside": HostileJob(
        "os.symlink(arg, 'link')\n"
        "try: open('link', 'w')\nexcept OSError as error: print('refused', error.errno)",
        _OK,
        needs="writes",
    ),
    "a-file-beside-the-runner": HostileJob(
        "folder = os.path.dirname(arg)\n"
        "for name in ('config/policy.toml', 'state/x', 'home/.bashrc', 'remote.git/hooks/update'):\n"
        "    try: open(os.path.join(folder, name), 'a').write('x')\n"
        "    except OSError as error: print('refused', error.errno)",
        _OK,
        needs="writes",
    ),
    "a-key-of-the-user": HostileJob(
        "try: print(open(os.path.join(os.path.dirname(arg), 'home/.ssh/id_ed25519')).read())\n"
        "except OSError as error: print('refused', error.errno)",
        _OK,
        needs="credentials",
        silent="PRIVATE",
    ),
    "a-key-of-the-runner": HostileJob(
        "for folder, _, files in os.walk(os.path.join(os.path.dirname(arg), 'state')):\n"
        "    for name in files:\n"
        "        if name == 'id_ed25519': print(open(os.path.join(folder, name)).read())",
        _OK,
        needs="credentials",
        silent="PRIVATE",
    ),
    "a-call-home": HostileJob(
        "import socket\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[3])), 3)\n"
        "except OSError as error: print('refused', error.errno)",
        _OK,
        needs="network",
        log="refused",
    ),
    "a-look-into-others": HostileJob(
        "for name in os.listdir('/proc') if os.path.isdir('/proc') else ():\n"
        "    try: print(open(f'/proc/{name}/environ').read()) if name.isdigit() else None\n"
        "    except OSError: pass",
        _OK,
        needs="processes",
        silent="KAKEYA_STATE",
    ),
    "a-report-that-is-a-link": HostileJob("os.symlink('/etc/passwd', out)", _NO_REPORT, evidence=True),
    "a-report-behind-a-link": HostileJob(
        "folder = os.path.dirname(out)\nos.rmdir(folder)\nos.symlink('/etc', folder)",
        _NO_REPORT,
        evidence=True,
    ),
    "a-report-that-is-a-pipe": HostileJob("os.mkfifo(out)", _NO_REPORT, evidence=True),
    "a-report-that-is-a-folder": HostileJob("os.mkdir(out)", _NO_REPORT, evidence=True),
    "a-report-that-is-a-device": HostileJob(
        "try: os.mknod(out, 0o20666, os.makedev(1, 5))\nexcept OSError: pass", _NO_REPORT, evidence=True
    ),
    "a-report-that-is-a-socket": HostileJob(
        "import socket\nos.chdir(os.path.dirname(out))\n"
        "socket.socket(socket.AF_UNIX).bind(os.path.basename(out))",
        _NO_REPORT,
        evidence=True,
    ),
    "a-report-of-two-names": HostileJob(
        "open('x', 'w').write('{}'); os.link('x', out)", _NO_REPORT, evidence=True
    ),
    "a-report-of-a-gigabyte-of-nothing": HostileJob(
        "os.truncate(os.open(out, os.O_CREAT | os.O_WRONLY), 1 << 30)",
        _NO_REPORT | {Reason.EXIT_CODE, Reason.RESOURCE_LIMIT},
        evidence=True,
    ),
    "a-report-of-rubbish": HostileJob("open(out, 'wb').write(os.urandom(1000))", _NO_REPORT, evidence=True),
    "a-report-of-brackets": HostileJob("open(out, 'w').write('[' * 1_000_000)", _NO_REPORT, evidence=True),
    "a-report-that-nobody-may-read": HostileJob(
        "open(out, 'w').write('{}'); os.chmod(out, 0)", _NO_REPORT, evidence=True
    ),
    "a-result-of-its-own": HostileJob(
        "folder = os.path.dirname(out)\n"
        "for name in ('result.json', 'result.json.sig', 'log.txt'):\n"
        "    open(os.path.join(folder, name), 'w').write('{}')",
        _NO_REPORT,
        evidence=True,
    ),
    "a-workspace-that-is-gone": HostileJob(
        "os.rmdir(os.getcwd())\nprint('gone', flush=True)", _OK, log="gone"
    ),
    "folders-that-nobody-may-enter": HostileJob(
        "os.makedirs('a/b/c')\nopen('a/b/c/d', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)", _OK
    ),
    "names-of-no-encoding": HostileJob("open(b'\\xff\\xfe\\x1b[2J', 'w').close(); os.mkdir('\\n')", _OK),
}
