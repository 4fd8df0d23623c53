"""Who asks: clients that wait for their answers, and clients that don't."""

from __future__ import annotations

from random import Random

from bench.policy.server import SimulatedRequest, SimulatedServer
from layertap.service.types import Priority

TRANSPORT_S = 0.3e-3  # from an answer to the next request of a client that waits for nothing else
START_S = 0.1e-3  # between the first requests of two clients


def add_closed_loop(
    server: SimulatedServer, clients: int, priority: Priority = "interactive", rows: int = 1, row_bytes: int = 0
) -> None:
    """Clients that send the next request as soon as they have an answer."""

    def send() -> None:
        server.send(SimulatedRequest(priority, server.now, send_later, rows, row_bytes))

    def send_later() -> None:
        server.call_at(server.now + server.vary(TRANSPORT_S), send)

    for number in range(clients):
        server.call_at(START_S * number, send)


def add_open_loop(server: SimulatedServer, per_second: float, seed: int) -> None:
    """Requests that come at random moments, the same ones for every rule, whatever has been answered."""
    arrivals = Random(seed)

    def send() -> None:
        server.send(SimulatedRequest("interactive", server.now))
        server.call_at(server.now + arrivals.expovariate(per_second), send)

    server.call_at(0.0, send)
