"""The jobs, in the order of the table that ``python -m bench.jobs`` prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

from bench.jobs import gradients, interventions, language, pictures, probing
from bench.jobs.lab import Arrays, Lab

Run = Callable[[Lab], Arrays]
PACKAGES = {
    "nnsight": "nnsight",
    "pytorch-grad-cam": "pytorch_grad_cam",
    "torchextractor": "torchextractor",
    "TransformerLens": "transformer_lens",
}  # of tests/peers/requirements.txt; the dev extra has the others


@dataclass(frozen=True)
class Job:
    """What people do, and what they do it with: a library, or torch's own hooks, autograd or torch.func.

    Its functions are ``NAME_by_request`` and ``NAME_by_script`` of a module. ``--only`` takes the name.
    """

    name: str
    title: str
    peer: str
    module: ModuleType

    @property
    def request(self) -> Run:
        """Our side."""
        return vars(self.module)[f"{self.name}_by_request"]

    @property
    def script(self) -> Run:
        """The peer's."""
        return vars(self.module)[f"{self.name}_by_script"]

    @property
    def is_missing(self) -> bool:
        """Whether its peer is not installed."""
        return self.peer in PACKAGES and find_spec(PACKAGES[self.peer]) is None


JOBS = (
    Job("features", "pooled features of 8 blocks, 32 pictures", "torchvision", probing),
    Job("units", "500 units of each stage, 32 pictures", "torchextractor", probing),
    Job("cka", "CKA of ResNet-18 and ViT-tiny, 32 files", "torchvision", probing),
    Job("pca", "principal components of maps of 4 stages", "torchvision", probing),
    Job("atlas", "the strongest pictures of each channel, 100 files", "torchvision", probing),
    Job("logit_lens", "logit lens of the last token, 32 texts", "nnsight", language),
    Job("tuned_lens", "tuned lens of the last token, 32 texts", "transformers", language),
    Job("entropy", "attention's entropy by head, 32 texts", "transformers", language),
    Job("token_gradients", "gradient × embedding, 32 texts", "autograd", language),
    Job("loss_gradients", "gradient × embedding of a loss, 32 texts, BERT", "hooks", language),
    Job("generation", "hidden states of 16 steps of generation, 8 texts", "transformers", language),
    Job("head_ablation", "each of 72 heads ablated", "TransformerLens", interventions),
    Job("mlp_ablation", "MLPs ablated by zeros, means, another text", "hooks", interventions),
    Job("causal_tracing", "causal tracing, 6 blocks by 12 tokens", "hooks", interventions),
    Job("path_patching", "a path from head to head's query patched", "TransformerLens", interventions),
    Job("patching", "the stream patched, 6 blocks by 12 tokens", "TransformerLens", interventions),
    Job("head_patching", "each of 72 heads patched", "TransformerLens", interventions),
    Job("steering", "32 texts steered by a vector", "nnsight", interventions),
    Job("autoencoder", "autoencoder of 2048 features: read, put in, one ablated, 8 texts", "hooks", interventions),
    Job("cams", "eight class activation maps", "pytorch-grad-cam", pictures),
    Job("integrated", "integrated gradients from 3 baselines", "captum", pictures),
    Job("attribution", "guided backpropagation, saliency, occlusion", "captum", pictures),
    Job("receptive_field", "a neuron's gradient, 8 pictures", "autograd", pictures),
    Job("rollout", "attention rollout, 32 pictures", "transformers", pictures),
    Job("inversion", "a picture from features, 16 steps", "autograd", pictures),
    Job("dream", "DeepDream, one step", "autograd", pictures),
    Job("detector", "layers of Faster R-CNN, 8 pictures", "hooks", pictures),
    Job("style", "the gradient of a style's loss", "torchvision", gradients),
    Job("sample_gradients", "norms of gradients and Fisher diagonal, 32 pictures", "torch.func", gradients),
    Job("recurrent", "states of GRU, LSTM and cell, 64 sequences of 32 steps", "hooks", gradients),
)


def count_lines(run: Run) -> int:
    """The lines of a function's body, without imports, comments and empty ones."""
    lines = [line.strip() for line in inspect.getsource(run).splitlines()[1:]]
    return sum(bool(line) and not line.startswith(("from ", "import ", "#")) for line in lines)
