"""`serve --check` has a line for each model, whatever is wrong with others, and fails for a faulty one."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from engine.cli import run
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from tests.engine.registry.registries import write

MODELS = f"""
default = "demo"
[models.demo]
summary = "the shipped pair"
target = "shipped"
drafter = "shipped"
[models.plain]
summary = "decoded by mlx-lm"
target = "shipped"
engine = "mlx-lm"
[models.drafting]
summary = "decoded by mlx-lm with a draft model"
target = "shipped"
drafter = {{ path = "{SHIPPED_TARGET}" }}
engine = "mlx-lm-speculative"
block = 4
[models.gone]
summary = "its path leads nowhere"
target = {{ path = "/no-such-folder" }}
"""
LAST = '[models.last]\nsummary = "the same again"\ntarget = "shipped"\n'


def check(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    code = run(["serve", "--check", "--registry", str(file)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_every_model_has_a_line_with_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, lines, _ = check(write(tmp_path, MODELS), capsys)
    assert code == 0
    assert lines == [
        f"demo: {SHIPPED_TARGET}, drafter prompt-lookup+{SHIPPED_DRAFTER}",
        f"plain: {SHIPPED_TARGET}, drafter none, engine mlx-lm",
        f"drafting: {SHIPPED_TARGET}, drafter {SHIPPED_TARGET}, engine mlx-lm-speculative",
        "gone: the target of the model gone is not on this machine: /no-such-folder is not a folder; "
        "give the path of a model's folder on this machine",
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('engine = "mlxlm"', "engine 'mlxlm' is none of mlx-lm, mlx-lm-speculative, dflash, dflash-mlx"),
        ('engine = "dflash"', "engine dflash is not installed here; run: pip install"),
        ('engine = "mlx-lm-speculative"', "engine mlx-lm-speculative needs a drafter's folder; name one"),
        ('engine = "mlx-lm"\ndrafter = "shipped"', "engine mlx-lm has no drafter; leave "),
        ('engine = "mlx-lm-speculative"\ndrafter = "prompt-lookup"', "prompt-lookup is not a folder"),
        (
            f'engine = "mlx-lm-speculative"\ndrafter = {{ path = "{SHIPPED_TARGET}" }}\nblock = 1',
            "engine mlx-lm-speculative cannot verify 1 tokens at a time; leave the block out",
        ),
        ("facts.target = { hidden_size = 64, layers = 9, vocab_size = 1280, head_dims = [32] }", "not 64"),
    ],
)
def test_a_fault_is_told_with_its_model_after_the_other_lines(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fields: str,
    says: str,
):
    monkeypatch.setattr("engine.external_engines.loops.find_spec", lambda name: name == "mlx_lm" or None)
    odd = f'[models.odd]\nsummary = "cannot be used"\ntarget = "shipped"\n{fields}\n'
    code, lines, error = check(write(tmp_path, MODELS + odd + LAST), capsys)
    assert code == 2
    assert [line.partition(":")[0] for line in lines] == ["demo", "plain", "drafting", "gone", "odd", "last"]
    assert lines[4].startswith("odd: ")
    assert says in lines[4]
    assert error.startswith("kakeya_engine: the model odd cannot be used: ")
    assert says in error


def test_a_default_model_that_is_not_here_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, lines, error = check(write(tmp_path, MODELS.replace('"demo"', '"gone"', 1)), capsys)
    assert (code, len(lines)) == (2, 4)
    assert "the target of the model gone is not on this machine: /no-such-folder" in error


KEY = "a-key-that-is-never-printed"


def configured(capsys: pytest.CaptureFixture[str], client: str, *arguments: str) -> str:
    assert run(["serve", "--for", client, *arguments]) == 0
    out, _ = capsys.readouterr()
    assert KEY not in out
    return str(out)


def exported(text: str) -> dict[str, str]:
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return dict(line[1].split("=", 1) for line in lines if line[:1] == ["export"])


def test_codex_gets_a_provider_that_is_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("KAKEYA_API_KEY", raising=False)
    given = tomllib.loads(configured(capsys, "codex", "--registry", str(write(tmp_path, MODELS))))
    provider = given["model_providers"][given["model_provider"]]
    assert (given["model"], provider["base_url"]) == ("demo", "http://127.0.0.1:8080/v1")
    assert (provider["wire_api"], "env_key" in provider) == ("responses", False)
    monkeypatch.setenv("KAKEYA_API_KEY", KEY)
    given = tomllib.loads(configured(capsys, "codex", "--host", "::", "--port", "90"))
    provider = given["model_providers"][given["model_provider"]]
    assert (provider["base_url"], provider["env_key"]) == ("http://[::1]:90/v1", "KAKEYA_API_KEY")


@pytest.mark.parametrize(
    ("client", "url", "key"),
    [
        ("claude-code", ("ANTHROPIC_BASE_URL", "http://box:8080"), "ANTHROPIC_AUTH_TOKEN"),
        ("aider", ("OPENAI_API_BASE", "http://box:8080/v1"), "OPENAI_API_KEY"),
        ("open-webui", ("OPENAI_API_BASE_URL", "http://box:8080/v1"), "OPENAI_API_KEY"),
    ],
)
def test_clients_get_variables_that_name_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], client: str, url: tuple[str, str], key: str
):
    keys = tmp_path / "keys"
    keys.write_text(f"# of the tests\n{KEY}\n")
    text = configured(capsys, client, "--host", "box", "--api-key-file", str(keys))
    found = exported(text)
    assert (found[url[0]], found[key]) == (url[1], "$KAKEYA_API_KEY")
    assert f"one of the keys in {keys}" in text
    assert re.search(r"(MODELS?=|openai/)demo\b", text)


def test_a_port_that_is_not_known_yet_has_no_configuration(capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "--for", "aider", "--port", "0"]) == 2
    assert "--port 0" in capsys.readouterr().err
