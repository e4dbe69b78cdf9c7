"""``hetpipe-plan measure=links``: measure the links of this machine, and write them as a cluster."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from functools import reduce
from itertools import combinations
from pathlib import Path

import torch
from omegaconf import DictConfig

from lightning_hetpipe.accelerator import accelerates, all_devices
from lightning_hetpipe.cli.config_checks import synchronisation
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement.device_placement import discovered_cluster
from lightning_hetpipe.planning.model.cluster import Link, Node
from lightning_hetpipe.planning.model.units import in_bandwidth, in_seconds
from lightning_hetpipe.server.process.link_probe import LARGEST, link_to, slower, timed_link
from lightning_hetpipe.server.transport.interface import CallRefused, Unreachable

FILE = "cluster.yaml"


def run(config: DictConfig) -> None:
    """Measure the links between devices of this machine, and from here to the servers of ``strategy.wsp.servers``.

    Print the cluster as a file of the group ``cluster``, and save it in the run's folder.

    Raises:
        SettingError: if a server does not answer, or refuses.
    """
    (node,) = discovered_cluster().nodes
    pairs = links_between(all_devices())
    text = as_yaml(node, pairs, _links_to_servers(config))
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text, encoding="utf-8")
    print(f"{text}\ncluster  {folder / FILE}")


def as_yaml(node: Node, pairs: Mapping[tuple[int, int], Link], servers: Mapping[str, Link]) -> str:
    """Return YAML of the cluster of this machine, ``node``, with its slowest links. Comments list all measured links.

    ``pairs`` has links between devices of the node, ``servers`` links to other machines by address of their server.
    """
    places = {pair: " and ".join(f"{node.devices[each].name}:{each}" for each in pair) for pair in pairs}
    measured = [f"{places[pair]}: {link}" for pair, link in pairs.items()]
    measured += [f"{node.name} and the server at {address}: {link}" for address, link in servers.items()]
    names = ", ".join(json.dumps(device.name) for device in node.devices)
    return "\n".join(
        [
            f"# Measured on {node.name} by hetpipe-plan measure=links; a link of several is the slowest of them.",
            *(f"# {each}" for each in measured),
            *([] if measured else ["# There is no link: one device, and no strategy.wsp.servers on other machines."]),
            "_target_: lightning_hetpipe.Cluster",
            *_link_line("link", servers.values(), "between nodes"),
            "nodes:",
            f"  - name: {json.dumps(node.name)}",
            f"    devices: [{names}]",
            *_link_line("    link", pairs.values(), "between devices"),
            *(f"  # To add the machine of {each}, run hetpipe-plan measure=links there." for each in servers),
            "",
        ]
    )


def _link_line(key: str, links: Collection[Link], what: str) -> list[str]:
    if not links:
        return []
    link = reduce(slower, links)
    amounts = f"bandwidth: {in_bandwidth(link.bandwidth)}, latency: {in_seconds(link.latency)}"
    return [f"{key}: {{{amounts}}}  # {what}"]


def _links_to_servers(config: DictConfig) -> dict[str, Link]:
    from lightning_hetpipe.server.transport.grpc_channel import GrpcChannel  # only now: --help needs no gRPC

    settings = synchronisation(config)
    security = settings.security.from_environment()
    found = {}
    for address in settings.servers or ():
        try:
            # Other machines share no memory with this one.
            with closing(GrpcChannel(address, security, shared_memory=False)) as channel:
                found[address] = link_to(channel)
        except (Unreachable, CallRefused) as error:
            way = "; start hetpipe-server there" if isinstance(error, Unreachable) else ""  # a refusal has a way out
            raise SettingError(
                f"strategy.wsp.servers has {address}, and the link to it cannot be measured: {error}{way}"
            ) from error
    return found


def links_between(devices: Sequence[torch.device], largest: int = LARGEST) -> dict[tuple[int, int], Link]:
    """Measure the link of each pair of accelerators, in its slower direction, by their places in ``devices``.

    The largest copy has ``largest`` bytes, which each device needs meanwhile.
    """
    return {
        (one, other): slower(_link(devices[one], devices[other], largest), _link(devices[other], devices[one], largest))
        for one, other in combinations(range(len(devices)), 2)
        if accelerates(devices[one]) and accelerates(devices[other])
    }


def _link(source: torch.device, target: torch.device, largest: int) -> Link:
    sent = torch.zeros(largest, dtype=torch.uint8, device=source)
    received = torch.empty(largest, dtype=torch.uint8, device=target)
    torch.accelerator.synchronize(source)

    def copy(nbytes: int) -> None:
        received[:nbytes].copy_(sent[:nbytes])
        torch.accelerator.synchronize(source)
        torch.accelerator.synchronize(target)

    return timed_link(copy, largest)
