"""``kakeya_engine serve``: an OpenAI-compatible endpoint. A JSON line says where; logs go to stderr."""

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.cli.options import registry_options, take_registry
from engine.errors import ConfigurationError

KEY_VARIABLE = "KAKEYA_API_KEY"
MIB = 2**20


@click.command("serve")
@registry_options
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address; any but this machine's own needs a key."
)
@click.option("--port", type=int, default=8080, show_default=True, help="0 selects a free one.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="API keys, one a line.")
@click.option("--allow-host", multiple=True, help="A further name of this server, for local proxies.")
@click.option(
    "--allow-origin",
    multiple=True,
    help="Let web pages of this origin send requests (CORS); none by default.",
)
@click.option("--max-body", type=float, default=1.0, show_default=True, help="MiB of a request.")
@click.option(
    "--max-tokens", type=int, default=4096, show_default=True, help="Largest max_tokens of a request."
)
@click.option(
    "--default-tokens", type=int, default=512, show_default=True, help="… where a request does not say."
)
@click.option("--parallel", type=int, default=4, show_default=True, help="Requests that take turns.")
@click.option(
    "--queue", type=int, default=64, show_default=True, help="Requests that may wait; more are refused."
)
@click.option("--models", type=int, default=1, show_default=True, help="Models in memory at once.")
@click.option(
    "--cache-sessions", type=int, default=8, show_default=True, help="Conversations kept for their next turn."
)
@click.option("--cache-mib", type=float, help="… and at most so many MiB together [default: any].")
@click.option("--cache-seconds", type=float, default=600.0, show_default=True, help="… and how long.")
@click.option(
    "--allow-kv",
    multiple=True,
    metavar="POLICY",
    help="Let requests spell out KV policies, besides the registry's: lattice:e8,8..64@inner:0..4.",
)
@click.option("--prefill-chunk", type=int, default=512, show_default=True, help="Prompt positions a turn.")
@click.option(
    "--grace", type=float, default=30.0, show_default=True, help="Seconds to finish in, when stopped."
)
@click.option("--log-content", is_flag=True, help="Write prompts and answers to the log.")
@click.option("--check", is_flag=True, help="Check the registry's models that are on this machine, and exit.")
def command(**values: Any) -> None:
    """Serve OpenAI's chat and text completions, decoded speculatively, under http://HOST:PORT/v1.

    Without --api-key-file, KAKEYA_API_KEY is the key; without either, only this machine may send requests.

    \b
    Examples:
      kakeya_engine serve
      kakeya_engine serve --check
      kakeya_engine serve --model ~/models/qwen3-4b --drafter ~/models/qwen3-4b-dflash
      KAKEYA_API_KEY=… kakeya_engine serve --host 0.0.0.0 --port 8000
      curl -s localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "demo", "messages": [{"role": "user", "content": "Name the third word."}]}'
    """  # noqa: D301 - click wants the character itself
    keys = _keys(values["api_key_file"])

    from engine.device import prepare

    prepare()
    from engine.registry import Places, PolicyRange, locate
    from engine.server.scheduler import SchedulerLimits
    from engine.server.serve import ServerSettings, check_registry, serve
    from engine.server.service import RequestLimits

    serving = ServerSettings(
        host=values["host"],
        port=values["port"],
        keys=keys,
        allowed_hosts=values["allow_host"],
        allowed_origins=values["allow_origin"],
        largest_body=_bytes("--max-body", values["max_body"]),
        request_limits=RequestLimits(
            values["max_tokens"], values["default_tokens"], values["parallel"] + values["queue"]
        ),
        limits=SchedulerLimits(
            parallel=values["parallel"],
            models=values["models"],
            sessions=values["cache_sessions"],
            session_bytes=None if values["cache_mib"] is None else _bytes("--cache-mib", values["cache_mib"]),
            session_s=values["cache_seconds"],
            chunk=values["prefill_chunk"],
        ),
        grace_s=values["grace"],
        download=values["download"],
        log_content=values["log_content"],
    )
    serving.check()
    registry = take_registry(values)
    allowed = tuple(PolicyRange.parse(text) for text in values["allow_kv"])
    registry = replace(registry, requests=registry.requests + allowed)
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
        click.echo(f"kakeya_engine: serving {registry.default} and the other models under {url}", err=True)
        click.echo(json.dumps({"url": url, "port": port, "models": registry.ids()}))

    serve(registry, serving, ready)


def _bytes(flag: str, mib: float) -> int:
    if not math.isfinite(mib):
        raise ConfigurationError(f"{flag} must be a number of MiB, not {mib}")
    return int(mib * MIB)


def _keys(file: Path | None) -> tuple[str, ...]:
    """The API keys of the file or of the environment; an argument would show in lists of processes."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--api-key-file {file} cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigurationError(f"--api-key-file {file} holds no key")
    return keys
