"""A simulation of machines behind a balancer, event by event (SimPy): what queues, batches and chance make of costs.

An image passes its machine's network, its server's own process, decoding, the copy to a device, a forward with
whatever waits there, the server's own process again and the network; then it is written to the index. On a machine
without devices each core takes a batch of what waits, and decodes and runs it; where all cores do, they are slower by
the share that the server's own process takes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import simpy

from bench.capacity.costs import Fleet, ImageCosts

SPREAD = 0.1  # of every time that something takes: the deviation of its logarithm
WARM_UP = 0.2  # of the images, which are not counted
CLIENT_S = 0.3e-3  # from an answer to a client's next request
Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Simulated:
    """Images a second, seconds until an answer, mean rows of a forward, and how busy each part was, 0 to 1."""

    per_second: float
    p50_s: float
    p99_s: float
    rows: float
    busy: dict[str, float]


@dataclass
class Station:
    """Something that does one thing for each of its servers at a time; ``busy_s`` is their time together."""

    resource: simpy.Resource
    busy_s: float = 0.0


@dataclass
class Forwards:
    """Where images wait for a forward, and what those that wait for images are woken by."""

    waiting: deque[simpy.Event] = field(default_factory=deque)
    idle: deque[simpy.Event] = field(default_factory=deque)
    busy_s: float = 0.0
    count: int = 0


class SimulatedMachine:
    """One machine: its parts, and how an image passes them."""

    def __init__(self, environment: simpy.Environment, costs: ImageCosts, fleet: Fleet, random: Random) -> None:
        machine = fleet.machine
        self._environment = environment
        self._costs = costs
        self._machine = machine
        self._random = random
        self.images = 0  # on it now
        self.forwards = Forwards()
        servers = {"network in": 1, "front": machine.servers, "network out": 1}
        if machine.devices:
            servers |= {"decode": machine.decode_cores, "copy to the device": machine.devices}
        self.parts = {name: Station(simpy.Resource(environment, number)) for name, number in servers.items()}
        for _ in range(machine.devices or machine.cores):
            environment.process(self._run_forwards())

    def answer(self) -> Steps:
        """The road of an image."""
        costs, machine = self._costs, self._machine
        self.images += 1
        yield from self.use("network in", costs.image_bytes / machine.network_bytes_s)
        yield from self.use("front", costs.front_s / 2)
        if machine.devices:
            yield from self.use("decode", costs.decode_s)
            yield from self.use("copy to the device", costs.device_bytes / machine.device_bytes_s)
        yield self._queue()
        yield from self.use("front", costs.front_s / 2)
        yield from self.use("network out", costs.reply_bytes / machine.network_bytes_s)
        self.images -= 1

    def use(self, name: str, seconds: float) -> Steps:
        """Wait for a part, and have it for so long."""
        if seconds > 0:
            yield from use_part(self._environment, self.parts[name], self._vary(seconds))

    def _queue(self) -> simpy.Event:
        done = self._environment.event()
        self.forwards.waiting.append(done)
        if self.forwards.idle:
            self.forwards.idle.popleft().succeed()
        return done

    def _run_forwards(self) -> Steps:
        """One device, or one core: a forward of what waits, again and again."""
        while True:
            while not self.forwards.waiting:
                woken = self._environment.event()
                self.forwards.idle.append(woken)
                yield woken
            waiting = self.forwards.waiting
            batch = [waiting.popleft() for _ in range(min(len(waiting), self._choose_rows()))]
            seconds = self._vary(self._get_batch_s(len(batch)))
            yield self._environment.timeout(seconds)
            self.forwards.busy_s += seconds
            self.forwards.count += 1
            for done in batch:
                done.succeed()

    def _choose_rows(self) -> int:
        """On cores, a fair share of what is on the machine: whoever takes all leaves the others without any."""
        if self._machine.devices:
            return self._costs.max_rows
        return min(self._costs.max_rows, max(1, -(-self.images // self._machine.cores)))

    def _get_batch_s(self, rows: int) -> float:
        seconds = rows * self._costs.get_forward_s(rows)
        if self._machine.devices:
            return seconds
        seconds += rows * self._costs.decode_s
        if self.forwards.idle:
            return seconds
        cores, taken = self._machine.cores, self.parts["front"].busy_s / max(self._environment.now, 1e-9)
        return seconds * cores / (cores - min(taken, cores / 2))

    def _vary(self, seconds: float) -> float:
        return seconds * self._random.lognormvariate(0, SPREAD)


class SimulatedFleet:
    """Machines, the index that they share, and what came of their images."""

    def __init__(self, costs: ImageCosts, fleet: Fleet, images: int, seed: int) -> None:
        self._environment = simpy.Environment()
        self._random = Random(seed)
        self._costs = costs
        self._fleet = fleet
        self._images = images
        self._ended = self._environment.event()
        self._counted_from = 0.0
        self._done = 0
        self._latencies: list[float] = []
        self._machines = [
            SimulatedMachine(self._environment, costs, fleet, self._random) for _ in range(fleet.machines)
        ]
        self._index = Station(simpy.Resource(self._environment, 1))

    def run_open(self, per_second: float) -> Simulated:
        """Images that come at random moments, each to the less busy of two machines drawn by lot."""
        self._environment.process(self._arrive(per_second))
        return self._run()

    def run_closed(self, clients: int) -> Simulated:
        """Clients of which each sends its next image once it is answered."""
        for _ in range(clients):
            self._environment.process(self._ask())
        return self._run()

    def _run(self) -> Simulated:
        self._environment.run(self._ended)
        ordered = sorted(self._latencies)
        forwards = sum(machine.forwards.count for machine in self._machines)
        return Simulated(
            per_second=len(ordered) / (self._environment.now - self._counted_from),
            p50_s=ordered[len(ordered) // 2],
            p99_s=ordered[int(0.99 * len(ordered))],
            rows=self._done / max(forwards, 1),
            busy=self._get_busy(),
        )

    def _arrive(self, per_second: float) -> Steps:
        while True:
            yield self._environment.timeout(self._random.expovariate(per_second))
            self._environment.process(self._answer())

    def _ask(self) -> Steps:
        while True:
            yield from self._answer()
            yield self._environment.timeout(CLIENT_S)

    def _answer(self) -> Steps:
        begun = self._environment.now
        yield from self._choose_machine().answer()
        if self._fleet.index_bytes_s is not None:
            yield from use_part(self._environment, self._index, self._costs.index_bytes / self._fleet.index_bytes_s)
        self._count(self._environment.now - begun)

    def _count(self, seconds: float) -> None:
        self._done += 1
        if self._done == int(WARM_UP * self._images):
            self._counted_from = self._environment.now
        elif self._done > WARM_UP * self._images:
            self._latencies.append(seconds)
        if self._done == self._images:
            self._ended.succeed()

    def _choose_machine(self) -> SimulatedMachine:
        one, other = self._random.choice(self._machines), self._random.choice(self._machines)
        return one if one.images <= other.images else other

    def _get_busy(self) -> dict[str, float]:
        machine, seconds = self._fleet.machine, self._environment.now
        name = "forward" if machine.devices else "cores"
        busy = {name: sum(each.forwards.busy_s for each in self._machines) / (machine.devices or machine.cores)}
        for part in self._machines[0].parts:
            parts = [each.parts[part] for each in self._machines]
            busy[part] = sum(each.busy_s for each in parts) / parts[0].resource.capacity
        shares = {part: round(total / seconds / len(self._machines), 3) for part, total in busy.items() if total}
        return shares | ({"index": round(self._index.busy_s / seconds, 3)} if self._index.busy_s else {})


def use_part(environment: simpy.Environment, part: Station, seconds: float) -> Steps:
    """Wait for a part, and have it for so long."""
    with part.resource.request() as turn:
        yield turn
        yield environment.timeout(seconds)
        part.busy_s += seconds
