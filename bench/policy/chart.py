"""The rules of the simulation beside the batcher as it is, drawn for closed loops of each model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.plot import COLOURS, INK, STYLE
from bench.policy.loads import LOADS
from bench.policy.rules import GROWING, RULES

SHOWN = ("mobilenet", "mobilenet, quick decoding", "resnet50", "vit_b_16")
FIGURES = {"per_s_ratio": "answers a second", "p50_ms_ratio": "p50", "p99_ms_ratio": "p99"}
WIDTH, HEIGHT, BAND = 9.0, 2.1, 0.02  # inches; the share that counts as a tie


def draw(told: Mapping[str, Any], file: Path) -> None:
    """A row of panels for each model: a rule's figures as multiples of those of the batcher as it is, by clients."""
    models = [model for model in SHOWN if model in told["results"]]
    shown_rules = [rule for rule in RULES if rule != GROWING]
    clients = [load for load in LOADS if load.clients and not load.bulk and not load.large]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT * len(models) + 0.8), layout="constrained")
        axes = figure.subplots(len(models), len(FIGURES), sharex=True, squeeze=False)
        for row, model in zip(axes, models, strict=True):
            for axis, (name, title) in zip(row, FIGURES.items(), strict=True):
                axis.axhspan(1 - BAND, 1 + BAND, color=INK, alpha=0.25, linewidth=0)
                for rule, colour in zip(shown_rules, COLOURS, strict=True):
                    rules = [told["results"][model][load.title] for load in clients]
                    points = [figures[rule][name] for figures in rules if rule in figures]
                    axis.plot([load.clients for load in clients][: len(points)], points, color=colour, label=rule)
                axis.set_xscale("log", base=2)
                axis.set_title(f"{model}: {title}", loc="left", fontsize=8)
                axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[-1]:
            axis.set_xticks([load.clients for load in clients], [str(load.clients) for load in clients])
            axis.set_xlabel("clients in closed loop")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        title = f"as a multiple of “{GROWING}”"
        figure.legend(handles, labels, title=title, loc="outside upper right", ncols=len(shown_rules), frameon=False)
        figure.savefig(file, transparent=True, metadata={"Date": None} if file.suffix == ".svg" else None)
