"""What is installed and where it runs: pinned by hash, and with as few rights as it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LOCKS = (
    *("requirements.lock", "requirements-dev.lock", ".ci/lowest.lock"),
    *("fuzz/requirements.txt", "deploy/helm/requirements.txt", "tests/service/other_clients/requirements.txt"),
)


@pytest.mark.parametrize("name", LOCKS)
def test_lock(name: str) -> None:
    """Every package has one version and hashes; no index is named."""
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    entries = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9.\-\[\]]+==[^ ]+ .*--hash=sha256:[0-9a-f]{64}", entry), entry
        assert "://" not in entry


def test_services_have_few_rights() -> None:
    """Containers: no capability, no new privileges, a root that nobody writes to, a port on loopback."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "cap_add" not in service
        assert "privileged" not in service
        assert "user" not in service  # as the image says
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert [each.split(":")[0] for each in service["tmpfs"]] == ["/tmp"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("target", ["", "compiler"])
def test_image_has_a_user_of_its_own(target: str) -> None:
    """No image runs as root; its user is known by number: a cluster can check it."""
    texts = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    stages = {}
    for text in texts:
        base, _, name = text.partition("\n")[0].partition(" AS ")
        stages[name] = (base, re.findall(r"^USER (.+)$", text, re.MULTILINE))
    users = []
    while target in stages:  # up to the image that is somebody else's
        target, own = stages[target]
        users = own + users
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
