"""Profiles in which a layer takes most of the time, so that a plan joins devices for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from lightning_hetpipe.planning.model.profile import Profile, Times

LONGEST = Times(0.004, 0.008)


def with_longest(
    profiled: Callable[..., Profile],
    layers: Collection[str],
    told: Callable[[Profile], object] = lambda _: None,
    longest: Times = LONGEST,
) -> Callable[..., Profile]:
    """Measure as ``profiled`` does, and say that ``layers`` take most of the time, and a part of one its part of it.

    Args:
        profiled: Measures.
        layers: Their names; others may be, too.
        told: Is given what was measured.
        longest: Times of each of these layers.
    """

    def found(*args: Any, **settings: Any) -> Profile:
        made = profiled(*args, **settings)
        told(made)
        times = [longest if layer.name in layers else Times(1e-5, 2e-5) for layer in made.layers]
        widths = {layer: replace(own, measured={}) for layer, own in made.widths.items()}
        return replace(made, times=dict.fromkeys(made.times, times), widths=widths)

    return found
