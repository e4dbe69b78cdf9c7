"""Strategies for comparisons with the oracle's weight stashing."""

from __future__ import annotations

from typing import Any

from lightning_hetpipe import HetPipeStrategy


def stashing(*args: Any, **settings: Any) -> HetPipeStrategy:
    """A HetPipeStrategy whose minibatches use stashed weights, whatever the optimizer is."""
    return HetPipeStrategy(*args, **{"weights": "stash", **settings})
