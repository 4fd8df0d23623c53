"""TorchServe with dynamic batches: a Java front, a Python worker for each core with one torch thread each."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from ts.model_server import start

from bench.peers.arguments import HOST, Told, told

# Tried on two cores with MobileNetV3-small at 16 and 64 connections: 4, 8, 16 rows; 2, 5, 10, 20 ms; 2, 3 workers.
# Noise hid most of what differs (4 rows seemed slower at 64): hence 5 ms and not 20, as a lone client waits that long.
ROWS = 8
DELAY_MS = 5
WORKERS = os.cpu_count() or 1
TIMEOUT_S = 60
ROOT = Path(__file__).parents[2]
MODEL = "model"  # part of the path that it answers at
HANDLER = "bench.peers.torchserve_handler:handle"
QUIET = "<Configuration><Loggers><Root level='warn'/></Loggers></Configuration>"  # without an appender: to stderr


def write(chosen: Told, folder: Path) -> None:
    """A folder with the model for each worker to build, the configuration, and room for sockets and logs."""
    archive = folder / "models" / MODEL / "MAR-INF"
    archive.mkdir(parents=True)
    settings = {
        "minWorkers": WORKERS,
        "maxWorkers": WORKERS,
        "batchSize": ROWS,
        "maxBatchDelay": DELAY_MS,
        "responseTimeout": TIMEOUT_S,
        "handler": {"model": chosen.model, "layers": chosen.layers},
    }
    (archive.parent / "model.yaml").write_text(json.dumps(settings))  # JSON is YAML as well
    model = {"modelName": MODEL, "modelVersion": "1", "handler": HANDLER, "configFile": "model.yaml"}
    (archive / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))
    (folder / "log4j2.xml").write_text(QUIET)
    properties = {
        "inference_address": f"http://{HOST}:{chosen.port}",
        "management_address": f"unix:{folder}/management",
        "metrics_address": f"unix:{folder}/metrics",
        "grpc_inference_port": "0",  # any that is free: nobody asks there
        "grpc_management_port": "0",
        "disable_token_authorization": "true",
        "disable_system_metrics": "true",
        "model_store": f"{folder}/models",
        "load_models": MODEL,
        "number_of_gpu": "0",
    }
    (folder / "config.properties").write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


def run(*words: str) -> None:
    """What the command ``torchserve`` does with these words."""
    sys.argv = ["torchserve", *words]
    start()


def main() -> None:
    """Serve until somebody ends it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with tempfile.TemporaryDirectory() as folder:
        write(told(), Path(folder))
        os.environ["PYTHONPATH"] = str(ROOT)  # of the workers
        os.environ |= dict.fromkeys(("TEMP", "TMPDIR", "LOG_LOCATION", "METRICS_LOCATION"), folder)
        tempfile.tempdir = None  # so that the file with the front's process id is there as well
        try:
            run("--foreground", "--no-config-snapshots", "--ts-config", f"{folder}/config.properties",
                "--log-config", f"{folder}/log4j2.xml")  # fmt: skip
        finally:
            run("--stop", "--foreground")


if __name__ == "__main__":
    main()
