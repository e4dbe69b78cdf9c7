"""Push + add and pull of 512 MiB by one and by two clients, against the raw path: plain sockets, plain copies."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    ProcessFailed,
    Spread,
    figures_table,
    in_rounds,
    run_together,
    table,
)
from benchmarks.machine import describe_machine
from benchmarks.transport_worker import Job

NAME = "transport"
WORKER = "benchmarks.transport_worker"
TIMEOUT = 600.0
SIZE = 512 << 20
QUICK_SIZE = 64 << 20
CLIENTS = (1, 2)

TITLES = {
    "block": "a shared memory",
    "memory": "b plain copies: memcpy, add_, memcpy",
    "whole": "c a VW's synchronisation, through shared memory",
    "grpc": "d gRPC",
    "bare": "e gRPC itself: messages that nobody fills or reads",
    "socket": "f plain sockets, 4 MiB at a time",
    "tls": "g gRPC with mutual TLS and a token",
}
RATIOS = (
    ("block", "memory", 0.8),
    ("whole", "memory", None),
    ("grpc", "bare", 0.8),
    ("bare", "socket", None),
    ("grpc", "socket", None),
    ("tls", "socket", None),
)
"""Over, under, and the least value hoped for."""


@dataclass(frozen=True)
class Carried:
    """One carrier, measured with some clients at once: GiB/s of all together, and what the server took."""

    rate: float
    extra_mib: float
    """Peak of the server's memory beyond weights and staged updates."""


def certificates(folder: Path) -> None:
    """Makes ca.pem, and certificate.pem with key.pem, for 127.0.0.1."""
    if shutil.which("openssl") is None:
        raise ProcessFailed("certificates are made with the program openssl, which is not installed")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signing = ["-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        ["req", *key, "-x509", "-subj", "/CN=authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem"],
        ["req", *key, "-subj", "/CN=server", "-keyout", "key.pem", "-out", "request.pem"],
        ["x509", *signing, "-extfile", "names", "-out", "certificate.pem"],
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=60)


def measure(carrier: str, clients: int, size: int, rounds: int) -> Carried:
    """Measures one carrier in fresh processes: a server and its clients, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        if carrier == "tls":
            certificates(Path(folder))
        roles = [("server", 0)] * (carrier != "memory") + [("client", client) for client in range(clients)]
        jobs = [Job(role, carrier, client, clients, size, rounds, folder) for role, client in roles]
        announced = run_together([Process(WORKER, (job.to_json(),)) for job in jobs], TIMEOUT)
    return carried([measurement for one in announced for measurement in one])


def carried(measured: Sequence[Measurement]) -> Carried:
    """Clients' rates add up, as they run at the same time."""
    extra = [value.notes["extra_mib"] for value in measured if value.name == "server"]
    rate = sum(value.rate for value in measured if value.name == "client")
    return Carried(rate, float(str(extra[0])) if extra else 0.0)


def run(options: Options) -> Outcome:
    """Measures every carrier with one and with two clients, in interleaved rounds."""
    size = QUICK_SIZE if options.quick else SIZE
    jobs = {
        f"{carrier} {clients}": partial(measure, carrier, clients, size, 3) for clients in CLIENTS for carrier in TITLES
    }
    machine = describe_machine(())
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(machine, size, rounds, failures)


def ratio(rounds: Sequence[Mapping[str, Carried]], over: str, under: str) -> Spread | None:
    """Formed within each round; None if no round has both."""
    return Spread.of_ratios(rounds, over, under, lambda found: found.rate)


def report(
    machine: Mapping[str, object],
    size: int,
    rounds: Sequence[Mapping[str, Carried]],
    failures: Mapping[str, str],
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    figures = _figures(rounds)
    text = [
        f"{NAME}: push + add and pull of {size >> 20} MiB of float32, GiB/s of both directions together",
        f"on {machine['cpu']}, {machine['cpus']} CPUs; torch {machine['torch']}",
        f"load average at the start {machine['load_average']}; medians and ranges over {len(rounds)} round(s)",
        "",
        table(_rows(rounds)),
        "",
        figures_table(figures),
        *(f"\nfailed: {name}\n{reason}" for name, reason in failures.items()),
    ]
    data = {
        "machine": dict(machine),
        "size": size,
        "rounds": [{name: asdict(found) for name, found in one.items()} for one in rounds],
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _rows(rounds: Sequence[Mapping[str, Carried]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("carrier", "clients", "GiB/s", "range", "server's extra MiB")]
    for carrier, title in TITLES.items():
        for clients in CLIENTS:
            found = [one[f"{carrier} {clients}"] for one in rounds if f"{carrier} {clients}" in one]
            if not found:
                rows.append((title, str(clients), "failed", "", ""))
                continue
            rates = Spread.of(value.rate for value in found)
            extra = "" if carrier == "memory" else f"{max(value.extra_mib for value in found):.0f}"
            rows.append((title, str(clients), f"{rates.median:.2f}", f"{rates.low:.2f} .. {rates.high:.2f}", extra))
    return rows


def _figures(rounds: Sequence[Mapping[str, Carried]]) -> list[Figure]:
    return [
        Figure(
            f"{TITLES[over][0]}/{TITLES[under][0]}  push and pull, {_short(over)} over {_short(under)},"
            f" {clients} at once",
            ratio(rounds, f"{over} {clients}", f"{under} {clients}"),
            target=target,
        )
        for over, under, target in RATIOS
        for clients in CLIENTS
    ]


def _short(carrier: str) -> str:
    return re.split("[:,]", TITLES[carrier][2:])[0]
