"""A program that forks while it has clients: prints, as JSON, what went wrong in each way of doing so."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import sys
import threading
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from layertap_client import AsyncClient, Client, InputError

# Clients have verify=False: reading certificates, in each child anew, would take most of the time.
CHILDREN, EACH, WAIT_S = 3, 4, 60
ROWS = np.random.default_rng(0).normal(size=(CHILDREN + 1, 1, 3, 32, 32)).astype(np.float32)
FORK = multiprocessing.get_context("fork")
Faults = list[str]


def differ(found: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Whether an answer is another one's; beside others, which share its forward, it is rounded otherwise."""
    return not np.allclose(found, right, rtol=1e-4, atol=1e-5)


def ask(client: Client, number: int, right: np.ndarray[Any, Any]) -> Faults:
    """What is wrong with answers to one row, asked for again and again."""
    found = []
    for _ in range(EACH):
        result = client.extract(ROWS[number], "head")
        if differ(result.array, right[number]) or result.attempts > 1:
            found.append(f"{number}: another answer, or {result.attempts} attempts")
    return found


def answers(client: Client) -> np.ndarray[Any, Any]:
    return np.stack([client.extract(row, "head").array for row in ROWS])


def in_children(work: Callable[[int], Faults], here: Callable[[], Faults] = list, count: int = CHILDREN) -> Faults:
    """The faults of forked processes, and of this one beside them."""
    queue: SimpleQueue[Faults] = FORK.SimpleQueue()

    def run(number: int) -> None:
        try:
            queue.put(work(number))
        except BaseException as error:
            queue.put([repr(error)])

    children = [FORK.Process(target=run, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    found = here()
    for child in children:
        child.join(WAIT_S)
        found += ["a child hangs"] if child.is_alive() else queue.get()
        child.kill()
    return found


def interleaved(url: str) -> Faults:
    """Children and their parent ask at once by one client, which is then good for grandchildren too."""
    with Client(url, verify=False) as client:
        right = answers(client)

        def work(number: int) -> Faults:
            of_child = in_children(lambda of_child: ask(client, of_child, right), count=1) if number == 0 else []
            return [*ask(client, number, right), *of_child]

        return in_children(work, lambda: ask(client, CHILDREN, right))


def amid_calls(url: str) -> Faults:
    """The process is forked again and again while threads of it are amid calls."""
    with Client(url, verify=False) as client:
        right, done, found = answers(client), threading.Event(), Faults()

        def go_on() -> None:
            while not done.is_set():
                found.extend(ask(client, CHILDREN, right))

        threads = [threading.Thread(target=go_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            found += in_children(lambda number: ask(client, number, right))
        done.set()
        for thread in threads:
            thread.join()
        return found


def closed_in_the_child(url: str) -> Faults:
    """A child that has asked holds no socket of its parent, and closes its client: the parent's is as it was."""
    with Client(url, verify=False) as client:
        right = answers(client)

        def work(number: int) -> Faults:
            with client:
                found = ask(client, number, right)
                gc.collect()
                sockets = [path for path in Path("/proc/self/fd").iterdir() if "socket:" in str(path.resolve())]
                return [*found, *map(str, sockets[1:])]

        return [*in_children(work), *ask(client, CHILDREN, right)]


def asynchronous(url: str) -> Faults:
    """Children of a coroutine have event loops of their own."""

    async def main() -> Faults:
        async with AsyncClient(url, verify=False) as client:
            right = np.stack([(await client.extract(row, "head")).array for row in ROWS])

            async def check(number: int) -> Faults:
                found = [(await client.extract(ROWS[number], "head")).array for _ in range(EACH)]
                return [f"{number}: another answer" for each in found if differ(each, right[number])]

            found = in_children(lambda number: asyncio.run(check(number)))
            return [*found, *await check(CHILDREN)]

    return asyncio.run(main())


def own_transport(url: str) -> Faults:
    """Connections that the caller made can't be made anew: children are told so."""
    with Client(url, transport=httpx.HTTPTransport(verify=False)) as client:
        right = answers(client)

        def work(number: int) -> Faults:
            try:
                return [f"{number}: no error", *ask(client, number, right)]
            except InputError as error:
                return [] if "make one in each process" in str(error) else [str(error)]

        return [*in_children(work), *ask(client, CHILDREN, right)]


WAYS = {way.__name__: way for way in (interleaved, amid_calls, closed_in_the_child, asynchronous, own_transport)}

if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: way(sys.argv[1]) for name, way in WAYS.items()}))
