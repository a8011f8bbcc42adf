"""``kakeya_engine serve --for CLIENT``: what to paste so that a client uses the server.

Keys are named by the variable that holds them, and never printed.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError

KEY_VARIABLE = "KAKEYA_API_KEY"
NO_KEY = "unused-without-a-key"  # for clients that insist on one


@dataclass(frozen=True)
class _Connection:
    root: str  # http://HOST:PORT
    model: str
    keyed: bool  # whether the server needs a key

    @property
    def key(self) -> str:
        """The key, as a shell spells it."""
        return f'"${KEY_VARIABLE}"' if self.keyed else NO_KEY


def _codex(to: _Connection) -> list[str]:
    key = [f'env_key = "{KEY_VARIABLE}"'] if to.keyed else []
    return [
        "# into ~/.codex/config.toml: the first two lines before its first [table]",
        f"model = {json.dumps(to.model)}",
        'model_provider = "kakeya"',
        "",
        "[model_providers.kakeya]",
        'name = "kakeya_engine"',
        f'base_url = "{to.root}/v1"',
        'wire_api = "responses"',
        *key,
    ]


def _claude_code(to: _Connection) -> list[str]:
    tiers = [
        f"export ANTHROPIC_DEFAULT_{tier}_MODEL={shlex.quote(to.model)}"
        for tier in ("OPUS", "SONNET", "HAIKU")
    ]
    return [
        "# in the shell that starts claude",
        "unset ANTHROPIC_API_KEY",
        f"export ANTHROPIC_BASE_URL={to.root}",
        f"export ANTHROPIC_AUTH_TOKEN={to.key}",
        f"export ANTHROPIC_MODEL={shlex.quote(to.model)}",
        *tiers,
        "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
    ]


def _aider(to: _Connection) -> list[str]:
    return [
        "# in the shell that starts aider",
        f"export OPENAI_API_BASE={to.root}/v1",
        f"export OPENAI_API_KEY={to.key}",
        f"aider --model {shlex.quote(f'openai/{to.model}')}",
    ]


def _open_webui(to: _Connection) -> list[str]:
    return [
        "# in the shell that starts open-webui; once it has started, its admin settings count instead",
        "# from a container: http://host.docker.internal, and serve --allow-host host.docker.internal",
        f"export OPENAI_API_BASE_URL={to.root}/v1",
        f"export OPENAI_API_KEY={to.key}",
        f"export DEFAULT_MODELS={shlex.quote(to.model)}",
        "export ENABLE_OLLAMA_API=false",
        "open-webui serve --port 3000",
    ]


CONFIGURATIONS: dict[str, Callable[[_Connection], list[str]]] = {
    "codex": _codex,
    "claude-code": _claude_code,
    "aider": _aider,
    "open-webui": _open_webui,
}


def configuration(client: str, serving: Any, model: str, key_file: Path | None) -> str:
    """The lines for a client of a server with these settings.

    Args:
        client: one of `CONFIGURATIONS`.
        serving: `engine.server.serve.ServerSettings`.
        model: the id that the client is to ask for.
        key_file: where the keys are; None for a key in the environment, or none.

    Raises:
        ConfigurationError: the port is not known before the server runs.
    """
    if not serving.port:
        raise ConfigurationError("--for needs the port; --port 0 selects one when the server starts")
    host, notes = serving.host, list[str]()
    if _is_any(host):
        host = "::1" if ":" in host else "127.0.0.1"
        notes.append(f"# on another machine: this one's name or address instead of {host}")
    if serving.keys:
        where = "the server's key" if key_file is None else f"one of the keys in {key_file}"
        notes.append(f"# {KEY_VARIABLE} has to hold {where}")
    try:
        literal = f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        literal = host
    to = _Connection(f"http://{literal}:{serving.port}", model, bool(serving.keys))
    return "\n".join([*notes, *CONFIGURATIONS[client](to)])


def _is_any(host: str) -> bool:
    """Whether it means all addresses of this machine, where clients need one of them."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
