"""The configuration: out of a file, or without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layertap.models.spec import ModelSpec
from layertap.service.config.allowed import Allowed
from layertap.service.config.checks import check_loading
from layertap.service.config.document import read_document
from layertap.service.config.parsing import parse_document


@dataclass(frozen=True)
class Configuration:
    """The configured models, the one that a request without ``model`` gets, and the folder that paths begin at.

    ``aliases`` are further names of models; ``allowed`` is what may be brought by HTTP, None where nothing may.
    """

    models: tuple[ModelSpec, ...]
    default: str
    folder: Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    allowed: Allowed | None = None


def read_configuration(path: Path, *, before_loading: bool = False) -> Configuration:
    """The configuration in a file; a relative checkpoint or directory is looked for beside it.

    With ``before_loading`` also what can't be had is refused, as far as it shows without torch: an architecture, a
    device, a file. ConfigError says what is wrong, each mistake with its line.
    """
    document = read_document(path)
    entries = parse_document(document)
    mistakes = entries.mistakes
    if before_loading:
        mistakes = [*mistakes, *check_loading(entries.specs, mistakes, (path.parent.absolute(), Path.cwd()))]
    document.refuse(mistakes)
    return Configuration(
        tuple(entries.specs.values()), entries.default, path.parent.absolute(), entries.aliases, entries.allowed
    )


def make_default_configuration() -> Configuration:
    """Without a file: the embedded ``digits``, and torchvision's classifiers, loaded when first asked for."""
    from layertap.models.digits import spec
    from layertap.models.sources.build import list_default_architectures

    lazy = (ModelSpec(name=arch, source=f"torchvision:{arch}", load="lazy") for arch in list_default_architectures())
    return Configuration((spec(), *lazy), "digits")
