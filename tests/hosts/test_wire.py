"""Tensors in messages arrive with their bits and strides."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.hosts.orders import Do
from lightning_hetpipe.hosts.wire import Wire


def layouts() -> dict[str, Tensor]:
    image = torch.randn(8, 4, 33, 35)
    return {
        "contiguous": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(200, 200).t(),
        "sliced": torch.randn(200, 400)[:, ::2],
        "expanded": torch.randn(200, 1, 200).expand(200, 5, 200).permute(1, 2, 0),
        "complex": torch.randn(200, 200, dtype=torch.cfloat).conj().t(),
        "a dimension of one": torch.randn(1, 40000, 1).transpose(0, 1),
    }


@pytest.mark.parametrize("layout", layouts())
def test_tensors_arrive_with_their_bits_and_strides(layout: str) -> None:
    here, there = map(Wire, socket.socketpair())
    sent = layouts()[layout]
    sender = threading.Thread(target=here.send, args=(Do("put", [0, sent]),))  # a socket takes no large tensor at once
    sender.start()
    found: Tensor = there.receive().arguments[1]
    sender.join()
    here.close()
    there.close()
    assert torch.equal(found, sent)
    assert found.stride() == sent.stride()
