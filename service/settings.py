"""Every setting, from ``LAYERTAP_…`` variables; flags of the command line override them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

KIB, MIB = 2**10, 2**20
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")  # never percent-encoded
MOST_REPLICAS = 8  # Python runs one thread at a time between operations
LIMITS = (  # settings that clients are told, to keep within
    *("max_inputs", "max_body_bytes", "body_timeout_s", "max_pixels", "max_resized_pixels", "max_json_depth"),
    *("max_results", "max_reply_bytes", "max_queue_rows", "max_queue_bytes", "deadline_s"),
)
Keys = Annotated[tuple[str, ...], NoDecode]
Hosts = Annotated[tuple[str, ...], NoDecode]
LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stripped(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in map(str.strip, texts) if text)


def _read(file: Path) -> tuple[str, ...]:
    keys = _stripped(file.read_text("utf-8-sig").splitlines())
    if not keys:  # who names a file wants keys asked for
        raise ValueError(f"there is no key in {file}")
    return keys


class Settings(BaseSettings):
    """What an operator may set; sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix="LAYERTAP_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    config: Path | None = None
    log_level: Annotated[LogLevel, BeforeValidator(lambda value: str(value).lower())] = "info"
    log_format: Annotated[LogFormat, BeforeValidator(lambda value: str(value).lower())] = "auto"
    root_path: str = ""
    api_keys_file: Path | None = None
    admin_keys_file: Path | None = None
    api_keys: Keys = Field((), repr=False, validate_default=True)
    admin_keys: Keys = Field((), repr=False, validate_default=True)
    key_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    key_burst: int | None = Field(None, gt=0)
    allow_urls: Hosts = ()
    allow_private_urls: Hosts = ()

    max_head_bytes: int = Field(64 * KIB, ge=KIB)
    head_timeout_s: float = Field(15.0, gt=0, allow_inf_nan=False)
    send_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    max_body_bytes: int = Field(32 * MIB, gt=0)
    body_timeout_s: float = Field(15.0, gt=0, allow_inf_nan=False)
    max_inputs: int = Field(256, gt=0)
    max_pixels: int = Field(50_000_000, gt=0)
    max_resized_pixels: int = Field(4_000_000, gt=0)
    max_json_depth: int = Field(32, gt=0)
    max_results: int = Field(1024, gt=0)
    max_reply_bytes: int = Field(256 * MIB, gt=0)
    max_queue_rows: int = Field(1024, gt=0)
    max_queue_bytes: int = Field(1024 * MIB, gt=0)
    deadline_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    drain_delay_s: float | None = Field(None, ge=0, allow_inf_nan=False)  # None: as long as whoever may look needs
    url_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    max_url_fetches: int = Field(32, gt=0)

    max_batch_rows: int = Field(32, gt=0)
    fixed_batch_rows: int | None = Field(None, gt=0)
    batch_memory_bytes: int | None = Field(None, gt=0)
    cache_dir: Path = Field(Path("~/.cache/layertap"), validate_default=True)
    max_loaded_models: int = Field(8, gt=0)
    cpu_threads: int = Field(default_factory=_cores, gt=0, le=512)
    gpu_streams: int = Field(1, gt=0, le=4)
    replicas: int = Field(default_factory=lambda: min(_cores(), MOST_REPLICAS), gt=0, le=64)

    @field_validator("api_keys", "admin_keys", "allow_urls", "allow_private_urls", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        """Keys and hosts are separated by commas; keys of a file, one a line, come on top."""
        given = _stripped(value.split(",")) if isinstance(value, str) else value
        file = info.data.get(f"{info.field_name}_file")
        return (*given, *_read(file)) if file is not None and isinstance(given, (tuple, list)) else given

    @field_validator("root_path")
    @classmethod
    def _plain(cls, value: str) -> str:
        """A path that is written in one way only: nobody has to guess what a proxy makes of it."""
        names = value.split("/")[1:]
        if value and (value[0] != "/" or any(name in ("", ".", "..") or not PLAIN.issuperset(name) for name in names)):
            raise ValueError("write it like '/features': no '/' at its end, letters, digits and -._~ between")
        return value

    @field_validator("key_burst")
    @classmethod
    def _of_a_rate(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("key_rate") is None:
            raise ValueError("it means nothing without KEY_RATE")
        return value

    @field_validator("cache_dir")
    @classmethod
    def _at_home(cls, value: Path) -> Path:
        return value.expanduser()

    @property
    def guarded(self) -> bool:
        """Whether a key is asked for."""
        return bool(self.api_keys or self.admin_keys)
