"""Updates that virtual workers push: global weights are those of the start and each of them, once (law L5)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetpipe.server.process.client import Client


class Pushed:
    """Record of w_0 and of all updates that this process pushes from now on, in the order of its parameters."""

    def __init__(self) -> None:
        self.start: list[Tensor] = []
        self.updates: list[list[Tensor]] = []
        join, take = Client.join, Client._take

        def joining(client: Client, weights: Sequence[Tensor]) -> list[Tensor]:
            found = join(client, weights)
            self.start = self.start or [weight.clone() for weight in found]
            return found

        def taking(client: Client, update: Sequence[Tensor]) -> None:
            self.updates.append([each.clone() for each in update])
            take(client, update)

        setattr(Client, "join", joining)  # noqa: B010
        setattr(Client, "_take", taking)  # noqa: B010


def check_sum(found: Sequence[dict[str, Any]], later: Container[int] = ()) -> None:
    """The weights of the end are w_0 and all that was pushed, each update once, whatever their order was.

    Those in ``later`` came when the others had begun, whose first weights are others than w_0.

    Sums in another order differ by roundings; an update that was missing or there twice would be seen.
    """
    tolerance = 1e-5
    everyones: list[Pushed] = [record["pushed"] for record in found]
    total = [weight.double() for weight in everyones[0].start]
    for vw, pushed in enumerate(everyones):
        assert vw in later or all(map(torch.equal, pushed.start, everyones[0].start))
        for update in pushed.updates:
            assert max(each.abs().max().item() for each in update) > 100 * tolerance, "it would not be missed"
            for weight, each in zip(total, update, strict=True):
                weight += each.double()
    for record in found:
        for weight, (name, end) in zip(total, record["end"].weights.items(), strict=True):
            assert torch.allclose(weight, end.double(), rtol=0, atol=tolerance), name
