"""Training a projector: which keys and values of the target the drafter's features foretell.

Texts come in, `projector_fit` finds the weights, and a folder that `engine.restoration.loading` reads goes
out. Figures are those of held-out texts.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.errors import ConfigurationError, EngineError
from engine.haystack_text import HELD_OUT, TRAIN, document_parts
from engine.networks.projector import LayerShape, Projector, ProjectorConfig
from engine.restoration.loading import features_of
from engine.restoration.sites import sites_of
from engine.target.folder import read_json
from engine.target.loading import LoadedTarget
from engine.training.projector_fit import AttentionRecorder, DrawText, Fit, Progress, ProjectorSwitches

FACTS = 12  # in a document, at most
HELD_OUT_SHARE = 0.1  # of a file


def train_projector(
    target: LoadedTarget,
    drafter: Path,
    out: Path,
    switches: ProjectorSwitches,
    *,
    texts: Callable[[Any, int], DrawText] | None = None,
    dtype: str | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Train a projector, write its folder, and return the figures its config.json has under ``training``.

    ``drafter`` is the folder of the target's DFlash drafter, ``out`` the folder to write; one that holds
    another kind of model is refused. ``texts`` makes texts from the tokenizer and a length in tokens; None:
    as the switches say.
    """
    switches.check(target.context)
    sites = sites_of(target.target.model, switches.layers_of(target.target.model))
    features, card = features_of(drafter, target.target, dtype)
    if texts is None and switches.texts_file is not None:
        texts = partial(file_texts, Path(switches.texts_file))
    draw = (texts or retrieval_texts)(target.tokenizer, switches.length)
    with _folder(out):
        with closing(AttentionRecorder(target.target, sites, features)) as recorder:
            weights, figures = Fit(recorder, switches, draw, progress).run()
        shapes = tuple(LayerShape(site.layer, *site.widths) for site in sites)
        digests = target.card.weights_sha256, card.weights_sha256
        config = ProjectorConfig(*digests, features.target_layers, features.size, shapes)
        projector = Projector(config)
        for layer, values in zip(projector.layers, weights, strict=True):
            layer.load_weights(list(values.items()))
        write_projector(projector, out, {"switches": asdict(switches), **figures})
    return figures


def retrieval_texts(tokenizer: Any, length: int) -> DrawText:
    """Draw generated retrieval documents; held-out ones have words and sentences of their own."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    @lru_cache(maxsize=100_000)
    def count(text: str) -> int:
        return len(encode(text))

    def draw(rng: Random, held_out: bool) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            lexicon, facts = HELD_OUT if held_out else TRAIN, rng.randint(2, FACTS)
            sentences, asked = document_parts(rng, lexicon, count, length=length, facts=facts)
            answers = [f"{fact.question}{fact.code}." for fact in asked]
            begin, end = tokenizer.bos_token or "", tokenizer.eos_token or ""
            tokens += encode("".join([begin, *sentences, *answers, end]))
        return tokens[:length]

    return draw


def file_texts(path: Path, tokenizer: Any, length: int) -> DrawText:
    """Draw stretches of a file of plain text, or of JSON lines with a field ``text``; its end is held out."""
    stream: list[int] = []
    for text in _documents(path):
        stream += tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.eos_token_id is not None:
            stream.append(tokenizer.eos_token_id)
    kept = max(length, round(len(stream) * HELD_OUT_SHARE))
    if len(stream) - kept < length:
        raise ConfigurationError(
            f"--texts-file {path} has {len(stream)} tokens, too few for texts of --length {length}; "
            f"give a file of at least {2 * length} tokens, or a smaller --length"
        )
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    parts = {False: stream[:-kept], True: stream[-kept:]}

    def draw(rng: Random, held_out: bool) -> list[int]:
        start = rng.randrange(len(parts[held_out]) - length + 1)
        return (begin + parts[held_out][start : start + length])[:length]

    return draw


def _documents(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(
            f"--texts-file {path} cannot be read: {reason}; give a UTF-8 text, or a .jsonl file"
        ) from None
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigurationError(
                f"--texts-file {path} line {number} is no text: {line[:40]!r}; "
                'each line must be an object such as {"text": "…"}'
            ) from None
        yield text


def write_projector(projector: Projector, folder: Path, training: dict[str, Any]) -> None:
    """Write ``model.safetensors`` in float16 and ``config.json``, each whole or not at all."""
    document = projector.config.document() | {"dtype": "float16", "training": training}
    parameters: Any = tree_flatten(projector.parameters())  # type: ignore[no-untyped-call]
    weights = {name: value.astype(mx.float16) for name, value in parameters}
    try:
        with TemporaryDirectory(prefix=".new-", dir=folder, ignore_cleanup_errors=True) as half:
            mx.save_safetensors(f"{half}/model.safetensors", weights, metadata={"format": "mlx"})
            text = json.dumps(document, indent=2) + "\n"
            Path(half, "config.json").write_text(text, encoding="utf-8")
            for name in ("config.json", "model.safetensors"):
                os.replace(Path(half, name), folder / name)
    except (OSError, RuntimeError) as error:  # mlx says RuntimeError where a file cannot be written
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise EngineError(f"{folder} cannot be written: {reason}") from None


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the folder of a projector, and remove it again where nothing was written."""
    made: list[Path] = []
    try:
        try:
            made += [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {out} cannot be made a folder: {error.strerror}") from None
        if not os.access(out, os.W_OK):
            raise ConfigurationError(f"--out {out} cannot be written")
        config = out / "config.json"
        others = any(out.glob("model*.safetensors")) and not config.exists()
        if others or (config.exists() and "feature_size" not in read_json(config)):
            raise ConfigurationError(f"--out {out} holds another model; give a folder of its own")
        yield
    finally:
        for folder in made:
            with suppress(OSError):  # it holds the projector
                folder.rmdir()
