"""``serve``: mistakes end it in one line, before torch is imported or a socket opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.cli.commands import Command
from tests.service.support import Json


@pytest.mark.parametrize(
    ("variables", "words", "says"),
    [
        ({"LAYERTAP_ROOT_PATH": "features"}, (), "LAYERTAP_ROOT_PATH"),
        ({}, ("--config", "nowhere.yaml"), "can't read nowhere.yaml"),
        ({"LAYERTAP_HOST": "0.0.0.0"}, (), "LAYERTAP_API_KEYS"),
        ({"LAYERTAP_API_KEYS_FILE": "nowhere/keys"}, (), "LAYERTAP_API_KEYS_FILE: nowhere/keys"),
        ({"LAYERTAP_ADMIN_KEYS_FILE": os.devnull}, (), "LAYERTAP_ADMIN_KEYS_FILE: there is no key"),
        ({"LAYERTAP_CONFIG": "nowhere.yaml"}, (), "LAYERTAP_CONFIG"),
        (
            {"LAYERTAP_OTLP_ENDPOINT": "collector:4318"},
            (),
            "LAYERTAP_OTLP_ENDPOINT: write it like 'http://collector:4318'",
        ),
        ({"LAYERTAP_API_KEYS": "secret # two words"}, (), "LAYERTAP_API_KEYS: behind ' #' a key has a name"),
        ({"LAYERTAP_TLS_CERT": "cert.pem"}, (), "set both TLS_CERT and TLS_KEY"),
        ({"LAYERTAP_TLS_CERT": "no.pem", "LAYERTAP_TLS_KEY": "no.key"}, (), "LAYERTAP_TLS_KEY: No such file"),
        ({"LAYERTAP_TLS_CERT": os.devnull, "LAYERTAP_TLS_KEY": os.devnull}, (), "a chain of certificates"),
        ({"LAYERTAP_TRUSTED_PROXIES": "127.0.0.1"}, (), "this server has no keys: set LAYERTAP_API_KEYS"),
        ({"LAYERTAP_MAX_QUEUE_BYTES": "16MiB"}, (), "holds no body of LAYERTAP_MAX_BODY_BYTES, 33554432"),
        ({"LAYERTAP_MAX_BODY_BYTES": "2GiB"}, (), "LAYERTAP_MAX_QUEUE_BYTES, 1073741824"),
        ({"LAYERTAP_UDS": "nowhere/socket"}, (), "'nowhere/socket' can't be listened on: No such file"),
    ],
)
def test_serve_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, variables: Json, words: tuple[str, ...], says: str
) -> None:
    """A setting that makes no sense is refused by its name before anything starts."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = command("serve", *words)
    assert done.status == 2
    assert says in done.notes
    assert "Traceback" not in done.notes
    assert "secret" not in done.notes


SCRIPT = """
import sys
sys.addaudithook(lambda event, _: event.startswith("socket.") and print("opened", event, flush=True))
from layertap.service.cli.main import main
hosts = ("0.0.0.0", "::", "", "192.168.0.1", "0", "example.org")
for words in (["--port", "http"], ["--config", "models.yaml"], *(["--host", host] for host in hosts)):
    sys.argv = ["layertap", "serve", *words]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules, "torchvision" in sys.modules)
"""


def test_serve_refused_without_torch(tmp_path: Path) -> None:
    """Mistakes of settings and configuration are told, all of them, before torch is imported or a socket opened.

    Without a key the server listens on loopback only: anything else is such a mistake.
    """
    (tmp_path / "models.yaml").write_text("models:\n- {name: a, source: torchvision:resnet5O, device: tpu}\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=kept, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "False", "False"] * 8
    device, source = (
        line for line in done.stderr.splitlines() if line.startswith("layertap: models.yaml:2: models.0.")
    )
    assert "'tpu' is no device" in device
    assert "did you mean 'torchvision:resnet50'" in source
    assert done.stderr.count("LAYERTAP_API_KEYS") == 6
