"""What of a command's settings goes to processes on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from layertap.service.ray_settings import pick_chosen
from layertap.service.settings import read_settings


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
