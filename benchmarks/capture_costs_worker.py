"""One process of the capture benchmark: captures one model as ``fit`` does, and announces what that costs."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.capture_costs_models import LARGE, TIMED, Model
from benchmarks.harness import Measurement, announce
from lightning_hetpipe.capture.pieces import Piece
from lightning_hetpipe.capture.profiling import ProfilingInput
from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach
from lightning_hetpipe.redirect import Redirect
from tests.oracle import Batch
from tests.support.models import Learner

WARM_UP = 3
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


# Time.


def times(model: Model, seconds: float) -> dict[str, float]:
    """Seconds of capture, and of a minibatch (forward, loss and backward) plainly and through the graph.

    Args:
        model: What is captured, and trained without an optimizer.
        seconds: How long each of two timed loops takes, about.

    Returns:
        ``capture_s``, the first in this process; ``again_s``, the same once more; ``layers``; ``eager_s`` and
        ``graph_s``, medians over as many minibatches of both in turns; ``ratio``, the median of the second over the
        first in the same turn; ``few_eager_s``, ``few_graph_s`` and ``few_ratio``, the same for the batch of next to no
        work.
    """
    first = captured(model, model.batch(model.samples))[2]
    learner, pieces, again = captured(model, model.batch(model.samples))
    notes = {"capture_s": first, "again_s": again, "layers": float(sum(len(piece.layers) for piece in pieces))}
    for prefix, batch in (("", model.batch(model.samples)), ("few_", model.few())):
        step = partial(_minibatch, model, learner, batch)
        eager, graph = in_turns((step, nullcontext), (step, partial(through_graphs, pieces)), seconds=seconds)
        notes[f"{prefix}eager_s"], notes[f"{prefix}graph_s"] = statistics.median(eager), statistics.median(graph)
        notes[f"{prefix}ratio"] = statistics.median(g / e for e, g in zip(eager, graph, strict=True))
    return notes


def in_turns(
    *variants: tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]], seconds: float
) -> list[list[float]]:
    """Seconds of the CPU that each variant takes in each turn: a call, within a context that is not timed.

    The CPU's own seconds are those of the clock where one thread has a core for itself, and where it has not, other
    programs' are left out. There are as many turns as fit into ``seconds``, at least three, after some that are not
    counted. Every other turn goes backwards, so that none is always the one whose predecessor has warmed the caches.
    """
    taken: list[list[float]] = [[] for _ in variants]
    number, until = 0, float("inf")
    while number < WARM_UP + 3 or time.perf_counter() < until:
        if number == WARM_UP:
            until = time.perf_counter() + seconds
        for (call, context), own in list(zip(variants, taken, strict=True))[:: -1 if number % 2 else 1]:
            with context():
                started = time.process_time()
                call()
                own.append(time.process_time() - started)
        number += 1
    return [own[WARM_UP:] for own in taken]


def captured(model: Model, batch: Batch) -> tuple[Learner, list[Piece], float]:
    """A new model, its pieces with their graphs, and the seconds from the end of the watched step to the graphs."""
    learner = model.make()
    watch, loss = _watched(model, learner, batch)
    started = time.perf_counter()
    watch.check(loss)
    return learner, watch.pieces, time.perf_counter() - started


def _watched(model: Model, learner: Learner, batch: Batch) -> tuple[TrainingWatch, Tensor]:
    watch = TrainingWatch(learner, None, RandomGenerators(0), 1)
    with watch.watching(), _autocast(model):
        loss: Tensor = learner.compute(batch)["loss"]
    return watch, loss


def _minibatch(model: Model, learner: Learner, batch: Batch) -> None:
    with _autocast(model):
        loss = learner.compute(batch)["loss"]
    torch.autograd.grad(loss, list(learner.parameters()))


def _autocast(model: Model) -> AbstractContextManager[Any]:
    return nullcontext() if model.autocast is None else torch.autocast("cpu", model.autocast)


@contextmanager
def through_graphs(pieces: Sequence[Piece]) -> Iterator[None]:
    """Within it, captured modules compute as a stage that holds all of their layers would, on the live weights."""
    with ExitStack() as stack:
        for piece in pieces:
            if piece.captured is not None:
                calls = [attach(layer.module, layer.name) for layer in piece.layers]
                redirect = Redirect(piece.module, "forward", partial(_run_layers, piece, calls))
                stack.callback(redirect.remove)
        stack.enter_context(RandomGenerators(0).minibatch(1))
        yield


def _run_layers(
    piece: Piece, calls: Sequence[Callable[..., Any]], redirect: Redirect, *args: Any, **kwargs: Any
) -> Any:
    with redirect.suspended():  # an input of a new kind is captured now
        value = piece.value(args, kwargs)
    for call in calls:
        value = call(value)
    return value


# Memory.


def memory(model: Model) -> dict[str, float]:
    """The most host memory that the process had in each part of the first minibatch, above what it had before.

    It is the kernel's own high-water mark of resident memory (VmHWM), set back before each part: nothing is sampled,
    so that no peak is missed. What the allocator holds of freed memory is given back to the system before, so that
    capture cannot use it unseen.

    Returns:
        Bytes, except for the first: ``capture_s``, seconds; ``parameters``; ``activations``, what a forward pass of
        the plain model keeps for the backward pass; ``watched``, the peak of the watched step; ``capture``, of the
        capture after it; ``layer_times``, of the timing of layers that follows in ``fit``; ``again``, of watched step
        and capture in a process that has captured before, so that it has imported what that takes.

    Raises:
        OSError: where the system has no such mark.
    """
    learner, batch = model.make(), model.batch(model.samples)
    notes: dict[str, float] = {}
    before = _settled()
    watch, loss = _watched(model, learner, batch)
    notes["watched"] = _peak() - before
    started = time.perf_counter()
    _reset_peak()
    watch.check(loss)
    notes["capture_s"] = time.perf_counter() - started
    notes["capture"] = _peak() - before
    del loss  # its backward pass is done before layers are timed
    _reset_peak()
    ProfilingInput(watch.pieces, RandomGenerators(0), None).seconds(torch.device("cpu"))
    notes["layer_times"] = _peak() - before
    del watch

    before = _settled()
    watch, loss = _watched(model, learner, batch)
    watch.check(loss)
    notes["again"] = _peak() - before
    del watch, loss

    notes["parameters"] = _bytes(learner.parameters())
    notes["activations"] = activations(learner, batch)
    return notes


def activations(learner: Learner, batch: Batch) -> int:
    """Bytes that a forward pass keeps for the backward pass, without weights, buffers and the batch itself."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(_storage(tensor), tensor)  # held on to, so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = learner.compute(batch)["loss"]
    del loss
    others = {_storage(tensor) for tensor in (*learner.parameters(), *learner.buffers(), *batch)}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others)


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _settled() -> int:
    """Gives freed memory back, and starts a new high-water mark; returns the resident bytes that are left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    _reset_peak()
    return _peak()


def _reset_peak() -> None:
    CLEAR.write_text("5")


def _peak() -> int:
    """Bytes of the most resident memory since the last reset."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures one model, and announces it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("times", "memory"))
    parser.add_argument("model", choices=(*TIMED, *LARGE))
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each of two timed loops takes")
    parser.add_argument("--cores", type=int, nargs="*", default=(), help="CPUs to stay on; default: any")
    given = parser.parse_args(arguments)
    if given.cores:
        os.sched_setaffinity(0, given.cores)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    started, cpu = time.perf_counter(), time.process_time()
    notes = times(TIMED[given.model], given.seconds) if given.what == "times" else memory(LARGE[given.model])
    announce(
        Measurement(
            name=given.model,
            rate=1 / notes["graph_s" if given.what == "times" else "capture_s"],
            cores=(time.process_time() - cpu) / (time.perf_counter() - started),
            threads=torch.get_num_threads(),
            loss=None,
            notes=notes,
        )
    )


if __name__ == "__main__":
    main()
