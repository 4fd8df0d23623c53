"""What a server gives for texts of every class of transformers beside the library alone, as a table.

``OMP_NUM_THREADS=1 python -m tests.fidelity.texts_table [CLASS …]`` prints it for `docs/explanation/fidelity.md`: each
class in a process of its own, two at once. A run of all classes writes the names of those that are not equal in every
way to ``results/texts.csv``.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.fidelity.names import write_names
from tests.fidelity.tiny_texts import build, list_classes, run, takes_texts
from tests.oracle import flatten
from tests.server import serving
from tests.service.support import Array, arrays_of, raw, safetensors_of
from tests.transformers_nets import tokenizer

LIMIT_S, AT_ONCE = 240, 2
PADDING = 3
TOLERANCE = 1e-4  # of a tensor's largest value
MAX_ROUNDING = 1e-2  # a model whose float32 is further from its float64 shows nothing
WAYS = ("alone", "padded", "in company", "left-padded", "twice")
Wanted = dict[tuple[str, ...], Tensor]
Outcomes = dict[str, str]


def make_text(tokens: int) -> str:
    """A text of so many words."""
    words = ("a", "cat", "dog", "sat", "on", "the", "mat", "and", "saw", "red")
    return " ".join(words[(7 * place + place // 3) % 10] for place in range(tokens))


TEXT, LONGER, LONGEST = make_text(5), make_text(11), make_text(38)


def measure_gap(found: Mapping[str, Array], wanted: Wanted, start: int = 0) -> float:
    """By how much of a tensor's largest value the worst differs; infinity where one is missing or has another shape.

    Along an axis that is longer in what was found, the text begins at ``start``.
    """
    worst = 0.0
    for path, value in wanted.items():
        key = "." if "." in found and len(wanted) == 1 else _name(path)
        if key not in found:
            return float("inf")
        own = torch.from_numpy(np.ascontiguousarray(found[key])).double()
        for axis, size in enumerate(value.shape):
            if own.ndim == value.ndim and own.shape[axis] >= start + size:
                own = own.narrow(axis, start, size)
        if own.shape != value.shape:
            return float("inf")
        largest = value[value.isfinite()].abs().max() if value.isfinite().any() else torch.ones(())
        same = (value == own) | (value.isnan() & own.isnan())
        gap = torch.where(same, 0.0, (own - value).abs()).nan_to_num(nan=float("inf"))
        worst = max(worst, float(gap.max() / largest.clamp(min=1e-6)))
    return worst


class Asker:
    """Asks a server and the library for the same texts."""

    def __init__(self, client: Any, module: Any, encode: Any) -> None:
        self._client, self._module, self._encode = client, module, encode

    def send(self, *texts: str) -> Any:
        """A reply to texts, with all that the model returns."""
        inputs = [{"text": text} for text in texts]
        return self._client.post("/extract", json={"inputs": inputs, "layers": ["."], "encoding": "base64"})

    def send_padded(self, before: int, behind: int) -> Any:
        """A reply to the ids of a text with padding around them, and their mask."""
        encoded = self._encode(TEXT)
        around = (0, 0), (before, behind)
        arrays = {name: np.pad(encoded[name].numpy(), around) for name in ("input_ids", "attention_mask")}
        return self._client.post(
            "/extract", **raw(safetensors_of(**arrays), "application/x-safetensors", layers=".", format="npz")
        )

    def want(self, text: str) -> Wanted:
        """What the library returns for a text alone."""
        return _list_numbers(run(self._module, dict(self._encode(text))))

    def measure_rounding(self) -> float:
        """How far the library's float32 is from its float64."""
        exact, worst = copy.deepcopy(self._module).double(), 0.0
        for text in (TEXT, LONGER, LONGEST):
            try:
                wanted = _list_numbers(run(exact, dict(self._encode(text))))
            except Exception:  # some take no float64
                return 0.0
            found = {_name(path): value.numpy() for path, value in self.want(text).items()}
            worst = max(worst, measure_gap(found, wanted))
        return worst


def _name(path: tuple[str, ...]) -> str:
    """The key of a tensor that a model returns."""
    return "." + "".join(f"[{part}]" for part in path)


def _list_numbers(value: Any) -> Wanted:
    return {path: tensor for path, tensor in flatten(value).items() if tensor.is_floating_point()}


def judge(asker: Asker) -> Outcomes:
    """The outcome of each way of sending a text."""
    wanted = [asker.want(text) for text in (TEXT, LONGER, LONGEST)]
    replies = {
        "alone": (0, asker.send(TEXT)),
        "padded": (0, asker.send_padded(0, PADDING)),
        "in company": (0, asker.send(TEXT, LONGER, LONGEST)),
        "left-padded": (PADDING, asker.send_padded(PADDING, 0)),
        "twice": (0, asker.send(TEXT)),
    }
    found, rounding = {}, 0.0
    for way, (start, reply) in replies.items():
        if reply.status_code != 200:
            error = reply.json()
            found[way] = f"refused: {(error.get('errors') or [error])[0]['detail']}"
            continue
        parts = _split(arrays_of(reply), len(wanted) if way == "in company" else 1)
        gap = max(measure_gap(part, value, start) for part, value in zip(parts, wanted, strict=False))
        if gap > TOLERANCE:
            rounding = rounding or min(asker.measure_rounding(), MAX_ROUNDING)
        found[way] = "equal" if gap <= max(TOLERANCE, 2 * rounding) else f"different ({gap:.1g})"
    return found


def _split(arrays: Mapping[str, Array], count: int) -> list[dict[str, Array]]:
    """What belongs to each of so many texts."""
    return [
        {key: _select_row(value, place, count) for key, value in arrays.items() if ".input" not in key}
        | {key.removesuffix(f".input{place}"): value for key, value in arrays.items() if key.endswith(f".input{place}")}
        for place in range(count)
    ]


def _select_row(value: Array, place: int, count: int) -> Array:
    """A row of an array, which has as many rows on one axis, or is the same for all."""
    axis = next((axis for axis, size in enumerate(value.shape) if size == count), None)
    return value if count == 1 or axis is None else value.take([place], axis)


def judge_class(name: str) -> Outcomes:
    """The outcomes of a class; else why it can't be built, or is not served."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(name).save_pretrained(folder)
            tokenizer(Path(folder), model_max_length=64)
            module = getattr(transformers, name).from_pretrained(folder).eval()
            encode = partial(transformers.AutoTokenizer.from_pretrained(folder), return_tensors="pt")
            run(module, dict(encode(TEXT)))
        except Exception as error:
            return {"not built": f"{type(error).__name__}: {str(error)[:200]}"}
        spec = ModelSpec("m", f"transformers:{folder}", device="cpu", required=False)
        configuration = Configuration((spec,), "m")
        with serving(configuration, wait=False, deadline_s=LIMIT_S, cpu_threads=1) as live:
            state = {"state": "loading"}
            while state["state"] == "loading":
                time.sleep(0.1)
                state = live.client.get("/models/m").json()
            if state["state"] == "failed":
                return {"not served": state["reason"]}
            return judge(Asker(live.client, module, encode))


def judge_all(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Outcomes]]:
    """Each class in a fork of this process, its outcomes in a file of its own."""
    running: dict[int, str] = {}
    waiting = list(names)
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            if pid := os.fork():
                running[pid] = name
            else:
                _judge_and_leave(name, folder / name)
        pid, _ = os.wait()
        file = folder / running.pop(pid)
        yield file.name, json.loads(file.read_text()) if file.is_file() else {"not built": "takes too long"}


def _judge_and_leave(name: str, file: Path) -> None:
    signal.alarm(LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        file.write_text(json.dumps(judge_class(name)))
    finally:
        os._exit(0)


def make_table(outcomes: Mapping[str, Outcomes]) -> Iterator[str]:
    """How many classes have each outcome of each way, then how many have none."""
    kinds = ("equal", "refused", "different")
    yield f"| a text | {' | '.join(kinds)} |"
    yield "|---|" + "---:|" * len(kinds)
    for way in WAYS:
        counts = Counter(each[way].partition(" ")[0].rstrip(":") for each in outcomes.values() if way in each)
        yield f"| {way} | {' | '.join(str(counts[kind]) for kind in kinds)} |"
    for kind in ("not built", "not served"):
        yield f"\n{sum(kind in each for each in outcomes.values())} classes were {kind}."


def list_names(outcomes: Mapping[str, Outcomes]) -> dict[str, list[str]]:
    """The classes by each outcome that is not equal."""
    names = defaultdict(list)
    for name, each in outcomes.items():
        for way, outcome in each.items():
            if outcome != "equal":
                names[way if way.startswith("not") else f"{way}: {outcome.split(' ')[0].rstrip(':')}"].append(name)
    return names


def main() -> None:
    """Print the table, and each class's outcomes beside it."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    names = sys.argv[1:] or [name for name in list_classes() if takes_texts(name)]
    judge_class("GPT2Model")  # imports once what every class needs
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, outcomes[name] in judge_all(names, Path(folder)):
            sys.stderr.write(f"{json.dumps([name, outcomes[name]])}\n")
    if not sys.argv[1:]:
        write_names("texts", list_names(outcomes))
    sys.stdout.write("\n".join([*make_table(outcomes), ""]))


if __name__ == "__main__":
    main()
