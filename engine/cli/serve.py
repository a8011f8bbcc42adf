"""``kakeya_engine serve``: an OpenAI-compatible endpoint. A JSON line says where; logs go to stderr."""

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.cli.client_setup import CONFIGURATIONS, KEY_VARIABLE, configuration
from engine.cli.options import PATH, flag, option, prepare, registry_options, several, take, take_registry
from engine.errors import ConfigurationError


def _mib(_context: click.Context, parameter: click.Parameter, mib: float | None) -> int | None:
    if mib is not None and not math.isfinite(mib):
        raise ConfigurationError(f"{parameter.opts[0]} must be a number of MiB, not {mib}")
    return None if mib is None else int(mib * 2**20)


@click.command("serve")
@registry_options
@option("--host", "Address; any but this machine's own needs a key.", "127.0.0.1")
@option("--port", "0 selects a free one.", 8080)
@option("--api-key-file", "API keys, one a line.", type=PATH)
@option("--metrics-key-file", "Keys that open /metrics of all API keys, and nothing else.", type=PATH)
@several("--allow-host", "A further name of this server, for local proxies.", dest="allowed_hosts")
@several("--allow-origin", "Let web pages of this origin send requests (CORS).", dest="allowed_origins")
@option("--max-body", "MiB of a request.", 1.0, dest="largest_body", callback=_mib)
@option("--max-tokens", "Largest max_tokens of a request.", 4096)
@option("--default-tokens", "… where a request does not say.", 512)
@option("--parallel", "Requests decoded at once [default: as many as fit in memory, at most 32].", type=int)
@flag("--strict", "Refuse unknown fields, instead of ignoring those that change nothing.")
@option("--queue", "Requests that may wait; more are refused.", 64)
@option("--models", "Models in memory at once.", 1)
@option("--cache-sessions", "Snapshots of prompts kept in memory, about two a request.", 32, dest="sessions")
@option(
    "--cache-mib",
    "… in so many MiB [default: a quarter of the free memory].",
    type=float,
    dest="session_bytes",
    callback=_mib,
)
@option("--cache-seconds", "… and how long.", 600.0, dest="session_s")
@option("--cache-dir", "Folder where prompts outlive the server; it holds what was said.", type=PATH)
@option("--cache-dir-mib", "… of so many MiB at most.", 8192.0, dest="disk_bytes", callback=_mib)
@option(
    "--cache-write-mib-per-hour",
    "… and so many MiB written to it in any hour.",
    4096.0,
    dest="hourly_bytes",
    callback=_mib,
)
@option("--prompt-cache/--no-prompt-cache", "Keep prompts for later requests.", True)
@several("--allow-kv", "Let requests spell out such KV policies, too: lattice:e8,8..64@inner:0..4.")
@option("--prefill-chunk", "Prompt positions a turn.", 512, dest="chunk")
@option("--grace", "Seconds to finish in, when stopped.", 30.0, dest="grace_s")
@flag("--log-content", "Write prompts and answers to the log.")
@option(
    "--for",
    "Print the configuration that connects a client to this server, and exit.",
    dest="client",
    type=click.Choice(tuple(CONFIGURATIONS)),
)
@flag("--check", "Check the registry's models that are on this machine, and exit.")
def command(**values: Any) -> None:
    """Serve OpenAI's completions, chats and Responses, and Anthropic's Messages, under http://HOST:PORT/v1.

    They are decoded together, and speculatively.

    Without --api-key-file, KAKEYA_API_KEY is the key; without either, only this machine may send requests.

    \b
    Examples:
      kakeya_engine serve
      kakeya_engine serve --for codex
      kakeya_engine serve --check
      kakeya_engine serve --model qwen3-4b --drafter qwen3-4b-dflash
      KAKEYA_API_KEY=… kakeya_engine serve --host 0.0.0.0 --port 8000
      curl -s localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "demo", "messages": [{"role": "user", "content": "Name the third word."}]}'
    """  # noqa: D301 - click wants the character itself
    keys = _keys(values["api_key_file"])
    metrics_keys = _keys_of("--metrics-key-file", values["metrics_key_file"])

    prepare()
    from engine.registry import Places, PolicyRange, is_here, locate
    from engine.server.scheduler import SchedulerLimits
    from engine.server.serve import ServerSettings, check_registry, serve
    from engine.server.service import RequestLimits

    requests = take(RequestLimits, values)
    limits = take(SchedulerLimits, values)
    serving = take(
        ServerSettings, values, keys=keys, metrics_keys=metrics_keys, request_limits=requests, limits=limits
    )
    serving.check()
    registry = take_registry(values)
    allowed = tuple(PolicyRange.parse(text) for text in values["allow_kv"])
    registry = replace(registry, requests=registry.requests + allowed)
    if values["client"]:
        click.echo(configuration(values["client"], serving, registry.default, values["api_key_file"]))
        return
    if values["check"]:
        for line in check_registry(registry, Places.of_machine()):
            click.echo(line)
        locate(registry.entry(registry.default), Places.of_machine())  # without it no server starts
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("httpx", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)

    def ready(host: str, port: int) -> None:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        places = Places.of_machine()
        here = replace(registry, entries=tuple(each for each in registry.entries if is_here(each, places)))
        others = len(here.entries) - 1
        more = f"{others} more model{'s' if others > 1 else ''}"
        served = f"{registry.default} and {more}" if others > 0 else registry.default
        click.echo(f"kakeya_engine: serving {served} under {url}", err=True)
        click.echo(json.dumps({"url": url, "port": port, "models": here.ids()}))

    serve(registry, serving, ready)


def _keys(file: Path | None) -> tuple[str, ...]:
    """The API keys of the file or of the environment; an argument would show in lists of processes."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    keys = _keys_of("--api-key-file", file)
    if not keys:
        raise ConfigurationError(f"--api-key-file {file} holds no key")
    return keys


def _keys_of(flag: str, file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{flag} {file} cannot be read: {error}") from None
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
