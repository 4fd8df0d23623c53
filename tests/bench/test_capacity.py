"""Capacity: the formula by hand, the simulation beside it part by part, and costs that are had back from loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.capacity.__main__ import main, read_plan
from bench.capacity.check import Cost, make_costs
from bench.capacity.costs import Fleet, ImageCosts, Machine
from bench.capacity.formula import count_machines, find_bottleneck, get_fleet_limits, get_limits
from bench.capacity.simulation import SimulatedFleet

EXAMPLES = sorted((Path(__file__).parents[2] / "bench" / "capacity" / "examples").glob("*.yaml"))
CPU = ImageCosts(decode_s=4e-3, front_s=1e-3, forward_base_s=6e-3, forward_row_s=3e-3, max_rows=16, image_bytes=1e5)
GPU = ImageCosts(
    decode_s=3e-3,
    front_s=0.5e-3,
    forward_base_s=2e-3,
    forward_row_s=0.5e-3,
    max_rows=32,
    image_bytes=1e5,
    reply_bytes=8e3,
    device_bytes=6e5,
    index_bytes=8e3,
)
CORES = Machine(cores=2)
DEVICES = Machine(cores=16, devices=2, servers=2)
SLOW = {  # a cost or a speed that makes each part the one that limits, to 100 images a second
    "decode": (replace(GPU, decode_s=0.14), DEVICES, None),
    "forward": (replace(GPU, forward_row_s=0.02 - 2e-3 / 32), DEVICES, None),
    "copy to the device": (GPU, replace(DEVICES, device_bytes_s=3e7), None),
    "front": (replace(GPU, front_s=0.02), DEVICES, None),
    "network in": (GPU, replace(DEVICES, network_bytes_s=1e7), None),
    "network out": (replace(GPU, image_bytes=8e2), replace(DEVICES, network_bytes_s=8e5), None),
    "index": (GPU, DEVICES, 8e5),
    "cores": (replace(CPU, forward_row_s=0.02 - 5e-3 - 6e-3 / 16), CORES, None),
}


def test_machines() -> None:
    """Two machines bear 7,111 a second; at seven tenths that is 4,978, and one more image takes a third machine."""
    name, limit = find_bottleneck(get_limits(GPU, DEVICES))
    assert (name, round(limit)) == ("forward", 3556)
    assert [count_machines(GPU, DEVICES, rate) for rate in (1, 2488, 2490, 4977, 4980, 10**6)] == [1, 1, 2, 2, 3, 402]
    assert get_fleet_limits(GPU, Fleet(DEVICES, 10, 8e6))["index"] == 1000


@pytest.mark.parametrize("part", SLOW)
def test_each_part_limits(part: str) -> None:
    """What the formula says is the slowest part is always busy in the simulation, and gives as much as it says."""
    costs, machine, index = SLOW[part]
    fleet = Fleet(machine, index_bytes_s=index)
    assert find_bottleneck(get_fleet_limits(costs, fleet)) == (part, pytest.approx(100))
    simulated = SimulatedFleet(costs, fleet, 2000, 0).run_closed(128)
    assert simulated.per_second == pytest.approx(100, rel=0.06)
    assert simulated.busy[part] == max(simulated.busy.values()) > 0.9


def test_costs_of_loads() -> None:
    """What loads of one picture, of many and of decoded rows take gives the costs back that they were made of."""

    def load(rows: float, decode: float = 4e-3) -> Cost:
        return Cost(own_s=1e-3, workers_s=decode + 6e-3 / rows + 3e-3, rows=rows)

    costs = make_costs(load(1.9), load(14.5), load(1.7, decode=0.0))
    found = (costs.decode_s, costs.front_s, costs.forward_base_s, costs.forward_row_s)
    assert found == pytest.approx((4e-3, 1e-3, 6e-3, 3e-3))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_plan(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example files make plans: each rate has the machines of the formula, and their simulation keeps it."""
    costs, machine = read_plan(file)
    out = tmp_path / "plan.json"
    main(["plan", str(file), "--rates", "100", "1000", "--images", "1000", "--json", str(out)])
    fleets = json.loads(out.read_text())["results"]["fleets"]
    assert [each["machines"] for each in fleets] == [count_machines(costs, machine, rate) for rate in (100, 1000)]
    for each in fleets:
        assert each["simulated"]["per_second"] == pytest.approx(each["rate"], rel=0.15)
    assert "images/s" in capsys.readouterr().out
