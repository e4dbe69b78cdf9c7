"""Copies of weights at the last synchronisation of virtual workers, and the update from them (law L3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hetpipe.torch_private.tensors import address_of, foreach_copy_

_HOST = torch.device("cpu")


def copies_kept(update_dtype: str | None) -> float:
    """Return the number of copies of trained weights that a virtual worker keeps on their devices to synchronise. One
    copy is of the last synchronisation. ``update_dtype`` adds the roundings so far, and the rounded update. Copies of
    frozen weights lie on the host."""
    if update_dtype is None:
        return 1.0
    sent: torch.dtype = getattr(torch, update_dtype)
    return 2.0 + sent.itemsize / torch.get_default_dtype().itemsize


class WeightCopies:
    """Live weights of a module, and their copies, which exist after :meth:`begin`.

    Bounds: :func:`copies_kept` of the trained weights on their devices, and of the frozen weights on the host.

    Attributes:
        named: All parameters of the module, by name.
        last: The copies, in this order.
        roundings: Losses of each parameter's updates by ``update_dtype`` so far. Empty without it.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], update_dtype: str | None) -> None:
        self.named = list(named)
        self.last: list[Tensor] = []
        self.roundings: list[Tensor] = []
        self._dtype: torch.dtype | None = None if update_dtype is None else getattr(torch, update_dtype)

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Make ``weights`` the live weights, and copy them."""
        self._take(weights, everything=True)
        self.last = [parameter.detach().to(_home(parameter), copy=True) for _, parameter in self.named]
        self.roundings = [torch.zeros_like(last) for last in self.last] if self._dtype is not None else []

    def forget(self) -> None:
        """Free the memory of the copies."""
        self.last, self.roundings = [], []

    # Their places.

    def follow(self) -> None:
        """Move the copies of trained weights to the devices of their stages, and the other copies to the host."""
        for copies in (self.last, self.roundings):
            for target in (_HOST, None):  # all moves off a device come before moves to it
                for index, (copy, (_, parameter)) in enumerate(zip(copies, self.named, strict=False)):
                    if copy.device != (home := _home(parameter)):
                        copies[index] = copy.to(target or home)

    def go_to_holders(self) -> None:
        """Move the copies of trained weights to the other processes that hold the weights."""
        for copies in (self.last, self.roundings):
            for index, (copy, (_, parameter)) in enumerate(zip(copies, self.named, strict=False)):
                if parameter.requires_grad and address_of(copy) != address_of(parameter) is None:
                    copies[index] = torch.empty_like(parameter.detach()).copy_(copy)

    # Differences to the live weights.

    def changed(self, *, frozen: bool = False) -> list[int]:
        """Return the indices of weights, or only of ``frozen`` weights, that differ from their copies."""
        pairs = enumerate(zip(self.named, self.last, strict=True))
        return [n for n, ((_, p), last) in pairs if not (frozen and p.requires_grad) and not _equal(p, last)]

    def update(self, buffers: Callable[[], list[Tensor]], everything: bool = False) -> list[Tensor]:
        """Return the update, w_local - w of the last synchronisation, in the dtype in which it is sent.

        Frozen parameters are not learnt. After changes by callbacks, all take virtual worker 0's values at the next
        cut, and servers get them when an epoch begins (``everything``). An infinity in a frozen parameter, as in masks,
        is no difference. ``buffers`` returns tensors for an update that is not rounded.
        """
        same = [
            not p.requires_grad and (not everything or _equal(p, last))
            for (_, p), last in zip(self.named, self.last, strict=True)
        ]
        if self._dtype is None:
            places = buffers()
            for (_, parameter), last, place, zero in zip(self.named, self.last, places, same, strict=True):
                if zero:
                    place.zero_()
                elif parameter.device == last.device == place.device and address_of(parameter) is not None:
                    torch.sub(parameter.detach(), last, out=place)
                else:
                    place.copy_(parameter.detach().to(last.device) - last)
            return places
        sent = []
        for index, ((_, parameter), last, zero) in enumerate(zip(self.named, self.last, same, strict=True)):
            update = torch.zeros_like(last) if zero else parameter.detach().to(last.device) - last
            update += self.roundings[index]
            sent.append(update.to(self._dtype))
            self.roundings[index] = update - sent[-1].to(update.dtype)
        return sent

    def no_update(self) -> list[Tensor]:
        """Return an update by zero."""
        return [torch.zeros_like(last, dtype=self._dtype, device="cpu") for last in self.last]

    # Synchronisation.

    def settle(self, weights: Sequence[Tensor], everything: bool = False) -> None:
        """Make ``weights`` the live weights and their copies, frozen ones only with ``everything``."""
        self._take(weights, everything)
        taken = [(last, p) for (_, p), last in zip(self.named, self.last, strict=True) if everything or p.requires_grad]
        with torch.no_grad():
            foreach_copy_([last for last, _ in taken], [parameter.detach() for _, parameter in taken])

    def go_back(self) -> None:
        """Make the copies the live weights."""
        self._take([last.detach() for last in self.last], everything=False)

    def _take(self, weights: Sequence[Tensor], everything: bool) -> None:
        """Make ``weights`` the live weights. Frozen weights are equal everywhere from the start, and need
        ``everything``."""
        pairs = [(p, w) for (_, p), w in zip(self.named, weights, strict=True) if everything or p.requires_grad]
        with torch.no_grad():
            foreach_copy_([parameter for parameter, _ in pairs], [weight for _, weight in pairs])


def _home(parameter: Tensor) -> torch.device:
    """Return the device for copies of ``parameter``. It is the host if the parameter is frozen, because cuts alone read
    it."""
    return parameter.device if parameter.requires_grad else _HOST


def _equal(parameter: Tensor, copy: Tensor) -> bool:
    return torch.equal(parameter.to(copy.device), copy)
