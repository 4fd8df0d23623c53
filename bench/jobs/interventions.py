"""Changes inside a language model: ablation, patching, steering, sparse autoencoders."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.jobs.lab import BLOCKS, HEADS, WIDTH, Arrays, Lab

SENDER, RECEIVER = (1, 2), (3, 4)  # block and head
MLPS = [f"{block}.mlp" for block in BLOCKS]


def head_ablation_by_request(lab: Lab) -> Arrays:
    text = {"tokens": lab.clean}
    found = lab.client.sweep(text, "*:attention", "zero", each="head", objective=lab.metric, model="gpt2")
    return {"effects": np.concatenate([found[f"{block}.attn:attention"] for block in BLOCKS])}


def head_ablation_by_script(lab: Lab) -> Arrays:
    def ablate(value: Tensor, hook: Any, head: int) -> Tensor:
        value[:, :, head] = 0
        return value

    found = np.empty((len(BLOCKS), HEADS), np.float32)
    for layer, head in np.ndindex(found.shape):
        hooks = [(f"blocks.{layer}.attn.hook_z", partial(ablate, head=head))]
        found[layer, head] = lab.measure(lab.lens.run_with_hooks(torch.tensor([lab.clean]), fwd_hooks=hooks))
    return {"effects": found}


def mlp_ablation_by_request(lab: Lab) -> Arrays:
    texts = [{"tokens": lab.clean}, {"tokens": lab.corrupt}]
    means = lab.client.extract(texts[0], MLPS, model="gpt2", pool="mean")
    changes = [{"op": "replace", "tensor": means[mlp][0]} for mlp in MLPS] + [{"op": "zero"}] * len(MLPS)
    changes += [{"op": "replace", "from": {"input": 1}}] * len(MLPS)
    edits = [{"layer": mlp, **change} for mlp, change in zip(MLPS * 3, changes, strict=True)]
    rows = [*texts, *({"input": 0, "interventions": [edit]} for edit in edits)]
    logits = lab.client.extract(rows, {"layer": "lm_head", "tokens": [-1]}, model="gpt2")["lm_head"]
    return dict(zip(("mean", "zero", "resampled"), lab.measure(logits[2:]).reshape(3, -1), strict=True))


def mlp_ablation_by_script(lab: Lab) -> Arrays:
    kept: list[Tensor] = []
    blocks = lab.gpt2.transformer.h
    handles = [block.mlp.register_forward_hook(lambda module, args, output: kept.append(output)) for block in blocks]
    with torch.no_grad():
        lab.gpt2(torch.tensor([lab.clean, lab.corrupt]))
    for handle in handles:
        handle.remove()
    found = {name: np.empty(len(blocks), np.float32) for name in ("mean", "zero", "resampled")}
    for number, block in enumerate(blocks):
        clean, corrupt = kept[number]
        for name, value in {"mean": clean.mean(0), "zero": 0 * clean, "resampled": corrupt}.items():
            handle = block.mlp.register_forward_hook(lambda module, args, output, value=value: value.expand_as(output))
            with torch.no_grad():
                found[name][number] = lab.measure(lab.gpt2(torch.tensor([lab.clean])).logits)
            handle.remove()
    return found


def causal_tracing_by_request(lab: Lab) -> Arrays:
    noise = {"layer": "transformer.wte", "op": "noise", "std": 3, "tokens": [2, 3]}
    inputs = [{"tokens": lab.clean}, {"input": 0, "interventions": [noise]}]
    found = lab.client.sweep(inputs, BLOCKS, "replace", each="token", source=0, objective=lab.metric, model="gpt2")
    return {"effects": np.stack([found[block][1] for block in BLOCKS])}


def causal_tracing_by_script(lab: Lab) -> Arrays:
    kept: list[Tensor] = []
    blocks, tokens = lab.gpt2.transformer.h, torch.eye(len(lab.clean), dtype=torch.bool)[..., None]
    noise = torch.zeros(len(lab.clean), WIDTH)
    noise[2:4] = 3 * torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    handles = [block.register_forward_hook(lambda module, args, output: kept.append(output)) for block in blocks]
    with torch.no_grad():
        lab.gpt2(torch.tensor([lab.clean]))
    for handle in handles:
        handle.remove()
    corrupting = lab.gpt2.transformer.wte.register_forward_hook(lambda module, args, output: output + noise)
    found = []
    for block, clean in zip(blocks, kept, strict=True):

        def patch(module: Any, args: Any, output: Tensor, clean: Tensor = clean) -> Tensor:
            return torch.where(tokens, clean, output)

        handle = block.register_forward_hook(patch)
        with torch.no_grad():
            found.append(lab.measure(lab.gpt2(torch.tensor([lab.clean] * len(tokens))).logits))
        handle.remove()
    corrupting.remove()
    return {"effects": torch.stack(found).numpy()}


def path_patching_by_request(lab: Lab) -> Arrays:
    heads, queries = "transformer.h.*.attn.c_proj:input", f"{BLOCKS[RECEIVER[0]]}.attn/split#0[0]"
    sender = f"{BLOCKS[SENDER[0]]}.attn.c_proj:input"
    frozen = {"layer": heads, "op": "replace", "from": {"input": 0}}
    sent = {"layer": sender, "heads": [SENDER[1]], "op": "replace", "from": {"input": 1}}
    received = {"layer": queries, "heads": [RECEIVER[1]], "op": "replace", "from": {"input": 2}}
    paths = [{"input": 0, "interventions": edits} for edits in ([frozen, sent], [received])]
    texts, last = [{"tokens": lab.clean}, {"tokens": lab.corrupt}], {"layer": "lm_head", "tokens": [-1]}
    return {"logits": lab.client.extract([*texts, *paths], last, model="gpt2")["lm_head"][3, 0]}


def path_patching_by_script(lab: Lab) -> Arrays:
    _, corrupt = lab.lens.run_with_cache(torch.tensor([lab.corrupt]))
    _, clean = lab.lens.run_with_cache(torch.tensor([lab.clean]))
    query = f"blocks.{RECEIVER[0]}.attn.hook_q"

    def freeze(value: Tensor, hook: Any) -> Tensor:
        value[:] = clean[hook.name]
        if hook.layer() == SENDER[0]:
            value[:, :, SENDER[1]] = corrupt[hook.name][:, :, SENDER[1]]
        return value

    def patch(value: Tensor, hook: Any) -> Tensor:
        value[:, :, RECEIVER[1]] = received[query][:, :, RECEIVER[1]]
        return value

    lab.lens.reset_hooks()
    for layer in range(RECEIVER[0]):
        lab.lens.add_hook(f"blocks.{layer}.attn.hook_z", freeze)
    _, received = lab.lens.run_with_cache(torch.tensor([lab.clean]), names_filter=query)
    lab.lens.reset_hooks()
    return {"logits": lab.lens.run_with_hooks(torch.tensor([lab.clean]), fwd_hooks=[(query, patch)])[0, -1].numpy()}


def patching_by_request(lab: Lab) -> Arrays:
    inputs = [{"tokens": lab.clean}, {"tokens": lab.corrupt}]
    streams = [f"{block}[0]:input" for block in BLOCKS]
    found = lab.client.sweep(inputs, streams, "replace", each="token", source=0, objective=lab.metric, model="gpt2")
    return {"effects": np.stack([found[stream][1] for stream in streams])}


def patching_by_script(lab: Lab) -> Arrays:
    from transformer_lens.patching import get_act_patch_resid_pre

    _, cache = lab.lens.run_with_cache(torch.tensor([lab.clean]))
    return {"effects": get_act_patch_resid_pre(lab.lens, torch.tensor([lab.corrupt]), cache, lab.measure).numpy()}


def head_patching_by_request(lab: Lab) -> Arrays:
    inputs, heads = [{"tokens": lab.clean}, {"tokens": lab.corrupt}], "*.attn.c_proj:input"
    found = lab.client.sweep(inputs, heads, "replace", each="head", source=0, objective=lab.metric, model="gpt2")
    return {"effects": np.stack([found[f"{block}.attn.c_proj:input"][1] for block in BLOCKS])}


def head_patching_by_script(lab: Lab) -> Arrays:
    from transformer_lens.patching import get_act_patch_attn_head_out_all_pos

    _, cache = lab.lens.run_with_cache(torch.tensor([lab.clean]))
    found = get_act_patch_attn_head_out_all_pos(lab.lens, torch.tensor([lab.corrupt]), cache, lab.measure)
    return {"effects": found.numpy()}


def steering_by_request(lab: Lab) -> Arrays:
    change = {"layer": BLOCKS[3], "op": "add", "tensor": lab.vector}
    inputs = [{"tokens": text} for text in lab.texts]
    last = {"layer": "lm_head", "tokens": [-1]}
    return {"logits": lab.client.extract(inputs, last, model="gpt2", interventions=[change])["lm_head"][:, 0]}


def steering_by_script(lab: Lab) -> Arrays:
    found = []
    for text in lab.texts:
        with torch.no_grad(), lab.traced.trace(torch.tensor([text])):
            lab.traced.transformer.h[3].output[:] += lab.vector
            found.append(lab.traced.output.logits[0, -1].save())
    return {"logits": torch.stack(found).numpy()}


def autoencoder_by_request(lab: Lab) -> Arrays:
    encode, row = {"name": "encode", "relu": True}, slice(5, 6)
    feature = {"weight": lab.encode["weight"][row], "bias": lab.encode["bias"][row], "relu": True}
    ablated = {"op": "add", "project": [feature, {"weight": -lab.decode["weight"][:, row]}]}
    edits = [{"layer": BLOCKS[3], **edit} for edit in ({"op": "replace", "project": [encode, "decode"]}, ablated)]
    inputs = [{"tokens": text} for text in lab.prompts[:8]]
    changed = [{"input": text, "interventions": [edit]} for edit in edits for text in range(8)]
    layers = [{"layer": BLOCKS[3], "project": encode, "as": "features"}, {"layer": "lm_head", "tokens": [-1]}]
    found = lab.client.extract(inputs + changed, layers, model="gpt2")
    return {"features": found["features"][:8], "logits": found["lm_head"][8:, 0]}


def autoencoder_by_script(lab: Lab) -> Arrays:
    kept: list[Tensor] = []

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        features = (output @ lab.encode["weight"].T + lab.encode["bias"]).relu()
        kept.append(features[:8])
        spliced = features[8:16] @ lab.decode["weight"].T + lab.decode["bias"]
        ablated = output[16:] - features[16:, :, 5:6] * lab.decode["weight"][:, 5]
        return torch.cat([output[:8], spliced, ablated])

    handle = lab.gpt2.transformer.h[3].register_forward_hook(change)
    with torch.no_grad():
        logits = lab.gpt2(torch.tensor(lab.prompts[:8] * 3)).logits[8:, -1]
    handle.remove()
    return {"features": kept[0].numpy(), "logits": logits.numpy()}
