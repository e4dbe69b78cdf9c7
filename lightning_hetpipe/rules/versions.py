"""Versions of the weights: the one that a minibatch uses (law L1), and how long one must be kept.

Another weight policy is another formula here; ``pipeline/weight_stash.py`` keeps the versions that it needs.
"""

from __future__ import annotations


def version_of(minibatch: int, in_flight: int, empty_at: int) -> int:
    """The version that ``minibatch`` uses on every stage, forward and backward, under weight stashing.

    Args:
        minibatch: p, counted from 1.
        in_flight: Nm.
        empty_at: v_e, the version at which the pipeline last started empty.
    """
    return max(empty_at, minibatch - in_flight)


def last_reader(version: int, in_flight: int) -> int:
    """The last minibatch that uses ``version``: the first Nm minibatches all use v_e, each later version serves one.

    A version may be overwritten once this minibatch is done. As minibatch p is done before version p is published,
    version v's place is free when version v + Nm is published: Nm places are enough (HetPipe, section 4).
    """
    return version + in_flight
