"""The file as pydantic models, and the names of all fields by place."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, with_config

from layertap.models.sources.check import Place
from layertap.models.spec import EmbeddingSpec, InputSpec, ModelSpec, PreprocessSpec, WarmSpec


class Defaults(BaseModel):
    """What requests get that do not say."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None


class Allow(BaseModel):
    """What may be brought by HTTP."""

    model_config = ConfigDict(extra="forbid")

    sources: list[str] = []
    weights: list[str] = []
    labels: list[str] = []
    args: list[str] = []
    fields: list[Literal["inputs", "preprocess", "warm", "device", "devices", "dtype", "memory_format", "decode"]] = []


with_config(ConfigDict(extra="forbid"))(ModelSpec)  # marks the class, and so what stands in it
SPEC_ADAPTER = TypeAdapter(ModelSpec)


class ConfigFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    models: Annotated[list[ModelSpec], Field(min_length=1)]
    defaults: Defaults = Defaults()
    aliases: dict[str, str] = {}
    allow: Allow | None = None


def _list_fields(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


FIELDS: dict[Place, list[str]] = {
    (): list(ConfigFile.model_fields),
    ("defaults",): list(Defaults.model_fields),
    ("allow",): list(Allow.model_fields),
    ("models", "*"): _list_fields(ModelSpec),
    ("models", "*", "embedding"): _list_fields(EmbeddingSpec),
    ("models", "*", "preprocess"): _list_fields(PreprocessSpec),
    ("models", "*", "inputs", "*"): _list_fields(InputSpec),
    ("models", "*", "warm", "*"): _list_fields(WarmSpec),
}
