"""``kakeya_mac runner models``: the models of this machine's owner, which the policy names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bridge import settings
from bridge.cli import show
from bridge.cli.options import json_option
from bridge.errors import MachineError, PolicyError, RequestRefused
from bridge.presets import ModelNeed, model_parameter
from bridge.proc import write_atomic
from bridge.runner import policy as policies
from bridge.runner.config import RunnerConfig, survey_config
from bridge.runner.models import COMPANIONS, resolve
from evidence_format import weights


@click.group(
    epilog="""\b
Examples:
  kakeya_mac runner models add qwen3-8b ~/models/Qwen3-8B-4bit
  kakeya_mac runner models add qwen3-8b-dflash ~/models/Qwen3-8B-DFlash
  kakeya_mac runner models list
  kakeya_mac run --preset throughput -p model=qwen3-8b      # what a requester then can ask for

A preset with a drafter or a projector can choose a model whose NAME-dflash or NAME-projector is there."""
)
def models() -> None:
    """The models that requests can choose with the parameter `model`."""


@models.command(
    epilog="""\b
Examples:
  kakeya_mac runner models add qwen3-8b ~/models/Qwen3-8B-4bit"""
)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True))
def add(name: str, folder: Path) -> int:
    """Add the model in FOLDER under NAME to the policy; a running runner offers it at once.

    The folder is checked: files that are missing or cut short are refused.
    """
    if (fault := _fault(folder)) is not None:
        raise MachineError(f"the model in {folder} is not whole: {fault}", "fetch it again into that folder")
    path = settings.config_dir() / policies.FILE_NAME
    policies.load(path)
    text = path.read_text(encoding="utf-8") if path.exists() else policies.default_text()
    before = policies.parse(path, text.encode())
    if name in before.models:
        raise PolicyError(f"models.{name} is {str(before.models[name])!r} already", f"change it in {path}")
    changed = policies.with_model(text, name, folder)
    after = policies.parse(path, changed.encode())
    if after != before.model_copy(update={"models": {**before.models, name: folder}}):
        raise PolicyError(f"cannot add models.{name} to {path}", f"write under [models]: {name} = '{folder}'")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, changed.encode())
    click.echo(f"added: {name} = {folder} ({path})")
    base = next((name.removesuffix(end) for end in COMPANIONS if name.endswith(end)), name)
    offered = [row["name"] for row in _choices(_config()) if base in row["models"]]
    click.echo(f"  presets that can choose {base} now: {', '.join(offered) or 'none'}")
    return 0


@models.command(
    "list",
    epilog="""\b
Examples:
  kakeya_mac runner models list --json

JSON: models [{name, folder, fault, owner (whether the policy names it)}], presets [{name, models}].""",
)
@json_option
def list_(as_json: bool) -> int:
    """Where the models of this machine are, and which a request for each preset can choose."""
    config = _config()
    rows, choices = _rows(config), _choices(config)
    lines = [f"{row['name']:<32} {row['folder'] or row['fault']}" for row in rows]
    lines += ["", *(f"{each['name']:<32} model: {', '.join(each['models'])}" for each in choices)]
    return show(as_json, {"models": rows, "presets": choices}, lines)


@models.command(
    epilog="""\b
Examples:
  kakeya_mac runner models check

Exit code 0: all are; 6: at least one is not, so requests for it are refused."""
)
@json_option
def check(as_json: bool) -> int:
    """Look whether every model that the policy names is there and whole."""
    rows = [row for row in _rows(_config()) if row["owner"]]
    broken = [row for row in rows if row["fault"]]
    lines = [f"{row['name']}: {row['fault'] or row['folder']}" for row in rows]
    lines = lines or ["the policy names no model: kakeya_mac runner models add NAME FOLDER"]
    return show(as_json, {"models": rows, "exit_code": 6 if broken else 0}, lines)


def _config() -> RunnerConfig:
    return survey_config("", state_dir=settings.state_dir(), config_dir=settings.config_dir())


def _fault(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    return next(iter(weights.faults(folder)), None)


def _rows(config: RunnerConfig) -> list[dict[str, Any]]:
    """Each model that the policy or a preset names: its folder, or why it cannot be used."""
    needs = {name: need for preset in config.presets.values() for name, need in preset.models.items()}
    needs = {name: ModelNeed(mac=f"the model {name}") for name in config.policy.models} | needs
    rows = []
    for name in sorted(needs):
        folder = fault = None
        try:
            folder = str(resolve({name: needs[name]}, config.model_places())[name])
        except RequestRefused as error:
            fault = error.message
        rows.append({"name": name, "folder": folder, "fault": fault, "owner": name in config.policy.models})
    return rows


def _choices(config: RunnerConfig) -> list[dict[str, Any]]:
    return [
        {"name": preset.name, "models": list(preset.params[key].enum or ())}
        for preset in config.presets.values()
        if (key := model_parameter(preset)) is not None
    ]
