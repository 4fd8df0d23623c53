"""Settings of the environment: sizes with units, mistakes that are told, variables that are somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.ray_settings import pick_chosen
from layertap.service.settings import SettingsError, read_settings

SIZES = {"33554432": 33_554_432, "32 mib": 33_554_432, "1.5GiB": 1_610_612_736, "500kB": 500_000, "9000B": 9000}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A size is a number of bytes, or has a unit."""
    monkeypatch.setenv("LAYERTAP_MAX_BODY_BYTES", text)
    monkeypatch.setenv("LAYERTAP_BATCH_MEMORY_BYTES", text)
    settings = read_settings()
    assert settings.max_body_bytes == settings.batch_memory_bytes == SIZES[text]


NO_SIZES = ("", "-1", "1e3", "32M iB", "0", "0.2B", "nan", "1,5MiB", "٣MiB", "9" * 5000, "9" * 400 + "TiB")


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_sizes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What is no size, or none above zero, is refused by its variable's name."""
    monkeypatch.setenv("LAYERTAP_MAX_BODY_BYTES", text)
    with pytest.raises(SettingsError, match=r"^LAYERTAP_MAX_BODY_BYTES: "):
        read_settings()


NO_TEXTS = (
    *(("CACHE_DIR", "~nobody-is-called-so/cache"), ("API_KEYS_FILE", "/nowhere/\udcff")),
    *(("API_KEYS", "good,bad\x1b[31m"), ("API_KEYS", "\udcff"), ("ADMIN_KEYS", "a\x7fb # boss")),
    *(("API_KEYS", f"bad,b # {name}") for name in ("", "b c", "n" * 33, "<b>", "é")),
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


LINKS = {"GPU_SERVICE_HOST": "10.0.0.1", "GPU_SERVICE_PORT_HTTP": "80", "GPU_PORT": "tcp://10.0.0.1:80"}
LINKS |= {"GPU_PORT_80_TCP": LINKS["GPU_PORT"], "GPU_PORT_80_TCP_ADDR": "10.0.0.1"}


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kubernetes sets in every pod for services of such names is nobody's mistake; elsewhere it is one."""
    for name, value in LINKS.items():
        monkeypatch.setenv(f"LAYERTAP_{name}", value)
    with pytest.raises(SettingsError) as caught:
        read_settings()
    assert len(caught.value.detail.splitlines()) == len(LINKS)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert read_settings().port == 8000
    monkeypatch.setenv("LAYERTAP_GPU_PORT", "80")
    with pytest.raises(SettingsError, match=r"^LAYERTAP_GPU_PORT: "):
        read_settings()
    monkeypatch.setenv("LAYERTAP_GPU_PORT", LINKS["GPU_PORT"])
    monkeypatch.setenv("LAYERTAP_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError, match="enableServiceLinks"):
        read_settings()


def test_only_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with a machine is left to it; what was set goes, read there as here, its paths whatever the folder."""
    monkeypatch.setenv("LAYERTAP_MAX_PIXELS", "1000")
    monkeypatch.setenv("LAYERTAP_CACHE_DIR", "cache")
    chosen = pick_chosen(read_settings(config=Path("models.yaml")), keys=True)
    assert chosen == {"max_pixels": 1000, "cache_dir": Path.cwd() / "cache", "config": Path.cwd() / "models.yaml"}
    monkeypatch.undo()
    assert read_settings(**chosen).max_pixels == 1000


def test_keys_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes that serve nobody get no keys; those that serve get the same."""
    (tmp_path / "keys").write_text("secret-of-a-file\n")
    monkeypatch.setenv("LAYERTAP_API_KEYS", "secret")
    monkeypatch.setenv("LAYERTAP_ADMIN_KEYS_FILE", str(tmp_path / "keys"))
    settings = read_settings()
    assert pick_chosen(settings, keys=False) == {}
    monkeypatch.undo()
    there = read_settings(**pick_chosen(settings, keys=True))
    assert there.api_keys == ("secret",)
    assert set(there.admin_keys) == {"secret-of-a-file"}
