"""`python -m benchmarks.first_step --against DIR`: the cost of the first step, in two checkouts.

The CPU seconds of a fit of one minibatch in two stages, of models of :mod:`benchmarks.models_list`: the watched step,
the capture, its checks, and Lightning's own start. Each model has a process of its own, which makes two such fits: in
the first one torch imports what a capture needs. The packages of this checkout and of ``DIR`` take turns. The least
of all rounds counts, since other programs can only add to it. The target is a ratio of at most 1.15:

    git worktree add ../before REVISION
    python -m benchmarks.first_step --against ../before --only "timm/resnet18|transformers/gpt2.*" --rounds 3
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness import ROOT, Measurement, Process, announce, in_rounds, run_together, table

MODULE, TIMEOUT = "benchmarks.first_step", 3600.0
TARGET = 1.15
FITS = ("first_s", "again_s")
LIBRARIES = ("timm", "torchvision", "transformers", "segmentation_models_pytorch")
CHOSEN = "|".join(
    (
        "timm/(resnet18|resnet50|densenet121|efficientnet_b0|convnext_atto)",
        "timm/(vit_tiny_patch16_224|swin_tiny_patch4_window7_224)",
        "transformers/(gpt2 for CausalLM|llama for CausalLM|bert for MaskedLM|t5 for Seq2SeqLM)",
        "segmentation_models_pytorch/Unet",
    )
)
"""One of each kind."""

Round = Mapping[str, Mapping[str, Measurement]]
"""For "before" and "now", the measurements by the models' names."""


def chosen(only: str) -> list[str]:
    import benchmarks.torchvision_operators  # noqa: F401  # before Lightning
    from benchmarks.models_list import models

    return [name for name in models() if re.fullmatch(only, name)]


def measure(only: str, checkout: Path) -> dict[str, Measurement]:
    """Measure the models that match ``only`` with the package of ``checkout``."""
    (found,) = run_together([Process(MODULE, ("--worker", str(checkout), "--only", only))], TIMEOUT)
    return {each.name: each for each in found}


def work(only: str, checkout: Path) -> None:
    """Announce a measurement of each model that matches ``only``, with the package of ``checkout``."""
    sys.path.insert(0, str(checkout))
    names = chosen(only)
    package = import_module("lightning_hetpipe").__file__
    if package is None or not Path(package).is_relative_to(checkout):
        raise ImportError(f"lightning_hetpipe comes from {package}, not from {checkout}")
    for library in (*filter(find_spec, LIBRARIES), "benchmarks.models_table_worker"):
        import_module(library)  # once, for all models
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for measurement in pool.imap(fits, names, chunksize=1):
            announce(measurement)


def fits(name: str) -> Measurement:
    """Fit the model ``name`` for one minibatch, twice."""
    import torch

    from benchmarks.models_list import models
    from benchmarks.models_table_worker import fitted
    from lightning_hetpipe import HetPipeStrategy

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = models()[name]
    batches, notes, began = [model.batch()], dict[str, object](), time.perf_counter()
    used = [time.process_time()]
    for fit in FITS:
        fitted(model, batches, [], HetPipeStrategy(stages=2, in_flight=3, weights="stash"))
        used.append(time.process_time())
        notes[fit] = used[-1] - used[-2]
    wall = time.perf_counter() - began
    return Measurement(name, len(FITS) / wall, (used[-1] - used[0]) / wall, threads=1, loss=None, notes=notes)


def report(names: Sequence[str], rounds: Sequence[Round]) -> str:
    """The least CPU seconds with both packages, and their ratio."""
    rows = [("model", "first: before", "now", "ratio", "again: before", "now", "ratio")]
    for name in names:
        cells: list[str] = []
        for fit in FITS:
            before, now = (
                min((float(str(one[when][name].notes[fit])) for one in rounds if when in one), default=float("nan"))
                for when in ("before", "now")
            )
            cells += [f"{before:.2f} s", f"{now:.2f} s", f"{now / before:.2f}"]
        rows.append((name, *cells))  # type: ignore[arg-type]  # as many as the header has
    return table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="DIR", help="the other checkout")
    parser.add_argument("--only", default=CHOSEN, metavar="REGEX", help="all of a name; by default one of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker is not None:
        work(given.only, given.worker)
        return
    if given.against is None:
        parser.error("--against names the other checkout")
    jobs = {"before": partial(measure, given.only, given.against.resolve()), "now": partial(measure, given.only, ROOT)}
    rounds, failures = in_rounds(jobs, given.rounds)
    print(report(chosen(given.only), rounds), *(f"\nfailed: {job}\n{reason}" for job, reason in failures.items()))
    print(f"\nCPU seconds, the least of {given.rounds} rounds; the target is a ratio of at most {TARGET}")


if __name__ == "__main__":
    main()
