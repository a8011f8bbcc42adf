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
    *(".git-credentials", ".gitconfig", ".config/git", ".config/gh", ".config/hub", ".config/gcloud"),
    *(".config/op", ".1password", ".config/rclone", ".config/sops", ".cargo/credentials", ".boto", ".s3cfg"),
    *(".cargo/credentials.toml", ".terraform.d", ".vault-token", ".my.cnf", ".kaggle", ".config/wandb"),
    *(".password-store", ".local/share/keyrings", ".local/share/kwalletd", ".mozilla", ".thunderbird"),
    *(".config/google-chrome", ".config/chromium", ".config/BraveSoftware", ".config/microsoft-edge"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".huggingface"),
    *(".config/github-copilot", ".config/doctl", ".config/heroku", ".fly"),
    *(".bash_history", ".zsh_history", ".python_history", ".viminfo", ".lesshst"),
    *("Library/Keychains", "Library/Cookies", "Library/Safari", "Library/Mail", "Library/Messages"),
    *("Library/Application Support/Google", "Library/Application Support/Firefox"),
)
# The machine's own, readable where the runner is root; in a container, what its jailer gave it.
SYSTEM = ("/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/krb5.keytab", "/run/secrets", "/var/run/secrets")
# Variables that say where credentials lie.
PLACES = (
    *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AZURE_CONFIG_DIR", "CLOUDSDK_CONFIG"),
    *("DOCKER_CONFIG", "GH_CONFIG_DIR", "GIT_CONFIG_GLOBAL", "GNUPGHOME", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("HF_TOKEN_PATH", "KUBECONFIG", "NETRC", "NPM_CONFIG_USERCONFIG", "PGPASSFILE", "SSH_AUTH_SOCK"),
)
# Where programs outside listen that would do a job's work for it.
SOCKETS = ("/run/user", "/run/dbus", "/run/docker.sock", "/run/containerd", "/run/podman")
# How names become addresses; read only by jobs with a network.
_RESOLVERS = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager")


def hidden(home: Path, ours: Mapping[str, str], *own: Path) -> list[Path]:
    """Files, folders and sockets that a job must not reach where the machine can hide them.

    Args:
        home: The user's home, with the credentials in it.
        ours: The runner's environment, which says where else credentials lie.
        own: The runner's state and configuration: keys, policy, mirror, spool.
    """
    named = [Path(ours[name]) for name in PLACES if ours.get(name)]
    if ours.get("HF_HOME"):
        named += [Path(ours["HF_HOME"], name) for name in ("token", "stored_tokens")]
    there = [*map(Path, (*SYSTEM, *SOCKETS)), *(place for place in named if place.is_absolute())]
    return [*(home / name for name in CREDENTIALS), *there, *own]


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
    """Where this program's interpreter and packages lie, also what ``.pth`` files add."""
    found = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, site.getsitepackages())]
    found += [Path(place) for place in sys.path if os.path.isabs(place)]
    for name in ("bridge", "engine"):
        spec = importlib.util.find_spec(name)
        found += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return [path for path in found if os.path.lexists(path)]
