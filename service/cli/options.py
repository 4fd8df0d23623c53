"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML or JSON file that lists the models.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model name; the configuration's default without it.")]
