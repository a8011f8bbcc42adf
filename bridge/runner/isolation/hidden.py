"""What a job must not reach of its machine, and what it must be able to read wherever that lies."""

from __future__ import annotations

import importlib.util
import os
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bridge.presets import Preset

# Credentials and private traces in the user's home.
CREDENTIALS = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".pypirc", ".npmrc", ".pgpass"),
    *(".git-credentials", ".config/git/credentials", ".config/gh", ".config/hub", ".config/gcloud"),
    *(".config/op", ".config/rclone", ".cargo/credentials.toml", ".terraform.d", ".vault-token"),
    *(".password-store", ".local/share/keyrings", ".local/share/kwalletd", ".mozilla", ".thunderbird"),
    *(".config/google-chrome", ".config/chromium", ".cache/huggingface/token", ".huggingface"),
    *(".bash_history", ".zsh_history", ".python_history", ".viminfo", ".lesshst"),
    *("Library/Keychains", "Library/Cookies", "Library/Safari", "Library/Mail", "Library/Messages"),
    *("Library/Application Support/Google", "Library/Application Support/Firefox"),
)
# Where programs outside listen that would do a job's work for it.
SOCKETS = ("/run/user", "/run/dbus", "/run/docker.sock", "/run/containerd", "/run/podman")
# How names become addresses; read only by jobs with a network.
_RESOLVERS = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager")


def hidden(home: Path, ours: Mapping[str, str], *own: Path) -> list[Path]:
    """Files, folders and sockets that a job must not reach where the machine can hide them.

    Args:
        home: The user's home, with the credentials in it.
        ours: The runner's environment, which names the key agent's socket.
        own: The runner's state and configuration: keys, policy, mirror, spool.
    """
    agent = [Path(ours["SSH_AUTH_SOCK"])] if ours.get("SSH_AUTH_SOCK") else []
    return [*(home / name for name in CREDENTIALS), *(Path(name) for name in SOCKETS), *agent, *own]


def kept(
    presets: Iterable[Preset], ours: Mapping[str, str], models: Iterable[Path], *, network: bool
) -> list[Path]:
    """Files and folders that jobs read, should they lie where a job finds empty folders: ``/tmp``, ``/run``.

    Args:
        presets: What may run: programs and data that their files name by absolute paths.
        ours: The runner's environment, for the names that presets take from it.
        models: Folders of models.
        network: A job gets the machine's network, and so what tells names from addresses.
    """
    named = (Path(value) for preset in presets for value in _named(preset, ours))
    resolvers = [Path(name) for name in _RESOLVERS] if network else []
    return [*_installation(), *models, *resolvers, *(path for path in named if path.is_absolute())]


def _named(preset: Preset, ours: Mapping[str, str]) -> Iterator[str]:
    for element in preset.argv:
        value = element.rpartition("=")[2] if element.startswith("--") else element
        yield ours.get(value[6:-1], "") if value.startswith("${env:") else value


def _installation() -> list[Path]:
    """Where this program's interpreter and packages lie."""
    found = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, site.getsitepackages())]
    for name in ("bridge", "engine"):
        spec = importlib.util.find_spec(name)
        found += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return [path for path in found if os.path.lexists(path)]
