"""hetpipe-plan measure=links: prints a cluster with the links that were measured, which plans take as it is."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_hetpipe import Cluster
from lightning_hetpipe.cli.measured_links import as_yaml
from lightning_hetpipe.cli.targets import built
from lightning_hetpipe.planning.model.cluster import Link, Node
from lightning_hetpipe.server.process.sessions import Sessions
from lightning_hetpipe.server.transport.grpc_server import GrpcServer
from lightning_hetpipe.server.transport.security import Security
from tests.cli.test_plan import Run, folder, plan
from tests.server.transports import eventually
from tests.support.namespaces import Unavailable, finished, network

__all__ = ["folder", "plan"]

NODE = Node("box", ["RTX-3090", "RTX-3090", "T4"])
PAIRS = {(0, 1): Link(11.94e9, 12e-6), (0, 2): Link(6e9, 15e-6), (1, 2): Link(6.2e9, 11e-6)}
SERVERS = {"10.0.0.2:7070": Link(117e6, 80e-6), "10.0.0.3:7070": Link(1.1e9, 90e-6)}
SECONDS = 120.0


def test_the_text_says_what_was_measured_and_is_a_cluster_of_the_slowest_links() -> None:
    text = as_yaml(NODE, PAIRS, SERVERS)
    assert text == (
        "# Measured on box by hetpipe-plan measure=links; a link of several is the slowest of them.\n"
        "# RTX-3090:0 and RTX-3090:1: 11.9 GB/s with 0.012 ms latency\n"
        "# RTX-3090:0 and T4:2: 6 GB/s with 0.015 ms latency\n"
        "# RTX-3090:1 and T4:2: 6.2 GB/s with 0.011 ms latency\n"
        "# box and the server at 10.0.0.2:7070: 117 MB/s with 0.08 ms latency\n"
        "# box and the server at 10.0.0.3:7070: 1.1 GB/s with 0.09 ms latency\n"
        "_target_: lightning_hetpipe.Cluster\n"
        "link: {bandwidth: 117 MB/s, latency: 0.09 ms}  # between nodes\n"
        "nodes:\n"
        '  - name: "box"\n'
        '    devices: ["RTX-3090", "RTX-3090", "T4"]\n'
        "    link: {bandwidth: 6 GB/s, latency: 0.015 ms}  # between devices\n"
        "  # To add the machine of 10.0.0.2:7070, run hetpipe-plan measure=links there.\n"
        "  # To add the machine of 10.0.0.3:7070, run hetpipe-plan measure=links there.\n"
    )
    cluster = built(OmegaConf.create({"cluster": OmegaConf.create(text)}), "cluster", Cluster)
    assert cluster == Cluster([Node("box", NODE.devices, Link(6e9, 15e-6))], Link(117e6, 90e-6))


def test_a_machine_without_links(plan: Run, folder: Path) -> None:
    said, _ = plan("measure=links", "hydra.run.dir=run")
    assert "# There is no link: one device, and no strategy.wsp.servers on other machines.\n" in said
    assert f"cluster  {folder / 'run' / 'cluster.yaml'}" in said
    written = (folder / "run" / "cluster.yaml").read_text()
    assert said.startswith(written)
    cluster = built(OmegaConf.create({"cluster": OmegaConf.create(written)}), "cluster", Cluster)
    assert [device.name for device in cluster.nodes[0].devices] == ["cpu"]
    assert cluster.nodes[0].name == socket.gethostname()


def test_a_server_that_does_not_answer(plan: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    _, error = plan("measure=links", f"strategy.wsp.servers=[127.0.0.1:{port}]", code=2)
    assert error.startswith(f"hetpipe-plan: strategy.wsp.servers has 127.0.0.1:{port}, and the link to it cannot be me")
    assert "; start hetpipe-server there" in error


def test_a_server_with_another_token(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been started: to start it once more is no way out."""
    monkeypatch.setenv("HETPIPE_TOKEN", "wrong")
    with GrpcServer(Sessions(30.0), security=Security(token="right")) as server:
        _, error = plan("measure=links", f"strategy.wsp.servers=[{server.address}]", code=2)
    assert "the token is missing or wrong; give the server's as HETPIPE_TOKEN" in error
    assert "start hetpipe-server" not in error


@pytest.mark.slow
def test_a_link_of_100_mbit_per_second_is_measured(tmp_path: Path) -> None:
    """Within 15%, of which headers take 5%."""
    server = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_server", "address=10.0.0.2:7070"]
    client = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_plan", "measure=links", "hydra.run.dir=run"]
    client += ["strategy.wsp.servers=[10.0.0.2:7070]", "strategy.wsp.security.insecure=true"]
    token = {"HETPIPE_TOKEN": "open-sesame"}
    try:
        with network(2, "100mbit") as (here, there):
            there.start([*server, "security.insecure=true"], tmp_path, token)
            eventually(lambda: "10.0.0.2:7070" in there.listening(), "the server does not listen")
            ((code, _, error),) = finished([here.start(client, tmp_path, token)], SECONDS)
    except Unavailable as why:
        pytest.skip(str(why))
    assert code == 0, error
    cluster = built(
        OmegaConf.create({"cluster": OmegaConf.load(tmp_path / "run" / "cluster.yaml")}), "cluster", Cluster
    )
    assert cluster.link is not None
    assert 0.85 <= cluster.link.bandwidth / 12.5e6 <= 1.15


@pytest.mark.parametrize("setting", ["profile=times.json", "devices=[RTX-3090]", "cluster=mixed_box"])
def test_settings_of_a_plan_are_refused(plan: Run, setting: str) -> None:
    """They had no effect, and nobody said so."""
    _, error = plan("measure=links", setting, code=2)
    assert "measure=links measures this machine and makes no plan" in error
