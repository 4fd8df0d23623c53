"""Settings of the environment: sizes with units, mistakes that are told, variables that are somebody else's."""

from __future__ import annotations

import pytest

from layertap.service.settings import Settings, SettingsError, read_settings


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("33554432", 33_554_432), ("32MiB", 33_554_432), ("32 mib", 33_554_432), ("64KiB", 65_536)),
        *(("1.5GiB", 1_610_612_736), ("500kB", 500_000), ("1TB", 10**12), ("2TiB", 2_199_023_255_552), ("9000B", 9000)),
    ],
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    """A size is a number of bytes, or has a unit."""
    monkeypatch.setenv("LAYERTAP_MAX_BODY_BYTES", text)
    monkeypatch.setenv("LAYERTAP_BATCH_MEMORY_BYTES", text)
    settings = read_settings()
    assert (settings.max_body_bytes, settings.batch_memory_bytes) == (size, size)


NO_SIZES = (
    *("", "MiB", "-1", "1e3", "32M iB", "32Mib/s", "0", "0.2B", "nan", "1,5MiB", "٣MiB"),
    *("9" * 400 + ".5", "9" * 5000, "0." + "9" * 5000 + "TiB", "9" * 400 + "TiB"),
)


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_sizes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What is no size, or none above zero, is refused by its variable's name."""
    monkeypatch.setenv("LAYERTAP_MAX_BODY_BYTES", text)
    with pytest.raises(SettingsError, match=r"^LAYERTAP_MAX_BODY_BYTES: "):
        read_settings()


NO_TEXTS = (
    *(("CACHE_DIR", "~nobody-is-called-so/cache"), ("API_KEYS_FILE", "/nowhere/\udcff")),
    *(("API_KEYS", "good,bad\x1b[31m"), ("API_KEYS", "\udcff"), ("ADMIN_KEYS", "a\x7fb # boss")),
    *(("OTLP_ENDPOINT", f"http://{rest}") for rest in ("", ":4318", "[::1", "a collector:4318", "host:port", "host\n")),
)


@pytest.mark.parametrize(("name", "text"), NO_TEXTS)
def test_no_texts(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A home that nobody has, a key that no header can hold, an address without a host: a line that shows no key."""
    monkeypatch.setenv(f"LAYERTAP_{name}", text)
    with pytest.raises(SettingsError, match=rf"^LAYERTAP_{name}: ") as caught:
        read_settings()
    assert len(caught.value.detail.splitlines()) == 1
    assert not name.endswith("KEYS") or "bad" not in caught.value.detail


def test_all_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and values that make no sense are told all at once, a line each."""
    monkeypatch.setenv("LAYERTAP_API_KEY", "a caller's own")
    for name, value in {"API_KEYZ": "secret", "PROT": "1", "DEADLINE_S": "soon", "MAX_INPUTS": "0"}.items():
        monkeypatch.setenv(f"LAYERTAP_{name}", value)
    with pytest.raises(SettingsError) as caught:
        read_settings(port=-1)
    lines = [line.partition(": ") for line in caught.value.detail.splitlines()]
    assert {name for name, _, _ in lines} == {
        f"LAYERTAP_{name}" for name in ("API_KEYZ", "PROT", "DEADLINE_S", "MAX_INPUTS", "PORT")
    }
    assert "LAYERTAP_API_KEYS" in lines[0][2]
    assert "secret" not in caught.value.detail


def test_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of the settings is a variable, in capitals or not, and examples have one of their own."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"LAYERTAP_{name.upper()}", "?")
    monkeypatch.setenv("LAYERTAP_URL", "http://127.0.0.1:8000")
    with pytest.raises(SettingsError) as caught:
        read_settings()
    assert "no such setting" not in caught.value.detail
    monkeypatch.undo()
    monkeypatch.setenv("layertap_port", "9000")
    assert read_settings().port == 9000


LINKS = {
    "LAYERTAP_GPU_SERVICE_HOST": "10.0.0.1",
    "LAYERTAP_GPU_SERVICE_PORT": "80",
    "LAYERTAP_GPU_SERVICE_PORT_HTTP": "80",
    "LAYERTAP_GPU_PORT": "tcp://10.0.0.1:80",
    "LAYERTAP_GPU_PORT_80_TCP": "tcp://10.0.0.1:80",
    "LAYERTAP_GPU_PORT_80_TCP_ADDR": "10.0.0.1",
}


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kubernetes sets in every pod for services of such names is nobody's mistake; elsewhere it is one."""
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        read_settings()
    assert len(caught.value.detail.splitlines()) == len(LINKS)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert read_settings().port == 8000
    monkeypatch.setenv("LAYERTAP_GPU_PORT", "80")
    with pytest.raises(SettingsError, match=r"^LAYERTAP_GPU_PORT: "):
        read_settings()
    monkeypatch.setenv("LAYERTAP_GPU_PORT", LINKS["LAYERTAP_GPU_PORT"])
    monkeypatch.setenv("LAYERTAP_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError, match="enableServiceLinks"):
        read_settings()
