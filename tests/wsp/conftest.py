"""Machines to train on, where this one may make them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.namespaces import Machine, Unavailable, network


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    try:
        with network(2) as made:
            yield made
    except Unavailable as why:
        pytest.skip(str(why))
