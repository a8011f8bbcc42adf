"""A real runner holds requests to its owner's policy, and publishes why it refuses."""

from pathlib import Path

from bridge import signing
from bridge.bus.git import Git
from bridge.bus.requests import build
from tests.bridge.runner.bench import Bench

POLICY = """
allow_refs = ["mac-bridge/*"]
allow_requesters = ["ann@*", "unsigned"]

[presets.echo.params.word]
maxLength = 5
default = "abc"

[presets.fail]
requesters = ["ann@example.org"]
"""


def test_requests_outside_the_policy_are_refused_and_the_others_served(bench: Bench, tmp_path: Path) -> None:
    bench.policy(POLICY)
    keys = {name: signing.ensure_key(tmp_path / name, name) for name in ("ann", "bob")}
    lines = [
        signing.allowed_line(signing.public_key(key), f"{name}@example.org", signing.REQUEST_NAMESPACE)
        for name, key in keys.items()
    ]
    (bench.config / "allowed_signers").write_text("".join(lines))

    def ask(preset: str, signer: str | None = None, **params: str) -> str:
        manifest = bench.manifest(preset, params=params)
        signature = None
        if signer is not None:
            signature = signing.sign(keys[signer], signing.REQUEST_NAMESPACE, manifest.to_bytes())
        bench.push_commit(manifest, build(Git(bench.house.clone), manifest, signature))
        assert bench.serve_once() == 1
        return manifest.nonce

    assert bench.verdict(ask("echo", word="12345")) == ("passed", "ok")
    assert bench.log(ask("echo")) == "hello from abc\n"
    assert bench.verdict(ask("fail", "ann")) == ("failed", "exit_code")

    refused = {
        "allows less than the preset does": ask("echo", word="123456"),
        "takes no requests of bob@example.org": ask("echo", "bob"),
        "runs fail not for unsigned requests": ask("fail"),
    }
    for words, nonce in refused.items():
        verdict = bench.answer(nonce).result.verdict
        assert (verdict.status.value, verdict.reason.value) == ("refused", "policy")
        assert words in verdict.message
        assert "ann@" not in verdict.message

    bench.policy('allow_refs = ["elsewhere/*"]\n')
    nonce = ask("echo")
    assert bench.verdict(nonce) == ("refused", "policy")
    assert "takes no requests on the branch mac-bridge/" in bench.answer(nonce).result.verdict.message
