"""Make the references of `tests/data/mtp`: next-token heads of tiny random weights, run by published code.

    pip install torch==2.8.0 transformers==5.24.0 mlx-vlm==0.7.10
    python scripts/make_mtp_references.py tests/data/mtp

glm4_moe, deepseek_v3 and gemma4_assistant are run by transformers, qwen3_5_moe by mlx-vlm; all in float32.
The configuration in each folder is read. The weights as published are written, and ``golden.npz``: inputs,
and the outputs of one forward over all positions and of one more over the position behind them, on the head's
own output.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, VOCAB, LENGTH, LAYERS = 32, 64, 11, 2  # all but LENGTH as the configurations have them


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Embeddings and hidden states of `LENGTH` positions, and the embedding behind them."""
    drawn = np.random.default_rng(seed)
    shapes = {"embeddings": LENGTH, "hidden": LENGTH, "next_embedding": 1}
    return {name: drawn.standard_normal((1, n, HIDDEN)).astype(np.float32) for name, n in shapes.items()}


def write(folder: Path, weights: dict[str, np.ndarray], golden: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    np.savez(folder / "golden.npz", **golden)


def randomise(model: Any) -> None:
    import torch

    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn_like(value)
            value.copy_(1 + 0.2 * noise if value.ndim == 1 else 0.3 * noise)
        for name, value in model.named_buffers():
            if "e_score_correction_bias" in name:
                value.copy_(0.3 * torch.randn_like(value))


def next_layer(config: dict[str, Any], seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A head behind the last layer, by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(seed)
    settings = {name: value for name, value in config.items() if name != "model_type"}
    main = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    head = MtpModel(main, 1).eval()
    randomise(head.layers)
    golden = inputs(seed)
    embeddings, hidden, following = (torch.from_numpy(golden[n]) for n in golden)
    cache = MtpCache(config=main.config.get_mtp_config())
    places = torch.arange(1, LENGTH + 2)[None]
    with torch.no_grad():
        output = head.forward_layer(0, hidden, places[:, :LENGTH], cache, inputs_embeds=embeddings)
        last = head.forward_layer(0, output[:, -1:], places[:, LENGTH:], cache, inputs_embeds=following)
    golden |= {"output": output.numpy(), "next_output": last.numpy()}
    weights = {}
    for published, value in head.layers[0].state_dict().items():
        name = published.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        array = value.numpy()
        base = f"model.layers.{LAYERS}.{name}"
        if name == "mlp.experts.gate_up_proj":
            for expert, part in enumerate(array):
                for kind, half in zip(("gate_proj", "up_proj"), np.split(part, 2), strict=True):
                    weights[f"model.layers.{LAYERS}.mlp.experts.{expert}.{kind}.weight"] = half
        elif name == "mlp.experts.down_proj":
            for expert, part in enumerate(array):
                weights[f"model.layers.{LAYERS}.mlp.experts.{expert}.down_proj.weight"] = part
        else:
            weights[base] = array
    return weights, golden


def qwen(config: dict[str, Any], seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A Qwen head, by mlx-vlm."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.config import Qwen3_5MTPConfig
    from mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp import Qwen3_5MTPDraftModel

    mx.random.seed(seed)
    head = Qwen3_5MTPDraftModel(Qwen3_5MTPConfig.from_dict({**config, "model_type": "qwen3_5_mtp"}))
    stored = {}
    for name, value in tree_flatten(head.parameters()):
        noise = mx.random.normal(value.shape)
        stored[f"mtp.{name}"] = 0.2 * noise if value.ndim == 1 else 0.3 * noise  # norms: less one
    experts = "mtp.layers.0.mlp"
    halves = [stored.pop(f"{experts}.switch_mlp.{kind}.weight") for kind in ("gate_proj", "up_proj")]
    stored[f"{experts}.experts.gate_up_proj"] = mx.concatenate(halves, axis=-2)
    stored[f"{experts}.experts.down_proj"] = stored.pop(f"{experts}.switch_mlp.down_proj.weight")
    head.load_weights(list(head.sanitize(dict(stored)).items()))
    golden = inputs(seed)
    embeddings, hidden, following = (mx.array(golden[n]) for n in golden)
    caches = head.make_cache()
    output = head._forward_hidden(embeddings, hidden, caches, mx.arange(LENGTH)[None])
    last = head._forward_hidden(following, output[:, -1:], caches, mx.array([[LENGTH]]))
    golden |= {"output": np.array(output), "next_output": np.array(last)}
    return {name: np.array(value) for name, value in stored.items()}, golden


def gemma(config: dict[str, Any], seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A Gemma 4 assistant on keys and values of a target, by transformers; two drafts deep."""
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    torch.manual_seed(seed)
    settings = {name: value for name, value in config.items() if name != "model_type"}
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**settings)).eval()
    randomise(model)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    drawn = np.random.default_rng(seed)
    text = config["text_config"]
    golden = {
        "embeddings": drawn.standard_normal((1, 2, HIDDEN)).astype(np.float32),
        "hidden": drawn.standard_normal((1, 1, HIDDEN)).astype(np.float32),
    }
    states = {}
    for kind, width in (("sliding_attention", text["head_dim"]), ("full_attention", text["global_head_dim"])):
        pair = [drawn.standard_normal((1, 2, LENGTH, width)).astype(np.float32) for _ in range(2)]
        golden |= {f"{kind}_keys": pair[0], f"{kind}_values": pair[1]}
        states[kind] = tuple(torch.from_numpy(each) for each in pair)
    hidden, place = torch.from_numpy(golden["hidden"]), torch.tensor([[LENGTH]])
    for step in range(2):
        embedding = torch.from_numpy(golden["embeddings"][:, step : step + 1])
        with torch.no_grad():
            out = model(
                inputs_embeds=torch.cat([embedding, hidden], dim=-1),
                position_ids=place,
                attention_mask=None,
                shared_kv_states=states,
            )
        hidden = out.last_hidden_state
        golden |= {f"output_{step}": hidden.numpy(), f"logits_{step}": out.logits.numpy()}
    weights = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return weights, golden


def main() -> None:
    folder = Path(sys.argv[1])
    makers = {"glm4_moe": next_layer, "deepseek_v3": next_layer, "qwen3_5_moe": qwen}
    makers |= {"gemma4_assistant": gemma, "gemma4_assistant_ordered": gemma}
    for seed, (name, make) in enumerate(makers.items(), 1):
        write(folder / name, *make(json.loads((folder / name / "config.json").read_text()), seed))


if __name__ == "__main__":
    main()
