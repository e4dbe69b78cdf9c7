"""One process of the transport benchmark: the server, or a client; run by benchmarks.transport, not by hand."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Measurement, announce, wait_for_others
from lightning_hetpipe.server.process.client import Client
from lightning_hetpipe.server.process.sessions import Service
from lightning_hetpipe.server.protocol.messages import Parameter, TrainingSignature
from lightning_hetpipe.server.transport.frames import CHUNK as MESSAGE
from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel
from lightning_hetpipe.server.transport.grpc_import import grpc
from lightning_hetpipe.server.transport.grpc_server import LIMITS, GrpcServer
from lightning_hetpipe.server.transport.interface import IncomingCall, Reply
from lightning_hetpipe.server.transport.security import Security
from lightning_hetpipe.server.transport.shared_memory import memory

CHUNK = 4 << 20
GIB = 1 << 30
Round = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """Task of one process; ``size`` in bytes, ``folder`` for the address and the certificates."""

    role: str
    carrier: str
    client: int
    clients: int
    size: int
    rounds: int
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def security(self) -> Security:
        if self.carrier != "tls":
            return Security()
        ca, certificate, key = (str(Path(self.folder, name)) for name in ("ca.pem", "certificate.pem", "key.pem"))
        return Security(ca, certificate, key, token="of-the-benchmark")

    @property
    def address(self) -> Path:
        return Path(self.folder, "address")


def view(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()  # whose annotations do not say that it is a buffer
    return memoryview(array).cast("B")


def shared(size: int) -> torch.Tensor:
    """A block of shared memory, with every page already allocated."""
    return torch.frombuffer(memory(size), dtype=torch.float32).fill_(0)


class Sums:
    """The least that a server does: stages an update whole, adds it, and gives the weights. A `Handler`."""

    def __init__(self, job: Job) -> None:
        self.weights = shared(job.size)
        seen = job.carrier == "block"
        self.staged = [torch.ones(0 if seen else job.size // 4) for _ in range(job.clients)]
        self._lock = threading.Lock()

    def add(self, update: torch.Tensor) -> None:
        with self._lock:
            self.weights.add_(update)

    def serve(self, call: IncomingCall) -> Reply:
        if call.method == "pull":
            return Reply(b"", [view(self.weights)])
        body = view(self.staged[int(call.header)])[: call.size] if call.offered is None else call.offered
        call.receive(body)
        self.add(torch.frombuffer(body, dtype=torch.float32))
        return Reply(b"")


@contextmanager
def raw_server(job: Job, sums: Sums) -> Iterator[str]:
    """The same over plain sockets: whole bodies in chunks, one connection and thread per client."""

    def talk(connection: socket.socket, client: int) -> None:
        with connection:
            while connection.recv(1):
                receive(connection, view(sums.staged[client]))
                sums.add(sums.staged[client])
                send(connection, view(sums.weights))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads: list[threading.Thread] = []

        def accept() -> None:
            for client in range(job.clients):
                connection = listening.accept()[0]
                threads.append(threading.Thread(target=talk, args=(connection, client), name=f"raw-{client}"))
                threads[-1].start()

        accepting = threading.Thread(target=accept, name="raw-accept", daemon=True)
        accepting.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        accepting.join()
        for thread in threads:
            thread.join()


def receive(connection: socket.socket, into: memoryview) -> None:
    start = 0
    while start < len(into):
        count = connection.recv_into(into[start : start + CHUNK])
        if not count:
            raise EOFError("the other side is gone")
        start += count


def send(connection: socket.socket, data: memoryview) -> None:
    for start in range(0, len(data), CHUNK):
        connection.sendall(data[start : start + CHUNK])


@contextmanager
def bare_server(job: Job) -> Iterator[str]:
    """gRPC itself: a stream is read to its end and dropped, and as many messages come back."""

    def echo(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(job.size // MESSAGE):
            next(messages)
        yield from repeat(bytes(MESSAGE), job.size // MESSAGE)

    server = grpc.server(ThreadPoolExecutor(job.clients), options=LIMITS)
    handlers = {"stream": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def whole_server(job: Job) -> GrpcServer:
    """The server of a training."""
    return GrpcServer(Service(60.0), security=job.security())


def serve(job: Job) -> None:
    """The server, from before the clients connect until they have measured; announces its peak of memory."""
    servers: dict[str, Callable[[], AbstractContextManager[str | GrpcServer]]] = {
        "socket": lambda: raw_server(job, Sums(job)),
        "bare": lambda: bare_server(job),
        "whole": lambda: whole_server(job),
    }
    held = 0 if job.carrier == "bare" else (1 + job.clients) * job.size
    before = peak()
    server = servers.get(job.carrier, lambda: GrpcServer(Sums(job), security=job.security()))()
    with server as running:
        job.address.write_text(running if isinstance(running, str) else running.address)
        for _ in range(3):
            wait_for_others()
    announce(Measurement("server", 0.0, 0.0, 1, None, {"extra_mib": (peak() - before - held) / 2**20}))


def peak() -> int:
    """The process's own high-water mark of resident memory, in bytes; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@contextmanager
def rounds_of(job: Job) -> Iterator[Round]:
    """Connects; gives what does one push with its addition and one pull."""
    update, weights = torch.ones(job.size // 4), torch.ones(job.size // 4)
    if job.carrier == "memory":
        block, server = torch.ones(job.size // 4), torch.ones(job.size // 4)

        def copies() -> None:
            block.copy_(update)
            server.add_(block)
            weights.copy_(server)

        yield copies
        return
    address = job.address.read_text()
    if job.carrier == "socket":
        with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as connection:

            def talks() -> None:
                connection.sendall(b"+")
                send(connection, view(update))
                receive(connection, view(weights))

            yield talks
        return
    if job.carrier == "bare":
        with grpc.insecure_channel(address, LIMITS) as bare:

            def stream() -> None:
                chunks = repeat(bytes(MESSAGE), job.size // MESSAGE)
                for _ in bare.stream_stream("/bare/stream")(chunks):
                    pass

            yield stream
        return
    seen = job.carrier in ("block", "whole")
    with closing(GrpcChannel(address, job.security(), shared_memory=seen)) as channel:
        if job.carrier == "whole":
            parameter = Parameter("w", (job.size // 4,), "float32", "float32")
            signature = TrainingSignature("", job.clients, 0, "sum", 1, (), (parameter,))
            with Client([channel], signature, [[0]], job.client, 0) as client:
                client.join([weights])

                def synchronises() -> None:
                    client.synchronise([update])

                yield synchronises
            return
        who = str(job.client).encode()
        sent = shared(job.size) if seen else update

        def calls() -> None:
            if seen:
                sent.copy_(update)
            channel.call("push", who, [view(sent)])
            channel.call("pull", who, (), [view(weights)])

        yield calls


def measure(job: Job) -> None:
    """A client: a round to warm up, then the measured ones, at the same time as the other clients'."""
    wait_for_others()
    with rounds_of(job) as one_round:
        one_round()
        wait_for_others()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(job.rounds):
            one_round()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    wait_for_others()
    announce(Measurement("client", job.rounds * 2 * job.size / GIB / wall, cpu / wall, 1, None))


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    if job.role == "server":
        serve(job)
    else:
        measure(job)


if __name__ == "__main__":
    main()
