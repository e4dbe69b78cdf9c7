"""Two virtual workers that push and pull wave after wave, and what their weights have to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import torch

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import SessionChannel
from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.security import Security
from tests.server.transports import PATIENCE

SESSION = "fit-1"
SIZE = 100_000
SIGNATURE = TrainingSignature("1", 2, 0, "sum", 1, ("launch=a",), (Parameter("w", (SIZE,), "float32", "float32"),))


def client(
    stack: ExitStack, address: str, security: Security, vw: int, signature: TrainingSignature, incarnation: int = 1
) -> Client:
    """A virtual worker's client, with a channel of its own."""
    session = SessionChannel(stack.enter_context(closing(GrpcChannel(address, security))), SESSION)
    return stack.enter_context(
        Client([session], signature, [[0]], vw, incarnation, lease=PATIENCE, timeout=2 * PATIENCE)
    )


class Waves:
    """The training; ``done`` is the number of waves."""

    def __init__(self, clients: list[Client], pool: ThreadPoolExecutor) -> None:
        self._clients, self._pool = clients, pool
        self._weights = torch.arange(float(SIZE))
        self.done = 0
        for joined in [pool.submit(each.join, [self._weights]) for each in clients]:
            assert torch.equal(joined.result(PATIENCE)[0], self._weights)

    def go_on(self, until: Callable[[], bool]) -> None:
        """Trains at least one wave, and until this holds; each has the bits that the updates alone make."""
        while True:
            updates = [torch.full((SIZE,), factor * (1 + self.done)) for factor in (0.1, 0.01)]
            pushed = [
                self._pool.submit(each.synchronise, [update])
                for each, update in zip(self._clients, updates, strict=True)
            ]
            self._weights = (self._weights + updates[0]) + updates[1]
            for each in pushed:
                assert torch.equal(each.result(2 * PATIENCE)[0], self._weights)
            self.done += 1
            if until():
                return

    def go_on_beside(self, others: list[Future[None]]) -> None:
        """Trains until all ``others`` are done."""
        self.go_on(lambda: all(each.done() for each in others))
        for each in others:
            each.result()


@contextmanager
def waves(address: str, security: Security, pool: ThreadPoolExecutor) -> Iterator[Waves]:
    """The training at ``address``, of which some waves are done; all leave in the end."""
    with ExitStack() as stack:
        clients = [client(stack, address, security, vw, SIGNATURE) for vw in range(2)]
        training = Waves(clients, pool)
        training.go_on(lambda: training.done == 5)
        yield training
        for each in clients:
            each.leave()
