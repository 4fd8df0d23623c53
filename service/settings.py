"""Every setting, from ``LAYERTAP_…`` variables; flags of the command line override them."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from layertap.models.errors import LayertapError, find_nearest

PREFIX = "LAYERTAP_"
CLIENT_VARIABLES = frozenset({"URL", "API_KEY"})  # not a server's: where clients find one, and the key that they send
KIB, MIB = 2**10, 2**20
SIZE_UNITS = {
    **dict.fromkeys(("", "b"), 1),
    **{f"{letter}ib": 2**power for letter, power in zip("kmgt", (10, 20, 30, 40), strict=True)},
    **{f"{letter}b": 10**power for letter, power in zip("kmgt", (3, 6, 9, 12), strict=True)},
}
SIZE_PATTERN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")
# What Kubernetes sets in every pod for each service, here for those whose names begin with our own.
SERVICE_LINK = re.compile(r"(?:.+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_[A-Z]+)?)")
SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://.*")
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
# By RFC 3986: never percent-encoded.
UNRESERVED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
# What paths of the server begin with; here, for torch is imported where the routes are made.
ROUTES = frozenset(
    {"compare", "docs", "embed", "embed_sparse", "explain", "extract", "livez", "metrics", "models", "openapi.json"}
    | {"optimise", "projections", "readyz", "rerank", "sweep", "ui", "v1", "v2"}
)
MAX_KEY_NAME = 32  # characters
RESERVED_FILES = 256  # workers' pipes, checkpoints, fetches, connections that are just refused
MAX_DEFAULT_REPLICAS = 8  # Python runs one thread at a time between operations
MAX_DEFAULT_WORKERS = 16  # each has some memory of its own
MIN_WORKER_MEMORY_BYTES = 256 * MIB
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds in each so many, or "max"
LIMITS = (  # settings that clients are told, to keep within
    *("max_inputs", "max_body_bytes", "body_timeout_s", "max_pixels", "max_resized_pixels"),
    *("max_sound_s", "max_samples", "max_video_s", "max_video_frames"),
    *("max_results", "max_changed_inputs", "max_reply_bytes", "max_json_numbers"),
    *("max_queue_rows", "max_queue_bytes", "deadline_s"),
)
# What pydantic says of a default that another field's mistake is in the way of.
NO_DEFAULT = "default_factory_not_called"
CommaSeparated = Annotated[tuple[str, ...], NoDecode]
UNIX = "unix"  # among proxies: whoever may open the Unix socket
Network = IPv4Network | IPv6Network
LogFormat = Literal["auto", "json", "text"]
ReadyWhen = Literal["all", "required", "any"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


def _count_cores() -> int:
    """The cores that this process may use; a container's share of them, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, max(-(-quota // period), 1))
    return cores


@cache
def _can_have_workers() -> bool:
    """Whether the system has, and allows, what worker processes need: Linux does, some sandboxes don't."""
    try:
        os.close(os.memfd_create("layertap"))
    except (AttributeError, OSError):
        return False
    return True


def _choose_workers(known: dict[str, Any]) -> int:
    """One for each thread; none where there is but one. ``known`` are the fields before this."""
    threads = known.get("cpu_threads", 1)  # it is missing where it was refused
    return min(threads, MAX_DEFAULT_WORKERS) if threads > 1 and _can_have_workers() else 0


def _strip_all(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in map(str.strip, texts) if text)


def _read_keys(file: Path) -> tuple[str, ...]:
    try:
        keys = _strip_all(file.read_text("utf-8-sig").splitlines())
    except OSError as error:
        raise ValueError(f"{_describe_path(file)}: {error.strerror}") from None
    if not keys:  # who names a file wants keys asked for
        raise ValueError(f"there is no key in {_describe_path(file)}")
    return keys


def _describe_path(path: Path) -> str:
    """A path whose name may be no UTF-8, which no message can hold."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def split_key(text: str) -> tuple[str, str]:
    """A key and its name, which may stand behind it: ``KEY # NAME``; without one, the name is empty."""
    key, _, name = text.partition(" #")
    return key.strip(), name.strip()


def _check_key(text: str) -> str:
    key, name = split_key(text)
    if not text.isprintable():
        raise ValueError("a key has a character that no header can hold: mind line breaks, and bytes that are no UTF-8")
    if " #" in text and not (key and 0 < len(name) <= MAX_KEY_NAME and UNRESERVED.issuperset(name)):
        raise ValueError(f"behind ' #' a key has a name: at most {MAX_KEY_NAME} letters, digits and -._~")
    return text


Keys = Annotated[tuple[Annotated[str, AfterValidator(_check_key)], ...], NoDecode]


def _parse_size(value: object) -> object:
    """A size that is written with a unit as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = SIZE_PATTERN.fullmatch(value.strip())
    if match is None or match[2].lower() not in SIZE_UNITS:
        raise ValueError(
            "a size is a number of bytes of at most 18 digits, or one with a unit: 33554432, 32MiB, 1.5GiB, 500kB"
        )
    unit = SIZE_UNITS[match[2].lower()]
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


Bytes = Annotated[int, BeforeValidator(_parse_size)]


def _parse_prefix(text: str) -> str:
    """A path that is written in one way only, and is none of ours: nobody has to guess what a proxy made of it.

    ValueError where it is not.
    """
    names = text.split("/")[1:]
    plain = all(name not in ("", ".", "..") and UNRESERVED.issuperset(name) for name in names)
    if text and (text[0] != "/" or not plain):
        raise ValueError("write it like '/features': no '/' at its end, letters, digits and -._~ between")
    if text and names[0] in ROUTES:  # with the prefix taken off or left on, two requests would have one path
        raise ValueError(f"/{names[0]} is a path of the server's own: put it beneath another, like '/features'")
    return text


def parse_network(text: str) -> Network:
    """An address, or a network of them; ValueError where it is neither, or is everybody."""
    try:
        network = ip_network(text)
    except ValueError:
        hint = "write it like 10.0.0.5, 10.0.0.0/8, fd00::/8, or unix"
        raise ValueError(f"{text[:64]!r} is no address and no network: {hint}") from None
    if not network.prefixlen:
        raise ValueError(f"{text} is everybody: name the proxies")
    return network


def _parse_host(text: str) -> str:
    """A host's name or address, in small letters; ValueError where it is neither."""
    name = text.lower().strip("[]")
    with suppress(ValueError):
        return str(ip_address(name))
    if not UNRESERVED.issuperset(name):
        raise ValueError(f"{text[:64]!r} is no host's name: write it like 'features.example', without a port")
    return name


Hosts = Annotated[tuple[Annotated[str, AfterValidator(_parse_host)], ...], NoDecode]


def _is_address(text: str) -> bool:
    """Whether a text is an address by HTTP, of some host."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # ValueError where it is no number
    except ValueError:
        return False
    plain = text.isprintable() and " " not in text
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)


class ReplyLimits(NamedTuple):
    """The most bytes of a reply, and the most numbers in its JSON lists; None is unlimited."""

    nbytes: int | None = None
    numbers: int | None = None


NO_LIMITS = ReplyLimits()


class SettingsError(LayertapError):
    """Settings that make no sense; a line for each mistake, with the name of the variable."""


class Settings(BaseSettings):
    """What an operator may set; sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = Field(None, validate_default=True)
    config: Path | None = None
    log_level: Annotated[LogLevel, BeforeValidator(lambda value: str(value).lower())] = "info"
    log_format: Annotated[LogFormat, BeforeValidator(lambda value: str(value).lower())] = "auto"
    root_path: Annotated[str, AfterValidator(_parse_prefix)] = ""
    api_keys_file: Path | None = None
    admin_keys_file: Path | None = None
    api_keys: Keys = Field((), repr=False, validate_default=True)
    admin_keys: Keys = Field((), repr=False, validate_default=True)
    trusted_proxies: CommaSeparated = ()
    allow_urls: CommaSeparated = ()
    allow_private_urls: CommaSeparated = ()
    allowed_hosts: Hosts = ()
    cors_origins: CommaSeparated = ()

    max_connections: int = Field(16_384, gt=0, validate_default=True)
    max_head_bytes: Bytes = Field(64 * KIB, ge=KIB)
    head_timeout_s: float = Field(15.0, gt=0, allow_inf_nan=False)
    # Longer than clients keep a connection: the server should not be the first to close it.
    keepalive_s: float = Field(75.0, gt=0, allow_inf_nan=False)
    send_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    max_body_bytes: Bytes = Field(32 * MIB, gt=0)
    body_timeout_s: float = Field(15.0, gt=0, allow_inf_nan=False)
    max_inputs: int = Field(256, gt=0)
    max_pixels: int = Field(50_000_000, gt=0)
    max_resized_pixels: int = Field(4_000_000, gt=0)
    max_sound_s: float = Field(300.0, gt=0, le=3600, allow_inf_nan=False)
    max_samples: int = Field(50_000_000, gt=0)
    max_video_s: float = Field(120.0, gt=0, allow_inf_nan=False)
    max_video_frames: int = Field(4096, gt=0)
    max_results: int = Field(1024, gt=0)
    max_changed_inputs: int = Field(16_384, gt=0)
    max_reply_bytes: Bytes = Field(256 * MIB, gt=0)
    max_json_numbers: int = Field(2**20, gt=0)
    max_queue_rows: int = Field(1024, gt=0)
    max_queue_bytes: Bytes = Field(1024 * MIB, gt=0)
    max_unsent_bytes: Bytes = Field(512 * MIB, gt=0)
    max_projection_bytes: Bytes = Field(256 * MIB, ge=0)
    deadline_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    otlp_endpoint: str = ""
    slow_request_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    drain_delay_s: float | None = Field(None, ge=0, allow_inf_nan=False)  # None: as long as whoever may look needs
    url_timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    max_url_fetches: int = Field(32, gt=0)

    max_batch_rows: int = Field(32, gt=0)
    fixed_batch_rows: int | None = Field(None, gt=0)
    check_shared: int = Field(200, ge=0)
    batch_memory_bytes: Bytes | None = Field(None, gt=0)
    cache_dir: Path = Field(Path("~/.cache/layertap"), validate_default=True)
    max_loaded_models: int = Field(8, gt=0)
    model_memory_bytes: Bytes | None = Field(None, gt=0)
    model_idle_timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    ready_when: ReadyWhen = "required"
    cpu_threads: int = Field(default_factory=_count_cores, gt=0, le=512)
    gpu_streams: int = Field(1, gt=0, le=4)
    workers: int = Field(default_factory=_choose_workers, ge=0, le=512)
    worker_memory_bytes: Bytes | None = Field(None, ge=MIN_WORKER_MEMORY_BYTES)
    decode_timeout_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    replicas: int = Field(default_factory=lambda: min(_count_cores(), MAX_DEFAULT_REPLICAS), gt=0, le=64)

    @field_validator("port", mode="before")
    @classmethod
    def _check_port(cls, value: object) -> object:
        if isinstance(value, str) and SERVICE_URL.fullmatch(value):
            raise ValueError("Kubernetes sets this for a service named layertap: set enableServiceLinks: false")
        return value

    @field_validator("api_keys_file", "admin_keys_file")
    @classmethod
    def _check_keys_file(cls, value: Path | None) -> Path | None:
        """Read here too, so that a mistake in a file is told of the variable that names it."""
        if value is not None:
            _read_keys(value)
        return value

    @field_validator(
        *("api_keys", "admin_keys", "trusted_proxies", "allow_urls", "allow_private_urls"),
        *("allowed_hosts", "cors_origins"),
        mode="before",
    )
    @classmethod
    def _split_list(cls, value: object, info: ValidationInfo) -> object:
        """Keys and hosts are separated by commas; keys of a file, one a line, come on top."""
        values = _strip_all(value.split(",")) if isinstance(value, str) else value
        if value and not values:  # who sets it wants keys asked for
            raise ValueError("there is nothing between the commas")
        file = info.data.get(f"{info.field_name}_file")
        return (*values, *_read_keys(file)) if file is not None and isinstance(values, (tuple, list)) else values

    @field_validator("tls_key")
    @classmethod
    def _check_tls_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert" in info.data and (value is None) != (info.data["tls_cert"] is None):
            raise ValueError("a certificate and its key go together: set both TLS_CERT and TLS_KEY")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for each in value:
            if each != UNIX:
                parse_network(each)
        if UNIX in value and info.data.get("uds") is None:
            raise ValueError("'unix' means nothing without UDS")
        keys = [info.data[name] for name in ("api_keys", "admin_keys") if name in info.data]
        if value and len(keys) == 2 and not any(keys):  # without a key everybody may do everything
            raise ValueError("others come through a proxy, and this server has no keys: set LAYERTAP_API_KEYS")
        return value

    @field_validator("max_connections")
    @classmethod
    def _fit_files(cls, value: int) -> int:
        """At most as many as this process may have files open, but for those that it needs itself."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return value if files == resource.RLIM_INFINITY else min(value, max(files - RESERVED_FILES, files // 2, 1))

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if not _is_address(each) or urlsplit(each).path:
                raise ValueError(f"{each[:64]!r} is no origin: write it like 'https://example.org'")
        return tuple(each.lower() for each in value)

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not _is_address(value):
            raise ValueError("write it like 'http://collector:4318'")
        return value

    @field_validator("workers")
    @classmethod
    def _check_system(cls, value: int) -> int:
        if value and not _can_have_workers():
            raise ValueError("worker processes need Linux, with memfd_create allowed: set it to 0")
        return value

    @field_validator("cache_dir")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        try:
            return value.expanduser()
        except RuntimeError:
            raise ValueError(f"nobody here has the home that {_describe_path(value)} begins with") from None

    @property
    def notes_dir(self) -> Path:
        """The folder of notes on models whose rows were found to cross."""
        return self.cache_dir / "crossing"

    @cached_property
    def reply_limits(self) -> ReplyLimits:
        """The limits of a reply."""
        return ReplyLimits(self.max_reply_bytes, self.max_json_numbers)

    @property
    def requires_key(self) -> bool:
        """Whether a key is asked for."""
        return bool(self.api_keys or self.admin_keys)


def read_settings(**overrides: Any) -> Settings:
    """The settings of the environment, but for those among ``overrides`` that are not None.

    SettingsError names every variable that there is no setting for, and every value that can't be.
    """
    mistakes = list(_check_names(os.environ))
    try:
        settings = Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        mistakes += [_describe_error(each) for each in errors if each["type"] != NO_DEFAULT]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def _check_names(environment: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the names of variables: a mistyped one would leave its setting as it comes."""
    known = [name.upper() for name in Settings.model_fields]
    for variable, value in sorted(environment.items()):
        prefix, name = variable[: len(PREFIX)].upper(), variable[len(PREFIX) :].upper()
        if prefix != PREFIX or name in CLIENT_VARIABLES or name in known:
            continue
        link = SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and SERVICE_URL.fullmatch(value))
        if not (link and "KUBERNETES_SERVICE_HOST" in environment):
            nearest = find_nearest(name, known, cutoff=0.0)[0]
            yield f"{variable}: there is no such setting; the nearest is {PREFIX}{nearest}"


def _describe_error(error: ErrorDetails) -> str:
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return f"{PREFIX}{str(error['loc'][0]).upper()}: {reason}"
