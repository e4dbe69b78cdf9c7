"""Garbage while virtual workers train: it changes nothing, and the server stays up."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import SessionChannel, Sessions
from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.security import Security
from tests.server.strangers import annoy
from tests.server.transports import PATIENCE, eventually

SIGNATURE = TrainingSignature("1", 2, 0, "sum", 1, (), (Parameter("w", (4,), "float32", "float32"),))


def test_what_makes_no_sense_changes_nothing() -> None:
    """While a VW waits for the others, and then in between waves."""
    with ExitStack() as stack:
        sessions = Sessions(30.0)
        stack.callback(sessions.close)
        shown = Security(token="t")
        server = stack.enter_context(GrpcServer(sessions, security=shown))
        channel = stack.enter_context(closing(GrpcChannel(server.address, shown)))
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def annoyed() -> None:
            assert annoy(server.address, shown, "fit-1") > 100

        def has_pushed(vw: int, clock: int) -> bool:
            members: list[dict[str, Any]] = json.loads(channel.call("status", b""))["fit-1"]["members"]
            return any(each["clock"] > clock for each in members if each["vw"] == vw)

        def client(vw: int) -> Client:
            session = SessionChannel(channel, "fit-1")
            return stack.enter_context(Client([session], SIGNATURE, [[0]], vw, 1, lease=30.0, timeout=PATIENCE))

        one, other = client(0), client(1)
        start = torch.arange(4.0)
        joined = [pool.submit(each.join, [start]) for each in (one, other)]
        weights = [each.result(PATIENCE)[0].clone() for each in joined]
        for wave in range(2):
            if wave:
                annoyed()
            updates = [torch.full((4,), 0.1 + wave), torch.full((4,), 0.01)]
            first: Future[list[Tensor]] = pool.submit(one.synchronise, [updates[0]])
            eventually(lambda clock=wave: has_pushed(0, clock), "VW 0 has not pushed")  # type: ignore[misc]
            if not wave:
                annoyed()
            second = other.synchronise([updates[1]])[0]
            start = (start + updates[0]) + updates[1]
            weights = [first.result(PATIENCE)[0].clone(), second.clone()]
            assert all(torch.equal(each, start) for each in weights)
        one.leave()
        other.leave()
