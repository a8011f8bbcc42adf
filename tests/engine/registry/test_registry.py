"""A registry file is read strictly, and an id asks for one model and one channel or is refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cache.policy import parse_policy
from engine.errors import ConfigurationError, DrafterMismatchError, InputError, ModelError, UnknownModel
from engine.registry import (
    CHANNELS,
    SHIPPED_FILE,
    Places,
    Registry,
    default_drafter,
    fitting_name,
    registry_markdown,
)
from engine.target.loading import SHIPPED_DRAFTER, SHIPPED_TARGET
from tests.engine.registry.registries import MINIMAL, SHIPPED, at, published, with_model, write

FACTS = "facts.target = { hidden_size = 64, layers = 6, vocab_size = 512, head_dims = [16] }\n"


def refusal(folder: Path, text: str, kind: type[InputError] = ConfigurationError) -> str:
    """What a registry of that text is refused with, after the file's name."""
    path = write(folder, text)
    with pytest.raises(kind) as caught:
        Registry.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < 600
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_the_shipped_registry_has_the_published_pairs_and_the_demo_by_default():
    registry = Registry.load()
    assert registry.default == "demo"
    assert [entry.name for entry in registry.entries if str(entry.drafter) == "prompt-lookup"] == [
        "llama-3.2-3b-instruct",
        "llama-3.3-70b-instruct",
        "glm-4.5-air",
        "glm-4.7-flash",
        "mistral-7b",
    ]
    for entry in registry.entries:
        assert len(entry.channels) > 1
        assert entry.default_channel == "native"
        sources = [s for s in (entry.target, entry.drafter) if s is not None]
        assert all(source.hub or source.shipped or source.path == "prompt-lookup" for source in sources)
        assert entry.facts.target is not None or entry.target == SHIPPED


def test_every_id_of_a_registry_is_resolved():
    registry = Registry.load()
    ids = registry.ids()
    assert len(set(ids)) == len(ids)
    for model_id in ids:
        entry, channel = registry.resolve(model_id)
        name, _, named = model_id.partition("@")
        assert (entry.name, channel.name) == (name, named or entry.default_channel)


def test_a_channel_may_be_named_beside_the_id():
    registry = Registry.load()
    assert registry.resolve("demo", "affine8")[1] is CHANNELS["affine8"]
    assert registry.resolve("demo@affine8", "affine8")[1] is CHANNELS["affine8"]


@pytest.mark.parametrize("model_id", ["", "gpt-4", "Demo", "@native", "demo ", "x" * 1000, "demo\n"])
def test_an_unknown_model_is_refused_with_the_closest(model_id: str):
    said = r"there is no model .*; there are \S+, \S+, \S+ and [0-9]+ more$"
    with pytest.raises(UnknownModel, match=said) as caught:
        Registry.load().resolve(model_id)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_id", ["demo@", "demo@nonsense", "demo@affine8@native", "demo@Native"])
def test_an_unknown_channel_is_refused_with_those_there_are(model_id: str):
    with pytest.raises(UnknownModel, match=r"there is no KV channel .*; there are native, "):
        Registry.load().resolve(model_id)


@pytest.mark.parametrize("asked", [("demo@sink-window-4096", None), ("demo", "sink-window-4096")])
def test_a_channel_that_a_model_does_not_offer_is_refused_with_what_it_offers(
    asked: tuple[str, str | None],
):
    message = "the model demo does not offer the KV channel sink-window-4096; it offers native, "
    with pytest.raises(ConfigurationError, match=message):
        Registry.load().resolve(*asked)


def test_two_channels_at_once_are_refused():
    with pytest.raises(ConfigurationError, match="names the KV channel 'affine8', and the request 'native'"):
        Registry.load().resolve("demo@affine8", "native")


def test_a_file_says_everything_about_a_model(tmp_path: Path):
    text = """
        default = "b"
        [models.a]
        summary = "a"
        target = { path = "/models/a" }
        drafter = "prompt-lookup:4"
        [models."b.1"]
        summary = "b"
        target = { folder = "b", hub = "Own-er/B.b_1", revision = "0123456789abcdef0123456789abcdef01234567" }
        drafter = { path = "~/b", lookups = true }
        channels = ["affine4", "native"]
        default_channel = "native"
        block = 6
        dtype = "float16"
        quantize = "4,32"
        context = 2048
        chat_template_kwargs = { enable_thinking = false, level = "low", depth = 2 }
        engine = "dflash-mlx"
        [models.b]
        summary = "c"
        target = { folder = "b", hub = "Own-er/B.b_1", revision = "0123456789abcdef0123456789abcdef01234567" }
        channels = ["affine4", "rotated4"]
    """
    registry = Registry.load(write(tmp_path, text))
    first, second, third = registry.entries
    assert (first.target, first.drafter, first.lookups) == (
        at("/models/a"),
        at("prompt-lookup:4"),
        False,
    )
    assert list(first.channels) == ["native"]
    assert second.target == published("b", "Own-er/B.b_1", "0123456789abcdef0123456789abcdef01234567")
    assert second.drafter is not None
    assert (second.drafter.path, second.lookups) == (str(Path.home() / "b"), True)
    assert (list(second.channels), second.default_channel) == (["affine4", "native"], "native")
    assert (second.block, second.dtype, second.quantize, second.context) == ("6", "float16", "4,32", 2048)
    assert dict(second.chat_template_kwargs) == {"enable_thinking": False, "level": "low", "depth": 2}
    assert second.engine == "dflash-mlx"
    assert (third.default_channel, third.drafter) == ("affine4", None)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("colour = 1", "models.one: unknown field 'colour'"),
        ('name = "two"', "models.one: unknown field 'name'"),
        ("block = 0", "models.one.block: --block must be auto or a number from 1 to 1024, not '0'"),
        ("block = true", "models.one.block: must be a text, not True"),
        ("block = 8", "models.one: block and facts.drafter need a drafter; there is none"),
        ('dtype = "int8"', "models.one.dtype: dtype 'int8' is not one of float32, float16, bfloat16"),
        ("dtype = 16", "models.one.dtype: must be a text, not 16"),
        ('quantize = "7"', "models.one.quantize: --quantize 7: bits 7 is not one of"),
        ("context = 0", "models.one.context: must be at least 1, got 0"),
        ("context = 1.5", "models.one.context: must be of type integer, got 1.5"),
        ("context = 99999999999", "models.one.context: "),
        ('engine = "Other Engine"', "models.one.engine: must match"),
        ('drafter = "some-text"', 'models.one.drafter: must be "shipped", { folder = '),
        ('drafter = "prompt-lookup:x"', "models.one.drafter: must be"),
        ("drafter = 3", 'models.one.drafter: must be "shipped"'),
        (
            'drafter = { hub = "a/b" }',
            'models.one.drafter: must be "shipped", or have one of path and folder',
        ),
        ('drafter = { folder = "../b" }', "models.one.drafter.folder: must match"),
        ('drafter = { folder = "b", hub = "b" }', "models.one.drafter.hub: must match"),
        ('drafter = { folder = "b", hub = "a/../b" }', "models.one.drafter.hub: must match"),
        (
            'drafter = { folder = "b", hub = "a/b", revision = "main" }',
            "models.one.drafter.revision: must match",
        ),
        (
            f'drafter = {{ folder = "b", revision = "{"0" * 40}" }}',
            "models.one.drafter: hub needs folder, and revision needs hub",
        ),
        ('drafter = { path = "b" }', "models.one.drafter: path must begin with / or ~/, not 'b'"),
        ('drafter = { path = "/b", folder = "b" }', 'models.one.drafter: must be "shipped", or have one of'),
        (
            'drafter = { folder = "b", kv = "lattice" }',
            "models.one.drafter.kv: --drafter-kv 'lattice': a drafter takes native, sink-window, affine",
        ),
        ('drafter = { folder = "b", kv = "affine:9,64" }', "models.one.drafter.kv: --drafter-kv 'affine:9"),
        ('drafter = { folder = "b", kv = 8 }', "models.one.drafter.kv: must be a text, not 8"),
        (
            'drafter = { path = "/b?kv=affine:8,64", kv = "affine:4,64" }',
            "models.one.drafter: kv is affine:4,64, and path /b?kv=affine:8,64 says it too; give one of them",
        ),
        (
            'engine = "mlx-lm-speculative"\ndrafter = { folder = "b", kv = "affine:8,64" }',
            "models.one: the engine mlx-lm-speculative keeps its drafter's keys and values itself, not as a",
        ),
        (
            'engine = "mlx-lm-speculative"\ndrafter = { path = "/b?kv=affine:8,64" }',
            "models.one: the engine mlx-lm-speculative keeps its drafter's keys and values itself, not as /",
        ),
        ('drafter = { folder = "b", lookups = 1 }', "models.one.drafter.lookups: must be of type boolean"),
        ('channels = "native"', "models.one.channels: must be a list of names of channels"),
        ("channels = [1]", "models.one.channels: there is no KV channel 1; there are native"),
        ('channels = ["native", "native"]', "models.one.channels: must be a list of names of channels, none"),
        ('channels = ["fast"]', "models.one.channels: there is no KV channel 'fast'; there are native"),
        (
            'default_channel = "affine8"',
            "models.one: default_channel affine8 is none of its channels: native",
        ),
        ("chat_template_kwargs = 1", "models.one.chat_template_kwargs: must be of type object, got 1"),
        ("chat_template_kwargs = { a = [1] }", "models.one.chat_template_kwargs.a"),
        ('chat_template_kwargs = { "a b" = 1 }', "models.one.chat_template_kwargs.a b"),
        ("facts = 1", "models.one.facts: must be of type object"),
        ("facts.colour = 1", "models.one.facts: unknown field 'colour'"),
        ("facts.target = { layers = 1 }", "models.one.facts.target: lacks 'hidden_size', "),
        (FACTS.replace("[16]", "[]"), "models.one.facts.target.head_dims: has fewer than 1 entries"),
        ("facts.drafter = { block = 8 }", "models.one: block and facts.drafter need a drafter"),
        (
            "facts.drafter = { target_layers = [-1] }",
            "models.one.facts.drafter.target_layers[0]: must be at least 0, got -1",
        ),
        ("facts.drafter = { depth = 1 }", "models.one.facts.drafter: unknown field 'depth'"),
    ],
)
def test_a_wrong_line_is_refused_by_file_model_and_key(tmp_path: Path, lines: str, said: str):
    assert refusal(tmp_path, with_model(lines)).startswith(f": {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": lacks 'default', 'models'"),
        ("default = 1", ": default: must be of type string, got 1"),
        (MINIMAL.replace('default = "one"', 'default = "two"'), ": default is 'two', which is no model"),
        (MINIMAL.replace('default = "one"', 'default = "one@native"'), ": default is"),
        ('default = "one"\nmodels = 3', ": models: must be of type object, got 3"),
        ('default = "one"\nmodels.one = 3', ": models.one: must be of type object, got 3"),
        (f'version = 2\n{MINIMAL}', ": unknown field 'version'"),
        ('default = "one"\n[models.one]', ": models.one: lacks 'summary', 'target'"),
        (MINIMAL.replace('"shipped"', '"prompt-lookup"'), ": models.one.target: must be"),
        (MINIMAL.replace("models.one", 'models."a@b"'), ": models.a@b"),
        (MINIMAL.replace("models.one", "models.One"), ": models.One"),
        (MINIMAL.replace("models.one", 'models."-a"'), ": models.-a"),
        (MINIMAL + MINIMAL, " is not TOML: "),
        ("\0", " is not TOML: "),
        ("default = " + "[" * 100_000, " is not TOML: "),
        ("#" * 2**20 + "\n", " has more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_registry_is_refused(tmp_path: Path, text: str, said: str):
    assert refusal(tmp_path, text).startswith(said)


def test_a_file_defines_channels_for_the_models_that_list_them_or_list_none(tmp_path: Path):
    text = """
        default = "a"
        [channels.fine]
        kv = "lattice:e8,200@inner:1"
        description = "a finer lattice"
        [models.a]
        summary = "lists none"
        target = "shipped"
        [models.b]
        summary = "lists it"
        target = "shipped"
        channels = ["affine8", "fine"]
        default_channel = "fine"
        [models.c]
        summary = "lists others"
        target = "shipped"
        channels = ["native"]
    """
    registry = Registry.load(write(tmp_path, text))
    assert [list(entry.channels) for entry in registry.entries] == [
        ["native", "fine"],
        ["affine8", "fine"],
        ["native"],
    ]
    _, channel = registry.resolve("a@fine")
    assert (channel.name, channel.policy.spec) == ("fine", "lattice:e8,200@inner:1")
    assert registry.resolve("b")[1] == channel
    with pytest.raises(ConfigurationError, match="the model c does not offer the KV channel fine"):
        registry.resolve("c@fine")
    assert "| `fine` | `lattice:e8,200@inner:1` | a finer lattice |" in registry_markdown(registry)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('[channels.fine]\nkv = "lattice:x9,1"', "channels.fine.kv: --kv 'lattice:x9,1': 'x9' is no lattice"),
        ("[channels.fine]\nkv = 8", "channels.fine.kv: must be a text, not 8"),
        ("[channels.fine]\n", "channels.fine: lacks 'kv'"),
        ('[channels.fine]\nkv = "native"\nbits = 8', "channels.fine: unknown field 'bits'"),
        ('[channels."a:b"]\nkv = "native"', "channels.a:b"),
        ('[channels.fine]\nkv = "native"\nname = "bar"', "channels: fine: unknown field 'name'"),
        (
            '[channels.r]\nkv = "restored:exact:4,64"',
            "channels.r.kv: 'restored:exact:4,64' is a policy of generate and eval, not",
        ),
        ('[channels.affine8]\nkv = "affine:4,64"', "channels: affine8 is built in; choose another name"),
        (
            '[requests]\nkv = ["restored:exact"]',
            "requests.kv[0]: 'restored:exact' holds no policy",
        ),
        ('[requests]\nkv = ["affine:2..9,64"]', "requests.kv[0]: --kv 'affine:9,64': BITS must be one of"),
        ('[requests]\nkv = ["sink-window:4,64..8"]', "requests.kv[0]: 'sink-window:4,64..8' holds no policy"),
        ('[requests]\nkv = "affine"', "requests.kv: "),
    ],
)
def test_a_wrong_channel_or_range_is_refused_by_key_and_value(tmp_path: Path, lines: str, said: str):
    assert refusal(tmp_path, f"{MINIMAL}{lines}\n").startswith(f": {said}")


REQUESTS = '[requests]\nkv = ["lattice:e8,8..64@inner:0..3", "sink-window:4,64..512", "affine:8,32"]\n'


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("lattice:e8,10", "lattice:e8,10@inner:2"),
        ("lattice:e8,64@inner:0", "lattice:e8,64@inner:0"),
        ("sink-window:4,64", "sink-window:4,64@all"),
        ("affine:8,32", "affine:8,32@all"),
    ],
)
def test_requests_spell_out_policies_within_the_owners_ranges(tmp_path: Path, text: str, spec: str):
    registry = Registry.load(write(tmp_path, MINIMAL + REQUESTS))
    for asked in ((f"one@{text}", None), ("one", text)):
        _, channel = registry.resolve(*asked)
        assert (channel.name, channel.policy) == (spec, parse_policy(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "lattice:e8,65",
            "may not ask for the KV policy lattice:e8,65@inner:2; it offers native; .*e8,8..64",
        ),
        ("lattice:d4,10", "may not ask for the KV policy lattice:d4,10"),
        ("lattice:e8,10@all", "may not ask for the KV policy lattice:e8,10@all"),
        ("lattice:e8,10@inner:4", "may not ask for"),
        ("sink-window:5,64", "may not ask for"),
        ("affine:8,64", "may not ask for"),
        ("restored:exact", "may not ask for"),
        ("lattice:e8,0", "KV policy 'lattice:e8,0': Q must be one of 1 to 1023, not 0"),
        ("zip:1,2", "KV policy 'zip:1,2': 'zip' is none of native"),
    ],
)
def test_policies_beyond_the_ranges_are_refused_with_what_is_allowed(tmp_path: Path, text: str, said: str):
    registry = Registry.load(write(tmp_path, MINIMAL + REQUESTS))
    with pytest.raises(ConfigurationError, match=said):
        registry.resolve("one", text)


@pytest.mark.parametrize(
    ("allowed", "asked", "spec"),
    [
        ("full-kv", "full-kv", "full-kv"),
        ("affine:2..8,64", "affine", "affine:4,64@all"),
        ("lattice:e8,38@inner:0..2", "lattice@inner:1", "lattice:e8,38@inner:1"),
    ],
)
def test_policies_without_parameters_are_found_in_the_ranges(
    tmp_path: Path, allowed: str, asked: str, spec: str
):
    registry = Registry.load(write(tmp_path, f'{MINIMAL}[requests]\nkv = ["{allowed}"]\n'))
    for request in ((f"one@{asked}", None), ("one", asked)):
        assert registry.resolve(*request)[1].policy.spec == spec
    with pytest.raises(ConfigurationError, match="does not offer the KV channel sink-window-256"):
        registry.resolve("one", "sink-window-256")


def test_a_channel_of_the_file_is_never_read_as_a_policy(tmp_path: Path):
    text = f'{MINIMAL}channels = ["native"]\n[channels.affine]\nkv = "affine:8,32"\n'
    registry = Registry.load(write(tmp_path, f'{text}[requests]\nkv = ["affine:2..8,64"]\n'))
    with pytest.raises(ConfigurationError, match="does not offer the KV channel affine"):
        registry.resolve("one", "affine")


def test_without_ranges_no_policy_may_be_spelt_out(tmp_path: Path):
    registry = Registry.load(write(tmp_path, MINIMAL))
    with pytest.raises(ConfigurationError, match="requests may ask for none"):
        registry.resolve("one", "affine:8,64")


TOKENS = re.findall(r"[\w.-]+|\s+|.", SHIPPED_FILE.read_text(encoding="utf-8"))


@given(
    at=st.integers(0, len(TOKENS) - 1),
    dropped=st.integers(0, 3),
    put=st.one_of(st.sampled_from([*'[]{}="@\n', "-1", "nan", "1979-05-27", "demo"]), st.text(max_size=4)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_registry_is_read_or_refused(at: int, dropped: int, put: str, tmp_path: Path):
    """Nothing but an error of ours, on one line, whatever a slip of the hand leaves in the file."""
    text = "".join([*TOKENS[:at], put, *TOKENS[at + dropped :]])
    path = write(tmp_path, text.encode(errors="replace").decode())
    message = ""
    try:
        Registry.load(path)
    except InputError as error:
        message = str(error)
    assert message.count("\n") == 0


def test_a_path_that_is_no_file_is_refused_and_a_pipe_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, said in (("absent", "is not a file"), ("", "is not a file"), ("pipe", "is not a file")):
        with pytest.raises(ConfigurationError, match=said):
            Registry.load(tmp_path / name)
    with pytest.raises(ConfigurationError, match="is not TOML"):
        Registry.load(tmp_path / "bytes")


def test_a_target_has_channels_instead_of_a_policy(tmp_path: Path):
    text = MINIMAL.replace('"shipped"', '{ folder = "m", kv = "affine:8,64" }')
    assert refusal(tmp_path, text).startswith(": models.one.target: kv 'affine:8,64' is of drafters; name")


def test_two_models_cannot_be_looked_for_in_one_place(tmp_path: Path):
    text = MINIMAL + '[models.a]\nsummary = "a"\ntarget = { folder = "m.1", hub = "a/b" }\n'
    other = '[models.b]\nsummary = "b"\ntarget = { folder = "m-1", hub = "a/c" }\n'
    message = refusal(tmp_path, text + other)
    assert message.startswith(
        ": a/b and a/c would both be looked for in KAKEYA_MODEL_M_1; give them folders of other names"
    )
    same = text + other.replace("m-1", "m.1").replace("a/c", "a/b")
    Registry.load(write(tmp_path, same + 'drafter = { folder = "m.1", hub = "a/b", kv = "affine:8,64" }\n'))


def test_an_entry_whose_drafter_is_for_another_target_is_refused(tmp_path: Path):
    facts = "{ hidden_size = 32, target_layers = [1, 6], mask_token = 512 }"
    drafter = f'drafter = "shipped"\nfacts.drafter = {facts}\n'
    message = refusal(tmp_path, with_model(FACTS + drafter), DrafterMismatchError)
    assert message == (
        ": the drafter shipped was not made for the target shipped: hidden size 32 in the drafter, 64 in the "
        "target; it reads layer 6 of a target with 6 layers; its mask is token 512 of a vocabulary of 512"
    )


def test_an_entry_with_a_channel_that_its_heads_cannot_take_is_refused(tmp_path: Path):
    lines = FACTS.replace("16", "80, 64") + 'channels = ["native", "lattice-e8", "affine4"]'
    message = refusal(tmp_path, with_model(lines))
    assert message.startswith(": the model one: the KV channel affine4 (affine:4,64@all) does not fit: ")
    assert "80 cannot be quantized" in message


def test_a_folder_makes_a_registry_of_its_own(folders: tuple[Path, Path]):
    registry = Registry.single(folders[0], f"prompt-lookup+{folders[1]}", block="6", context=100)
    (entry,) = registry.entries
    assert (registry.default, entry.name) == ("target", "target")
    assert (entry.target, entry.drafter) == (at(folders[0]), at(f"prompt-lookup+{folders[1]}"))
    assert (entry.lookups, entry.block, entry.context) == (False, "6", 100)
    # Heads of 8 values cannot be quantized in groups, and the windows of this model are 8 positions anyway.
    assert list(entry.channels) == [n for n in CHANNELS if not n.startswith(("affine", "rotated", "auto"))]
    assert registry.resolve("target@lattice-e8")[1] is CHANNELS["lattice-e8"]


def test_the_shipped_target_as_a_folder_has_its_drafter_unless_told_otherwise():
    (entry,) = Registry.single(SHIPPED_TARGET).entries
    assert (entry.drafter, entry.lookups) == (SHIPPED, True)
    (entry,) = Registry.single(SHIPPED_TARGET, "none", channel="affine8").entries
    assert (entry.drafter, entry.lookups, entry.default_channel) == (None, False, "affine8")
    (entry,) = Registry.single(SHIPPED_TARGET, str(SHIPPED_DRAFTER)).entries
    assert (entry.drafter, entry.lookups) == (at(SHIPPED_DRAFTER), False)


def test_a_folder_without_drafter_has_look_ups_unless_told_otherwise(folders: tuple[Path, Path]):
    (entry,) = Registry.single(folders[0]).entries
    assert (entry.drafter, entry.lookups) == (at("prompt-lookup"), False)
    (entry,) = Registry.single(folders[0], "none").entries
    assert entry.drafter is None


def test_a_registered_drafter_drafts_for_its_target_where_it_is_here(tmp_path: Path):
    target, drafter = (tmp_path / "kakeya-models" / name for name in ("qwen3-4b", "qwen3-4b-dflash"))
    target.mkdir(parents=True)
    places = Places({}, tmp_path, hub_cache=tmp_path / "hub")
    assert default_drafter(target, places) == "prompt-lookup"
    drafter.mkdir()
    assert default_drafter(target, places) == f"prompt-lookup+{drafter}"
    assert default_drafter(tmp_path, places) == "prompt-lookup"
    assert default_drafter(SHIPPED_TARGET, places) == f"prompt-lookup+{SHIPPED_DRAFTER}"


def test_a_folder_that_cannot_be_served_so_is_refused(folders: tuple[Path, Path], tmp_path: Path):
    with pytest.raises(ModelError, match="is not a folder"):
        Registry.single(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        Registry.single(tmp_path)
    with pytest.raises(UnknownModel, match="there is no KV channel 'fast'"):
        Registry.single(folders[0], channel="fast")
    with pytest.raises(ConfigurationError, match="does not offer the KV channel affine4; it offers native"):
        Registry.single(folders[0], channel="affine4")
    with pytest.raises(ConfigurationError, match="--block must be auto or a number"):
        Registry.single(folders[0], block="many")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen3-4B_4bit", "qwen3-4b-4bit"),
        ("/models/a@b", "a-b"),
        ("/models/.hidden", "hidden"),
        ("/models/Ü", "model"),
        ("/", "model"),
        (f"/c/models--mlx-community--Qwen3-4B-4bit/snapshots/{'0' * 40}", "qwen3-4b-4bit"),
    ],
)
def test_the_name_of_a_folder_is_made_fitting(folder: str, name: str):
    assert fitting_name(Path(folder)) == name
