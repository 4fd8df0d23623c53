"""What the kernel says of memory: free bytes within a cgroup's limit, and kills for lack of memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from layertap.models.devices import memory

MIB = 2**20
VERSION_2 = {
    "memory.max": f"{100 * MIB}",
    "memory.current": f"{90 * MIB}",
    "memory.stat": f"anon 5\ninactive_file {7 * MIB}\n",
    "memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
}
VERSION_1 = {
    "memory.limit_in_bytes": f"{100 * MIB}",
    "memory.usage_in_bytes": f"{90 * MIB}",
    "memory.stat": f"inactive_file 5\ntotal_inactive_file {7 * MIB}\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["version 2", "version 1"])
def test_cgroup(files: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions of cgroups are read, and a group around the process's own counts."""
    monkeypatch.setattr(memory, "CGROUPS", dict.fromkeys(memory.CGROUPS, tmp_path))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory.measure_available_bytes(torch.device("cpu")) == 17 * MIB
    assert memory.count_oom_kills() == 2


def test_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, the machine's figures count."""
    monkeypatch.setattr(memory, "CGROUPS", dict.fromkeys(memory.CGROUPS, tmp_path))
    assert memory.measure_available_bytes(torch.device("cpu")) > 17 * MIB
    kills = [line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill ")]
    assert kills == [f"oom_kill {memory.count_oom_kills()}"]
