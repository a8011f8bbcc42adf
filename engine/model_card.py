"""What `kakeya_engine model inspect` says: a model's shape, its drafters, its memory, and whether it fits."""

from pathlib import Path
from typing import Any

from engine.drafters.registry import ARCHITECTURES
from engine.errors import InputError
from engine.memory import EVERY, MemoryFit, fit, open_unloaded, predict, verdict, ways_out
from engine.model_store import local_models
from engine.registry import (
    Places,
    Registry,
    default_drafter,
    drafter_facts,
    has_head,
    is_here,
    locate,
    target_facts,
)
from engine.target.folder import read_json, text_part

CONTEXT = 8192  # tokens, where none are asked for


def card(folder: Path, context: int | None = None, drafter: str | None = None) -> dict[str, Any]:
    """The facts of a model's folder; ``drafter`` None: what drafts by default. ModelError for no model."""
    default = default_drafter(folder)
    asked = drafter or default
    drafter = None if asked == "none" else asked
    model, config = open_unloaded(folder), read_json(folder / "config.json")
    wanted = context or min(CONTEXT, (model.context or CONTEXT) - 2)
    document = predict(model, (EVERY,), (wanted,), drafter=drafter)
    found = fit(folder, context=wanted, drafter=drafter)
    text, quantization = text_part(config), config.get("quantization") or {}
    return {
        "folder": str(folder),
        "family": config["model_type"],
        "layers": model.target.layer_count,
        "hidden_size": model.target.hidden_size,
        "heads": text.get("num_attention_heads"),
        "kv_heads": text.get("num_key_value_heads"),
        "head_dims": list(target_facts(folder).head_dims),
        "vocab_size": model.target.vocab_size,
        "context": model.context,
        "dtype": model.dtype,
        "quantization": {key: quantization[key] for key in ("bits", "group_size") if key in quantization}
        or None,
        "chat_template": has_template(folder),
        "weights_bytes": model.weights,
        "default_drafter": default,
        "drafters": drafters_of(folder),
        "kv": [
            {key: row[key] for key in ("kv", "cache_bytes", "bytes_per_token", "ratio_to_native")}
            for row in document["rows"]
        ],
        "refused_kv": document["refused"],
        "memory": _memory(folder, found, drafter),
    }


def _memory(folder: Path, found: MemoryFit, drafter: str | None) -> dict[str, Any]:
    facts = found._asdict() | {"needed": found.needed, "fits": found.fits, "verdict": verdict(found)}
    return facts | ({} if found.fits else {"way_out": ways_out(folder, found, drafter=drafter)})


def has_template(folder: Path) -> bool:
    """Whether a model's folder has a chat template."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def drafters_of(folder: Path) -> list[dict[str, Any]]:
    """Drafters that fit a target: prompt look-up, its own head, those of the registry and of this machine."""
    found: list[dict[str, Any]] = [{"drafter": "prompt-lookup", "here": True}]
    if has_head(folder):
        found.append({"drafter": "mtp", "here": True})
    facts, places = target_facts(folder), Places.of_machine()
    for entry in Registry.load().entries:
        if entry.drafter is None or entry.facts.target != facts:
            continue
        here = is_here(entry, places)
        spec = locate(entry, places).drafter if here else str(entry.drafter)
        found.append({"drafter": spec, "model": entry.name, "here": here})
    for each in local_models():
        config = each.folder / "config.json"
        if each.folder.resolve() == folder.resolve() or not config.is_file():
            continue
        try:
            drafts = _fits(each.folder, folder, facts)
        except InputError:  # a folder of something else
            continue
        if drafts:
            found.append({"drafter": str(each.folder), "model": each.name, "here": True})
    return found


def _fits(drafter: Path, target: Path, facts: Any) -> bool:
    """Whether a folder drafts for a target: a DFlash drafter of its shape, or a smaller model."""
    config = read_json(drafter / "config.json")
    made_for = drafter_facts(str(drafter))
    if made_for is None or made_for.vocab_size not in (None, facts.vocab_size):
        return False
    if "dflash_config" in config or set(config.get("architectures") or []) & set(ARCHITECTURES):
        return made_for.hidden_size == facts.hidden_size and made_for.layers in (None, facts.layers)
    if open_unloaded(drafter).weights >= open_unloaded(target).weights:
        return False
    ours, theirs = (side / "tokenizer.json" for side in (drafter, target))
    return ours.is_file() and theirs.is_file() and _vocabulary(ours) == _vocabulary(theirs)


def _vocabulary(file: Path) -> Any:
    return read_json(file).get("model", {}).get("vocab")
