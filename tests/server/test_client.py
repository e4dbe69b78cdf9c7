"""Clients in threads, over services in the same process: several VWs train as the oracle says, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import COORDINATOR_METHOD, SHARD_METHOD, Service
from lightning_hetpipe.server.process.waits import Cancelled
from lightning_hetpipe.server.protocol.identifiers import LocalFault, PeerFailed, Refusal, RemoteFault
from lightning_hetpipe.server.protocol.messages import (
    Gather,
    Heartbeat,
    Join,
    Leave,
    Lost,
    NotYet,
    Parameter,
    Read,
    Recall,
    Report,
    Request,
    ShardRequest,
    TrainingSignature,
    decode,
    encode,
)
from lightning_hetpipe.server.protocol.shard import place
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.interface import CallRefused, IncomingCall
from lightning_hetpipe.server.transport.shared_memory import LEAST
from tests import oracle
from tests.oracle import Run
from tests.server.channels import Address, DirectChannel, Faults, Host, filler
from tests.server.world import Fault
from tests.support.equality import assert_same
from tests.support.models import SGD, Learner, mlp, vectors

WAIT = 60.0
"""Seconds after which a test gives up."""


def signature_of(model: Learner, n: int, servers: int, **options: Any) -> TrainingSignature:
    parameters = tuple(
        Parameter(name, tuple(weight.shape), *[str(weight.dtype).removeprefix("torch.")] * 2)
        for name, weight in model.named_parameters()
    )
    settings = {"clock_distance": 0, "aggregate": "sum", **options}
    return TrainingSignature("0.1.0", n, settings["clock_distance"], settings["aggregate"], servers, (), parameters)


class Cluster:
    """Services, and clients to them."""

    def __init__(self, servers: int = 2, faults: Faults | None = None, lease: float = 30.0) -> None:
        self.lease = lease
        self.hosts = [Host(lambda: Service(lease, longest_wait=0.2)) for _ in range(servers)]
        self.faults = faults or Faults()

    def client(
        self, vw: int, signature: TrainingSignature, incarnation: int = 0, placement: str = "size", **options: Any
    ) -> Client:
        channels = [DirectChannel(host, vw, server, self.faults) for server, host in enumerate(self.hosts)]
        placed = place(signature.parameters, len(channels), placement)
        return Client(
            channels,
            signature,
            placed,
            vw,
            incarnation,
            lease=self.lease,
            timeout=WAIT / 2,
            longest_wait=WAIT / 2,
            **options,
        )

    def clocks(self) -> list[int]:
        return [member["clock"] for member in self.hosts[0].service.status()["members"]]


def all_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT) for future in [pool.submit(call) for call in calls]]


Data = Sequence[Sequence[Sequence[Any]]]


def train(
    cluster: Cluster,
    i: int,
    model: Learner,
    data: Data,
    in_flight: int,
    wave: int | Sequence[int],
    cuts: Sequence[int] = (),
    **options: Any,
) -> Run:
    """Run as the strategy does it: the oracle's minibatches of one VW, with a client between them.

    With W_v of each VW as ``wave``, cuts come after so many waves, else after so many minibatches.
    """
    own = wave if isinstance(wave, int) else wave[i]
    until = [1] * len(data) if isinstance(wave, int) else wave
    run, lengths = (
        Run(),
        [max(-(-len(each[epoch]) // u) for each, u in zip(data, until, strict=True)) for epoch in (0, 1)],
    )
    minibatches = oracle.minibatches(run, model, lambda model, batch: model.compute(batch), data[i], SGD, in_flight)
    trained: list[Tensor] = []
    with cluster.client(i, signature_of(model, len(data), len(cluster.hosts), **options)) as client:
        start = [weight.detach() for weight in model.parameters()]
        # Only VW 0's weights count.
        held = client.join(start if i == 0 else [torch.zeros_like(weight) for weight in start])
        synced = [weight.clone() for weight in held]

        def take(weights: list[Tensor]) -> None:
            nonlocal synced
            synced = [weight.clone() for weight in weights]
            for weight, new in zip(trained, weights, strict=True):
                weight.data.copy_(new)

        for epoch, batches in enumerate(data[i]):
            begin = 0
            for number, cut in enumerate(sorted({*(c for c in cuts if c < lengths[epoch]), lengths[epoch]}), 1):
                count = max(0, min(cut * until[i], len(batches)) - begin * until[i])
                update: list[Tensor] | None = None
                for span in (range(start, min(start + own, count)) for start in range(0, count, own)):
                    if update is not None:
                        take(client.synchronise(update))
                    for _ in span:
                        trained = list(next(minibatches)[1].parameters())
                    update = [weight.detach() - old for weight, old in zip(trained, synced, strict=True)]
                name = 100 * epoch + (number if len(batches) >= cut * until[i] and cut < lengths[epoch] else 99)
                if name > client.member.cut:
                    take(client.arrive(name, update))
                if name % 100 == 99:
                    break
                begin = cut
        assert next(minibatches, None) is None
        client.leave()
    return run


def expected(
    model: Learner, data: Data, in_flight: int, wave: int | Sequence[int], cuts: Sequence[int], **options: Any
) -> list[Run]:
    return oracle.train_together(
        model, lambda model, batch: model.compute(batch), data, SGD, in_flight, wave, cuts=cuts, **options
    )


def batches_of(n: int, counts: Sequence[int]) -> Data:
    """Two epochs of ``counts[i]`` batches for each VW."""
    drawn = [list(vectors(4 * sum(counts), 4)) for _ in range(2)]
    return [[epoch[sum(counts[:i]) : sum(counts[: i + 1])] for epoch in drawn] for i in range(n)]


@pytest.mark.parametrize(
    ("n", "servers", "in_flight", "wave", "counts", "cuts", "mean"),
    [
        (1, 1, 2, 2, [5], [], False),
        (2, 2, 2, 2, [6, 6], [], False),
        (2, 3, 3, 2, [7, 4], [], True),  # W != Nm, and short waves
        (3, 2, 2, 3, [7, 3, 8], [4], False),  # a cut within the epoch, before which VW 1 has come to its end
        (4, 1, 1, 1, [3, 3, 2, 3], [1, 2], True),
        (2, 2, 2, (2, 5), [6, 14], [], False),  # unequal waves, three on each
        (3, 2, 3, (1, 4, 3), [5, 18, 13], [2, 3], True),
    ],
)
def test_vws_in_threads_are_the_oracle(
    n: int, servers: int, in_flight: int, wave: int | Sequence[int], counts: list[int], cuts: list[int], mean: bool
) -> None:
    model, data = mlp(), batches_of(n, counts)
    cluster = Cluster(servers)
    aggregate = {"aggregate": "mean" if mean else "sum"}
    runs = all_at_once(
        [lambda i=i: train(cluster, i, model, data, in_flight, wave, cuts, **aggregate) for i in range(n)]  # type: ignore[misc]
    )
    for run, want in zip(runs, expected(model, data, in_flight, wave, cuts, mean=mean), strict=True):
        assert_same(vars(want), vars(run))
    assert cluster.hosts[0].service.left_by is not None


FAULTS: dict[str, Callable[[Cluster], Faults]] = {
    "coordinator restarts after a push": lambda cluster: Faults(
        then={Address(1, 0, "Pushed", 1): cluster.hosts[0].restart}
    ),
    "shard restarts in a pull": lambda cluster: Faults(then={Address(0, 1, "Read", 2): cluster.hosts[1].restart}),
    "both restart, one after the other": lambda cluster: Faults(
        then={
            Address(0, 0, "Pulled", 1): cluster.hosts[0].restart,
            Address(1, 1, "StageUpdate", 2): cluster.hosts[1].restart,
        }
    ),
    "replies are lost": lambda cluster: Faults(
        at={
            Address(0, 0, "Join", 0): Fault.LOST_REPLY,
            Address(0, 0, "Pushed", 0): Fault.LOST_REPLY,
            Address(1, 1, "StageUpdate", 1): Fault.LOST_REPLY,
            Address(1, 0, "Pulled", 1): Fault.LOST_REPLY,
        }
    ),
    "requests come twice, or half": lambda cluster: Faults(
        at={
            Address(0, 0, "Pushed", 0): Fault.TWICE,
            Address(1, 1, "StageUpdate", 1): Fault.TWICE,
            Address(0, 1, "StageUpdate", 1): Fault.CUT_OFF,
            Address(0, 1, "Load", 0): Fault.CUT_OFF,
        }
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("wave", "counts"), [(2, [6, 5]), ((2, 3), [6, 8])], ids=["equal", "unequal"])
def test_faults_leave_no_trace_in_the_weights(wave: int | Sequence[int], counts: list[int], name: str) -> None:
    """Also where waves are unequal, as an update's name counts waves and not minibatches (law L5)."""
    model, data = mlp(), batches_of(2, counts)
    cluster = Cluster(2, lease=3.0)
    faults = cluster.faults = FAULTS[name](cluster)
    runs = all_at_once([lambda i=i: train(cluster, i, model, data, 2, wave) for i in range(2)])  # type: ignore[misc]
    for run, want in zip(runs, expected(model, data, 2, wave, []), strict=True):
        assert_same(vars(want), vars(run))
    assert faults.happened == {*faults.at, *faults.then}, "a fault has not happened"


def test_a_wave_needs_all_at_d_0_and_not_beyond() -> None:
    model = mlp()
    zeros = [torch.zeros_like(weight) for weight in model.parameters()]
    cluster = Cluster(1)
    signature = signature_of(model, 2, 1, clock_distance=2)
    with cluster.client(0, signature) as fast, cluster.client(1, signature) as slow:
        all_at_once([lambda: fast.join(list(model.parameters())), lambda: slow.join(zeros)])
        fast.synchronise(zeros)
        fast.synchronise(zeros)  # two waves ahead, which is D
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(fast.synchronise, zeros)
            slow.synchronise(zeros)
            third.result(WAIT)
        assert cluster.clocks() == [3, 1]
        fast.leave()
        slow.leave()


def test_a_gather_gives_everyone_everything() -> None:
    model = mlp()
    cluster = Cluster(2)
    signature = signature_of(model, 3, 2)

    def vw(i: int) -> list[dict[int, bytes]]:
        with cluster.client(i, signature) as client:
            client.join(list(model.parameters()))
            return [client.gather(b"x" * i), client.gather(bytes([i]))]

    for found in all_at_once([lambda i=i: vw(i) for i in range(3)]):  # type: ignore[misc]
        assert found == [{0: b"", 1: b"x", 2: b"xx"}, {0: b"\0", 1: b"\1", 2: b"\2"}]


def test_an_update_with_a_nan_is_not_pushed_and_named() -> None:
    model = mlp()
    cluster = Cluster(1)
    with cluster.client(0, signature_of(model, 1, 1)) as client:
        before = [weight.clone() for weight in client.join(list(model.parameters()))]
        update = [torch.zeros_like(weight) for weight in model.parameters()]
        update[2][0, 0] = float("nan")
        with pytest.raises(LocalFault, match=r"wave 0 has a NaN or infinity in 'net\.2\.weight'"):
            client.synchronise(update)
        update[2][0, 0] = 0
        assert_same(before, client.synchronise(update))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_update_is_added_from_where_a_vw_on_the_servers_host_wrote_it(shared_memory: bool) -> None:
    size = 2 * LEAST
    signature = TrainingSignature("", 1, 0, "sum", 1, (), (Parameter("w", (size // 4,), "float32", "float32"),))
    service = Service(30.0)
    with (
        GrpcServer(service) as server,
        closing(GrpcChannel(server.address, shared_memory=shared_memory)) as channel,
        Client([channel], signature, [[0]], 0, 0, timeout=WAIT, longest_wait=WAIT) as client,
    ):
        client.join([torch.ones(size // 4)])
        for wave in range(3):
            (buffer,) = client.update_buffers()
            buffer.fill_(wave)
            (weights,) = client.synchronise([buffer] if wave % 2 else [buffer.clone()])
            assert torch.equal(weights, torch.full_like(weights, 1 + sum(range(wave + 1))))
            assert service.bytes_held == (1 if shared_memory else 2) * size


def test_a_vw_with_another_model_is_refused_by_name() -> None:
    cluster = Cluster(1)
    model, other = mlp(), mlp()
    other.net[0] = torch.nn.Linear(6, 17)
    came = threading.Event()
    cluster.faults.then[Address(0, 0, "Join", 0)] = came.set
    signatures = signature_of(model, 2, 1), signature_of(other, 2, 1)
    with (
        ThreadPoolExecutor(1) as pool,
        cluster.client(0, signatures[0]) as first,
        cluster.client(1, signatures[1]) as second,
    ):
        joined = pool.submit(first.join, list(model.parameters()))
        assert came.wait(WAIT)
        with pytest.raises(RemoteFault, match=r"'net\.0\.weight' is float32 \[17, 6\] instead of float32 \[16, 6\]"):
            second.join(list(other.parameters()))
        first.cancel()
        with pytest.raises(Cancelled):
            joined.result(WAIT)


def test_a_failure_ends_all_that_wait() -> None:
    model = mlp()
    cluster = Cluster(1)
    signature = signature_of(model, 2, 1)
    zeros = [torch.zeros_like(weight) for weight in model.parameters()]

    def fails() -> None:
        with pytest.raises(ValueError, match="bad batch"), cluster.client(1, signature) as client:  # noqa: PT012
            client.join(zeros)
            raise ValueError("bad batch")

    def waits() -> None:
        with cluster.client(0, signature) as client:
            client.join(zeros)
            with pytest.raises(PeerFailed, match="VW 1 failed: ValueError: bad batch"):
                client.synchronise(zeros)

    all_at_once([fails, waits])
    assert cluster.hosts[0].service.left_by is not None


def test_a_refused_request_for_bytes_has_no_reply_that_could_not_fit() -> None:
    """A pull from a server that had restarted once came back as a reply without its bytes, which a transport that
    checks sizes refuses in words of its own; the VW ended, instead of joining again."""
    service = Service(30.0)

    def send(message: Request | ShardRequest, body: bytes = b"") -> Any:
        method, header = SHARD_METHOD if isinstance(message, ShardRequest) else COORDINATOR_METHOD, encode(message)
        return decode(service.serve(IncomingCall(method, header, len(body), filler(body))).header)

    with pytest.raises(CallRefused, match=r"^generation: ") as caught:
        send(Read(0, 0, "of another server", 0, ()))
    assert RemoteFault.parse(str(caught.value)).refusal is Refusal.GENERATION
    send(Join(0, 0, 1, signature_of(mlp(), 2, 1), Report(), ("",)))
    send(Leave(1, 0, "ValueError: bad batch"))
    with pytest.raises(CallRefused, match=r"^failed: VW 1 failed: ValueError: bad batch"):
        send(Gather(0, 0, "", 0, 0))
    assert RemoteFault.parse("not one of ours").refusal is Refusal.MALFORMED


@pytest.mark.parametrize("by", ["a call", "a heartbeat"])
def test_what_was_left_with_a_coordinator_is_left_again_with_the_next_one(by: str, tmp_path: Path) -> None:
    """It was lost with the one that died, and a VW that came back asked for it for ever."""
    model, file = mlp(), tmp_path / "second"
    file.write_bytes(b"second")
    cluster = Cluster(1, lease=0.3)
    with cluster.client(0, signature_of(model, 1, 1)) as client:
        client.join(list(model.parameters()))
        client.kept.leave("one", b"first")
        client.kept.leave("two", file)
        client.kept.leave("three", b"third")
        client.kept.leave("three", None)
        cluster.hosts[0].restart()
        if by == "a call":
            client.synchronise([torch.ones_like(weight) for weight in model.parameters()])
        assert client.kept.recall("one") == b"first"
        assert client.kept.recall("two") == b"second"
        assert isinstance(client.ask(Recall(0, client.member.incarnation, "three")), NotYet)


def test_a_silent_vw_is_left_out_and_the_others_go_on() -> None:
    model = mlp()
    cluster = Cluster(1, lease=0.5)
    signature = signature_of(model, 2, 1)
    one = [torch.ones_like(weight) for weight in model.parameters()]
    silent = cluster.client(1, signature)  # never entered: it has no heartbeat
    with cluster.client(0, signature) as client:
        start, _ = all_at_once([lambda: client.join(list(model.parameters())), lambda: silent.join(one)])
        start = [weight.clone() for weight in start]
        merged = client.synchronise(one)
        assert_same([weight + 1 for weight in start], merged)
        with pytest.raises(RemoteFault, match="silent for longer than its lease") as caught:
            silent.synchronise(one)
        assert caught.value.refusal is Refusal.LEFT_OUT
        silent.close()


def test_whoever_is_left_is_told_once_what_died_with_a_shard_and_a_vw() -> None:
    """Member knew it, and nobody asked: updates were gone without a word."""
    model = mlp()
    cluster = Cluster(2, lease=0.5)
    signature = signature_of(model, 2, 2, clock_distance=3)
    one = [torch.ones_like(weight) for weight in model.parameters()]
    told: list[Lost] = []
    silent = cluster.client(1, signature)  # never entered: it has no heartbeat
    with closing(silent), cluster.client(0, signature, updates_lost=told.append) as client:
        start, _ = all_at_once([lambda: client.join(list(model.parameters())), lambda: silent.join(one)])
        start = [weight.clone() for weight in start]
        for _ in range(2):
            silent.synchronise(one)
        cluster.hosts[1].restart()
        assert_same([weight + 1 for weight in start], client.synchronise(one))
        assert told == [Lost(1, 0, 0, 1)]
        cluster.hosts[0].restart()
        assert_same([weight + 1 + 1 for weight in start], client.synchronise(one))
        assert told == [Lost(1, 0, 0, 1)]


def test_heartbeats_have_a_connection_of_their_own() -> None:
    """On a slow link they waited behind weights for longer than the lease, and a virtual worker that lived was lost."""
    cluster = Cluster(1, lease=0.3)
    model, beats = mlp(), threading.Semaphore(0)

    class Heart(DirectChannel):
        def call(self, method: str, header: bytes, *args: Any, **options: Any) -> bytes:
            assert isinstance(decode(header), Heartbeat)
            beats.release()
            return super().call(method, header, *args, **options)

    cluster.faults.then[Address(0, 0, "Heartbeat", 1)] = lambda: None  # the first one is part of joining
    heart = Heart(cluster.hosts[0], 0, 0, Faults())
    with cluster.client(0, signature_of(model, 1, 1), heart=heart) as client:
        client.join(list(model.parameters()))
        assert all(beats.acquire(timeout=WAIT) for _ in range(2))
    assert not cluster.faults.happened
