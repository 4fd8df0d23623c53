"""The attention of every model type of transformers beside what the library itself returns, as a table.

``python -m tests.fidelity.attention_table [--findings FILE] [TYPE …]`` prints it for `docs/explanation/fidelity.md`.
A run of all types writes their names to ``results/attention.csv``, except those that are equal or not built. Types in
the file of an earlier run are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from layertap.models.errors import LoadError, RequestError
from layertap.models.loaded_model import LoadedModel
from layertap.models.loading import load_model
from layertap.models.planner import make_plan
from layertap.models.selection.selectors import parse_selector
from layertap.models.sources.transformers_inputs import find_modality
from layertap.models.spec import InputSpec, ModelSpec
from tests.fidelity import tiny_transformers
from tests.fidelity.names import write_names
from tests.fidelity.tiny_transformers import CONFIG_MAPPING, SCALES, SHORT, TOKENS, Rows
from tests.models.extraction import extract_plan

TOLERANCE = 1e-5  # weights are at most 1
SECONDS, PROCESSES = 100, 2
OUTCOMES = (
    "different",
    "refused",
    "not offered",
    "random",
    "eager differs",
    "another form",
    "no weights",
    "equal",
    "no attention",
    "not built",
)


@dataclass(frozen=True)
class Wanted:
    """Weights as the library returns them, and the layers that returned just this tensor."""

    label: str
    weights: Tensor
    layers: tuple[str, ...]


class NotBuiltError(Exception):
    """No tiny model of this type, or none that runs."""


def build(kind: str, largest: float) -> tuple[Any, list[Rows]]:
    """A tiny model that runs and the forwards to compare it in, of texts a second with one row padded."""
    first: Exception | None = None
    for module in tiny_transformers.build(CONFIG_MAPPING[kind]):
        for rows in tiny_transformers.make_rows(module):
            state = {name: value.clone() for name, value in module.state_dict().items()}
            try:
                for scale in (each for each in SCALES if each <= largest):
                    module.load_state_dict(state)
                    tiny_transformers.seed_weights(module, scale)
                    if all(
                        bool(each.isfinite().all())
                        for each in _list_tensors(module(**rows))
                        if each.is_floating_point()
                    ):
                        break
                else:
                    raise NotBuiltError("numbers are not finite")
            except Exception as error:
                first = first or error
                if "required positional argument" in str(error):
                    raise NotBuiltError(str(error).partition(" missing ")[2]) from error
                continue
            return module, [rows, *_pad(rows)]
    raise NotBuiltError(f"{type(first).__name__}: {str(first)[:100]}")


def _pad(rows: Rows) -> Iterator[Rows]:
    if "attention_mask" in rows and rows["attention_mask"].shape == rows.get("input_ids", torch.empty(0)).shape:
        mask = rows["attention_mask"].clone()
        mask[1, SHORT:] = 0
        yield {**rows, "attention_mask": mask, "input_ids": rows["input_ids"] * mask}


def _list_tensors(value: object) -> list[Tensor]:
    return [
        info
        for info in torch.utils._pytree.tree_leaves(dict(value) if isinstance(value, Mapping) else value)
        if isinstance(info, Tensor)
    ]


def ask_library(folder: Path, architecture: type[Any], rows: Rows) -> list[Wanted]:
    """The eager attention of a saved model: what its output has of it, what its attention layers return beside that."""
    module = architecture.from_pretrained(folder, attn_implementation="eager").eval()
    returned: list[tuple[str, Tensor]] = []

    def note(name: str, part: nn.Module) -> Any:
        kind = type(part).__name__.lower()
        is_attention = "attention" in kind or "attn" in kind

        def hook(_: nn.Module, args: object, output: object) -> None:
            for place, each in enumerate(output if isinstance(output, tuple) else ()):
                if isinstance(each, Tensor) and each.ndim >= 3:
                    returned.append((name if place and is_attention else f"?{name}", each))

        return part.register_forward_hook(hook)

    for name, part in module.named_modules():
        note(name, part)
    try:
        output = module(**rows, output_attentions=True)
    except TypeError:
        output = module(**rows)
    wanted = []
    for label, weights in _list_attentions(output):
        layers = tuple(name.lstrip("?") for name, each in returned if each is weights)
        wanted.append(Wanted(label, weights, layers))
    for name, each in returned:
        if not name.startswith("?") and not any(each is known.weights for known in wanted) and _is_weights(each):
            wanted.append(Wanted(name, each, tuple(other.lstrip("?") for other, same in returned if same is each)))
    return wanted


def _list_attentions(value: object, label: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _list_attentions(each, name if "attention" in name else label)
    elif isinstance(value, (tuple, list)):
        for place, each in enumerate(value):
            yield from _list_attentions(each, f"{label}[{place}]" if label else "")
    elif isinstance(value, Tensor) and label and value.ndim >= 3:
        yield label, value


def _is_weights(value: Tensor) -> bool:
    """Whether a tensor that a layer returns looks like weights, in place of keys, values or a bias."""
    return (
        value.ndim >= 3
        and bool(value.any())
        and bool(((value >= 0) & (value <= 1 + TOLERANCE)).all())
        and bool((value.sum(-1) <= 1 + TOLERANCE * 10).all())
    )


def load(folder: Path, module: Any, rows: Rows) -> LoadedModel:
    """The model as a user has it: of texts and pictures without a word more, else with its inputs named."""
    names = {"text": {"input_ids", "attention_mask"}, "pictures": {"pixel_values"}}
    names["both"] = names["text"] | names["pictures"]
    plain = rows.keys() == names.get(find_modality(module), set()) & (rows.keys() | {"pixel_values", "input_ids"})
    specs = tuple(_specify(name, value) for name, value in rows.items())
    for inputs in (None, specs) if plain else (specs,):
        try:
            return load_model(ModelSpec("m", f"transformers:{folder}", device="cpu", inputs=inputs), threads=1)
        except LoadError:
            if inputs is specs:
                raise
    raise AssertionError


def _specify(name: str, value: Tensor) -> InputSpec:
    shape = tuple(value.shape[1:])
    if value.is_floating_point():
        return InputSpec(name, shape)
    values = (1, 2) if name == "attention_mask" else TOKENS if name != "bbox" else None
    return InputSpec(name, shape, "int64", values=values)


def ask_layertap(model: LoadedModel, rows: Rows) -> dict[str, Tensor]:
    """All attention, by layer."""
    rows = {spec.name: rows[spec.name] for spec in model.inputs}
    catalog = model.catalogs.survey(tuple(tuple(rows[spec.name].shape[1:]) for spec in model.inputs))
    if not any(layer.has_attention for layer in catalog.layers.values()):
        return {}
    plan = make_plan([parse_selector("*#*:attention")], catalog)
    found = extract_plan(model, rows, plan, catalog, 8)
    return {result.capture.point.text: found[result.capture].values for result in plan.results}


def compare(wanted: list[Wanted], found: Mapping[str, Tensor], mask: Tensor | None) -> Iterator[tuple[str, str]]:
    """Outcome and detail for each of the library's weights."""
    for each in wanted:
        near = {key: value for key, value in found.items() if _is_near(key.partition("#")[0], each.layers[:1])}
        near = near or ({} if each.layers else dict(found))
        if not near:
            yield "not offered", f"{each.label} of {each.layers}"
            continue
        distances = {key: _measure(each.weights, value, mask) for key, value in near.items()}
        best = min(distances, key=lambda key: distances[key])
        if distances[best] <= TOLERANCE:
            yield "equal", ""
        elif any(_measure(form, value, mask) <= TOLERANCE for form, value in _list_forms(each.weights, near.values())):
            yield "another form", ""
        elif not torch.allclose(each.weights.float().sum(-1), torch.ones(()), atol=1e-3):
            yield "no weights", f"{each.label} {tuple(each.weights.shape)}"
        elif distances[best] == inf and not each.layers:
            yield "not offered", f"{each.label} {tuple(each.weights.shape)}, which no layer returned"
        else:
            shapes = f"{tuple(each.weights.shape)} and {tuple(near[best].shape)}"
            yield "different", f"{each.label} {best} by {distances[best]:.2g}, {shapes}"


def _list_forms(wanted: Tensor, found: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What a library may return for weights: scores before the softmax, axes in another order, the average of heads.

    Or those of the first keys alone, where a layer attends to its own and another's together.
    """
    for value in found:
        yield wanted.softmax(-1), value
        yield wanted, value[..., : wanted.shape[-1]]
        if wanted.ndim == value.ndim - 1 == 3:
            yield wanted, value.mean(1)
        if wanted.ndim == value.ndim == 4:
            yield wanted.permute(2, 3, 0, 1), value
            yield wanted, value.mean(1, keepdim=True).expand(value.shape)


def _is_near(layer: str, others: tuple[str, ...]) -> bool:
    return any(f"{layer}.".startswith(f"{other}.") or f"{other}.".startswith(f"{layer}.") for other in others)


def _measure(wanted: Tensor, found: Tensor, mask: Tensor | None) -> float:
    """The largest deviation at queries that are of a text; infinite where shapes do not go together.

    What a model returns may be without a prompt of its own before the text, or without what fills its windows up.
    """
    if wanted.ndim == found.ndim and wanted.shape[:-2] == found.shape[:-2]:
        found = found[..., -wanted.shape[-2] :, -wanted.shape[-1] :]
    if wanted.numel() != found.numel():
        return inf
    difference = (wanted.reshape(found.shape).float() - found.float()).abs()
    if mask is not None and found.ndim == 4 and found.shape[0] == len(mask) and found.shape[2] == mask.shape[1]:
        difference = difference * mask[:, None, :, None]
    return float(difference.max())


def examine(kind: str) -> tuple[str, str]:
    """The outcome for one model type, the worst of all its layers, and what there is to say of it.

    What differs by large weights may only be a kernel's rounding that they enlarge from layer to layer.
    """
    torch.set_num_threads(1)
    for scale in SCALES[:2]:
        outcome, detail = _examine(kind, scale)
        if outcome != "different":
            break
    return outcome, detail


def _examine(kind: str, largest: float) -> tuple[str, str]:
    try:
        module, forwards = build(kind, largest)
    except Exception as error:
        return "not built", str(error).replace("\n", " ")[:160]
    with tempfile.TemporaryDirectory() as folder:
        try:
            module.save_pretrained(folder)
            wanted = [ask_library(Path(folder), type(module), rows) for rows in forwards]
            again = ask_library(Path(folder), type(module), forwards[0])
            pairs = zip(wanted[0], again, strict=True)
            changes = not all(torch.equal(one.weights, other.weights) for one, other in pairs)
            plain = type(module).from_pretrained(folder).eval()
            agrees = all(
                torch.allclose(one, other, rtol=1e-3, atol=1e-3)
                for one, other in zip(
                    _list_tensors(plain(**forwards[0])), _list_tensors(module(**forwards[0])), strict=True
                )
                if one.is_floating_point()
            )
        except Exception as error:
            return "not built", f"saved: {type(error).__name__} {error}".replace("\n", " ")[:160]
        if changes:
            return "random", ""
        try:
            model = load(Path(folder), module, forwards[0])
        except Exception as error:  # a server has a model that failed
            return "refused", f"{type(error).__name__}: {error}"[:300]
        try:
            if model.catalog.crosses_rows:
                forwards = [{name: value[:1] for name, value in rows.items()} for rows in forwards]
                wanted = [ask_library(Path(folder), type(module), rows) for rows in forwards]
            found = [ask_layertap(model, rows) for rows in forwards]
        except RequestError as error:
            return "refused", f"{type(error).__name__}: {error.detail} | {error.hint}"[:300]
    entries: list[tuple[str, str]] = []
    for number, (theirs, ours, rows) in enumerate(zip(wanted, found, forwards, strict=True)):
        mask = rows["attention_mask"] if number else None
        entries += [
            (outcome, f"{'padded: ' if number else ''}{detail}") for outcome, detail in compare(theirs, ours, mask)
        ]
    if not entries:
        return "no attention", f"told: {sorted(found[0])[:4]}" if any(found) else ""
    outcome = min((outcome for outcome, _ in entries), key=OUTCOMES.index)
    if outcome == "different" and not agrees:
        outcome = "eager differs"
    counts = {name: sum(each == name for each, _ in entries) for name in OUTCOMES}
    details = [detail for each, detail in entries if each == outcome and detail]
    return (
        outcome,
        f"{ {name: count for name, count in counts.items() if count} } {len(found[0])} given; {'; '.join(details[:3])}",
    )


def _examine_alone(kind: str) -> tuple[str, str, str]:
    """The same in a process of its own: a tiny model may hang, or take memory for good."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with torch.no_grad():
            try:
                sender.send(examine(kind))
            except BaseException as error:
                sender.send(("different", f"{type(error).__name__}: {error}"[:300]))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()
    try:
        outcome, detail = receiver.recv() if receiver.poll(SECONDS) else ("not built", f"takes longer than {SECONDS} s")
    except EOFError:
        outcome, detail = "not built", "its process died"
    process.kill()
    process.join()
    return kind, outcome, detail


def main() -> None:
    """Print a row for each outcome; keep the names of types whose attention is not the library's."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--findings", type=Path)
    parser.add_argument("types", nargs="*")
    options = parser.parse_args()
    types = options.types or tiny_transformers.list_model_types()
    lines = options.findings.read_text().splitlines() if options.findings and options.findings.exists() else []
    findings: dict[str, tuple[str, str]] = {kind: (outcome, detail) for kind, outcome, detail in map(json.loads, lines)}
    rest = [kind for kind in types if kind not in findings]
    for kind in rest:  # imported once, not in each process
        with suppress(Exception):
            tiny_transformers.find_class(CONFIG_MAPPING[kind])
    gc.freeze()  # what is collected in a process is copied there
    with ThreadPoolExecutor(PROCESSES) as pool:
        for kind, outcome, detail in pool.map(_examine_alone, rest):
            findings[kind] = outcome, detail
            sys.stderr.write(f"{kind}: {outcome} {detail}\n")
            sys.stderr.flush()
            if options.findings:
                with options.findings.open("a") as file:
                    file.write(json.dumps([kind, outcome, detail]) + "\n")
    found: dict[str, list[str]] = defaultdict(list)
    for kind, (outcome, _) in findings.items():
        found[outcome].append(kind)
    if not options.types:
        write_names("attention", {key: names for key, names in found.items() if key not in ("equal", "not built")})
    lines = ["| outcome | model types |", "|---|---:|"]
    lines += [f"| {outcome} | {len(found[outcome])} |" for outcome in OUTCOMES if outcome in found]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
