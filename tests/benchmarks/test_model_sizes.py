"""Largest models that fit on sets of GPUs: the search, and that the README has the table of what was measured."""

from __future__ import annotations

from benchmarks.model_sizes import (
    BEGIN,
    END,
    MEASURED,
    SETS,
    billions,
    fits_alone,
    fits_pipeline,
    fits_spread,
    largest,
    of_blocks,
    rows,
)
from benchmarks.results import README, as_table, block_in
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times, UserBytes
from lightning_hetpipe.planning.plan import profile_file

BLOCK = 4 << 20
"""Bytes of a block's weights; its two layers keep nothing."""


def tiny() -> Profile:
    names = {"net.0": 0, "net.1.a": BLOCK // 2, "net.1.b": BLOCK // 2, "net.2": 0}
    layers = [LayerBytes(name, size, 0, 0) for name, size in names.items()]
    return Profile("tiny", 1, layers, {"cpu": [Times(1.0, 2.0)] * len(layers)}, {}, user=UserBytes(loss=50))


def two(blocks: int, copies: int) -> Cluster:
    """Two devices, with room for ``copies`` of the weights of so many blocks, and the loss and its gradients."""
    return Cluster([Node("box", [Device("cpu", blocks * copies * BLOCK + 100)] * 2)])


def test_the_block_is_repeated() -> None:
    names = [layer.name for layer in of_blocks(tiny(), 2).layers]
    assert names == ["net.0", "net.1.a", "net.1.b", "net.1.a", "net.1.b", "net.2"]
    assert billions(tiny(), 3) == 3 * BLOCK / 4 / 1e9


def test_the_largest_that_fits_is_found() -> None:
    """Weights, gradients, two moments, and what AdamW's step makes: five copies; and a pipeline's versions."""
    assert largest(tiny(), two(7, 5), fits_alone) == 7
    assert largest(tiny(), two(7, 5), fits_spread) == 14
    assert largest(tiny(), two(7, 8), lambda *given: fits_pipeline(*given, in_flight=2)) == 14
    assert largest(tiny(), two(7, 9), fits_pipeline) == 14
    assert largest(tiny(), two(1, 2), fits_spread) == 0


def test_the_readme_has_the_table() -> None:
    """One row is computed anew; the others take as long each."""
    block = block_in(README.read_text(), BEGIN, END)
    lines = as_table(rows(profile_file.load(MEASURED), SETS[:1]))
    assert lines == block.splitlines()[2 : 2 + len(lines)]
    assert len(block.splitlines()) == len(lines) + len(SETS) - 1 + 4
