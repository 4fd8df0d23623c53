"""Language models: lenses, attention, and gradients by tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bench.jobs.lab import BLOCKS, Array, Arrays, Lab


def logit_lens_by_request(lab: Lab) -> Arrays:
    layers = [{"layer": block, "tokens": [-1]} for block in BLOCKS]
    states = lab.client.extract([{"tokens": text} for text in lab.prompts], layers, model="gpt2")
    return lab.client.extract(np.concatenate(list(states.values())), "lm_head", model="gpt2", resume=BLOCKS[-1])


def logit_lens_by_script(lab: Lab) -> Arrays:
    found = []
    with torch.no_grad(), lab.traced.trace(torch.tensor(lab.prompts)):
        for block in lab.traced.transformer.h:
            found.append(block.output[:, -1:].save())
    with torch.no_grad():
        return {"lm_head": lab.gpt2.lm_head(lab.gpt2.transformer.ln_f(torch.cat(found))).numpy()}


def tuned_lens_by_request(lab: Lab) -> Arrays:
    layers = [{"layer": name, "tokens": [-1], "project": f"lens{number}"} for number, name in enumerate(BLOCKS[:-1])]
    states = lab.client.extract([{"tokens": text} for text in lab.prompts], layers, model="gpt2")
    return lab.client.extract(np.concatenate(list(states.values())), "lm_head", model="gpt2", resume=BLOCKS[-1])


def tuned_lens_by_script(lab: Lab) -> Arrays:
    with torch.no_grad():
        states = lab.gpt2(torch.tensor(lab.prompts), output_hidden_states=True).hidden_states[1:-1]
        pairs = zip(states, lab.lenses, strict=True)
        moved = [state[:, -1:] @ lens["weight"].T + lens["bias"] for state, lens in pairs]
        return {"lm_head": lab.gpt2.lm_head(lab.gpt2.transformer.ln_f(torch.cat(moved))).numpy()}


def entropy_by_request(lab: Lab) -> Arrays:
    asked = {"layer": "*:attention", "stats": ["entropy"], "by": "head"}
    found = lab.client.extract([{"tokens": text} for text in lab.texts], asked, model="gpt2")
    return {"entropy": np.stack(list(found.values()), 1)[..., 0]}


def entropy_by_script(lab: Lab) -> Arrays:
    found = []
    for text in lab.texts:
        with torch.no_grad():
            layers = torch.stack(lab.gpt2(torch.tensor([text]), output_attentions=True).attentions)[:, 0]
        found.append(torch.special.entr(layers).sum(-1).mean(-1))
    return {"entropy": torch.stack(found).numpy()}


def token_gradients_by_request(lab: Lab) -> Arrays:
    inputs = [{"tokens": text} for text in lab.texts]
    layers = ["transformer.wte", "transformer.wte:grad_output"]
    values, gradients = lab.client.extract(inputs, layers, model="gpt2", objective={"position": -1}).values()
    return {"scores": (values * gradients).sum(-1)}


def token_gradients_by_script(lab: Lab) -> Arrays:
    scores = np.zeros((len(lab.texts), max(map(len, lab.texts))), np.float32)
    for row, text in enumerate(lab.texts):
        embedded = lab.gpt2.transformer.wte(torch.tensor([text])).requires_grad_()
        lab.gpt2(inputs_embeds=embedded).logits[0, -1].max().backward()
        scores[row, : len(text)] = (embedded * embedded.grad).sum(-1)[0].detach()
    return {"scores": scores}


def loss_gradients_by_request(lab: Lab) -> Arrays:
    inputs = [{"tokens": text, "class": label} for text, label in zip(lab.texts, lab.labels, strict=True)]
    words, loss = "bert.embeddings.word_embeddings", {"kind": "cross_entropy"}
    layers = [{"layer": words, "as": "value"}, {"layer": f"{words}:grad_output", "as": "gradient"}]
    found = lab.client.extract(inputs, layers, model="bert", objective=loss)
    pairs = [(found[f"value.input{row}"], found[f"gradient.input{row}"]) for row in range(len(inputs))]
    return {f"text{row}": (value * gradient).sum(-1) for row, (value, gradient) in enumerate(pairs)}


def loss_gradients_by_script(lab: Lab) -> Arrays:
    found: dict[str, Array] = {}
    kept: list[Tensor] = []
    words = lab.bert.bert.embeddings.word_embeddings
    handle = words.register_forward_hook(lambda module, args, output: kept.append(output.requires_grad_()))
    for row, (text, label) in enumerate(zip(lab.texts, lab.labels, strict=True)):
        lab.bert(torch.tensor([text]), labels=torch.tensor([label])).loss.backward()
        found[f"text{row}"] = (kept[row] * kept[row].grad).sum(-1).detach().numpy()
    handle.remove()
    return found


def generation_by_request(lab: Lab) -> Arrays:
    inputs, options = [{"tokens": text} for text in lab.prompts[:8]], {"steps": 16, "stop": []}
    layers = [".[tokens]", {"layer": f"{BLOCKS[3]}#*", "tokens": [-1]}]
    tokens, *states = lab.client.extract(inputs, layers, model="gpt2", generate=options).values()
    return {"tokens": tokens, "states": np.concatenate(states, 1)}


def generation_by_script(lab: Lab) -> Arrays:
    kept = dict.fromkeys(("output_hidden_states", "return_dict_in_generate"), True)
    rows, options = torch.tensor(lab.prompts[:8]), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    found = lab.gpt2.generate(rows, attention_mask=torch.ones_like(rows), **options, **kept)
    states = [step[4][:, -1:] for step in found.hidden_states]  # the first are embeddings
    return {"tokens": found.sequences[:, rows.shape[1] :].numpy(), "states": torch.cat(states, 1).numpy()}
