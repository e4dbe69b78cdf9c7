"""`python -m benchmarks.staleness`: what stale gradients do to learning, as the tables of docs/staleness.md.

A small convolutional network on the digits is trained with several optimizers and numbers in flight, by a plain loop,
which takes the place of the strategy: one of the runs is repeated by the strategy, and must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

import numpy as np
import torch

from benchmarks.harness import ROOT
from benchmarks.machine import describe_machine
from benchmarks.results import replace_block
from benchmarks.staleness_training import Recipe, accuracy, batches, by_loop, by_strategy, convolutions, digits, equal
from lightning_hetpipe.rules.staleness import bearable_rate, steps_behind
from lightning_hetpipe.rules.versions import POLICIES
from lightning_hetpipe.run.stale_gradients import has_batch_norm, stepped

RESULTS = ROOT / "benchmarks" / "staleness.json"
DOCS = ROOT / "docs" / "staleness.md"
BEGIN, END = "<!-- tables: python -m benchmarks.staleness --write -->", "<!-- end of tables -->"

EPOCHS = 8
SEEDS = (0, 1, 2)
IN_FLIGHT = (1, 2, 3, 4, 8)
GOOD = 95.0
"""Percent of the test images that each seed must reach, for a rate to count as borne."""

MOMENTUMS = (0.0, 0.5, 0.9)
RATES = (0.5, 0.2, 0.1, 0.05, 0.02)
"""Effective ones, lr / (1 - momentum), for the second table."""
MATCHED = (0.5, 0.1)
"""Those of the first table."""


def sgd(rate: float, momentum: float) -> Recipe:
    """SGD of an effective rate."""
    return Recipe("SGD", round(rate * (1 - momentum), 6), momentum)


FIRST = sgd(0.5, 0.9)
"""SGD 0.05 with momentum 0.9, which trains well plainly."""

RECIPES = (
    *(sgd(rate, momentum) for rate in MATCHED for momentum in MOMENTUMS),
    replace(FIRST, nesterov=True),
    replace(FIRST, clip=1.0),
    replace(sgd(0.1, 0.9), clip=1.0),
    replace(FIRST, accumulate=4),
    Recipe("AdamW", 0.001),
    Recipe("AdamW", 0.01),
    Recipe("AdamW", 0.01, beta=0.5),
    Recipe("AdamW", 0.01, clip=1.0),
    Recipe("RMSprop", 0.001),
    Recipe("RMSprop", 0.001, 0.9),
    Recipe("RMSprop", 0.0001, 0.9),
)
QUICK = (FIRST,)

OPTIMIZERS = (
    FIRST,
    replace(FIRST, nesterov=True),
    replace(sgd(1.0, 0.9), dampening=0.9),
    Recipe("Adam", 0.003),
    Recipe("AdamW", 0.003),
    Recipe("AdamW", 0.003, clip=1.0),
    Recipe("Adamax", 0.01),
    Recipe("NAdam", 0.005),
    Recipe("RAdam", 0.01),
    Recipe("RMSprop", 0.001, 0.9),
    Recipe("Rprop", 0.001),
    sgd(0.1, 0.0),
    sgd(0.1, 0.5),
    Recipe("ASGD", 0.1),
    Recipe("RMSprop", 0.001),
    Recipe("Adagrad", 0.03),
    Recipe("Adadelta", 1.0),
    Recipe("Adafactor", 0.01),
    *(replace(sgd(rate, 0.9), norm="GroupNorm") for rate in (0.5, 0.2, 0.1)),
    replace(sgd(0.2, 0.9), clip=1.0, norm="GroupNorm"),
    *(Recipe("AdamW", lr, norm="GroupNorm") for lr in (0.003, 0.001)),
)
"""For the table of what ``weights="auto"`` chooses: those with which it predicts, others, and another net."""
CHOSEN_AT = (4, 8)
"""Numbers in flight of that table."""

STALENESS = (0, 1, 2, 3, 4, 7)
Runs = Mapping[tuple[Recipe, int], Sequence[float]]
"""Accuracies, by recipe and number in flight; one for each seed."""


def largest_stable(momentum: float, steps: int, nesterov: bool = False, predicted: bool = False) -> float:
    """The largest lr * h at which gradient descent on a curvature h, with gradients ``steps`` old, does not diverge.

    That is where the spectral radius of w(t + 1) = (1 + mu) w(t) - mu w(t - 1) - lr h w(t - s) reaches 1; Nesterov's
    takes (1 + mu) w(t - s) - mu w(t - s - 1) for w(t - s), and a prediction (1 + s) w(t - s) - s w(t - s - 1).
    """
    used = np.convolve(
        [1 + momentum, -momentum] if nesterov else [1.0], [1.0 + steps, -steps] if predicted else [1.0, 0.0]
    )
    low, high = 0.0, 8.0
    for _ in range(60):
        rate = (low + high) / 2
        terms = np.zeros(steps + 4)
        terms[:3] = 1, -(1 + momentum), momentum
        terms[1 + steps : 1 + steps + len(used)] += rate * used
        low, high = (rate, high) if max(abs(np.roots(terms))) <= 1 + 1e-9 else (low, rate)
    return low


def warned(recipe: Recipe, in_flight: int) -> bool:
    """True if a fit of one virtual worker begins with a warning."""
    steps = steps_behind(in_flight - 1, recipe.accumulate)
    bears = {
        "clipped": recipe.clip is not None,
        "predicted": POLICIES[recipe.weights].predicts,
        "corrected": recipe.correction > 0,
        "batch_norm": has_batch_norm(convolutions(recipe.norm)),
    }
    groups = stepped(recipe.make([torch.nn.Parameter(torch.zeros(1))]))
    return any(bearable_rate(group, steps, **bears) is not None for group in groups)


def measure(recipes: Sequence[Recipe], in_flight: Sequence[int], seeds: Sequence[int], epochs: int) -> Runs:
    """Trains each recipe."""
    train, test = digits()
    found: dict[tuple[Recipe, int], list[float]] = {}
    for recipe in dict.fromkeys(recipes):
        for number in in_flight:
            nets = [by_loop(recipe, number, batches(train, seed), seed, epochs) for seed in seeds]
            found[recipe, number] = [round(accuracy(net, test), 2) for net in nets]
            print(f"{recipe}, Nm = {number}: {found[recipe, number]}", file=sys.stderr, flush=True)
    return found


def is_exact(recipe: Recipe, in_flight: int, seed: int, epochs: int) -> bool:
    """True if the strategy trains to the loop's weights, to the bit."""
    train, _ = digits()
    loop, strategy = (run(recipe, in_flight, batches(train, seed), seed, epochs) for run in (by_loop, by_strategy))
    return equal(loop, strategy)


def tables(kept: Mapping[str, Any]) -> str:
    """The tables in Markdown, from what ``main`` has written down."""
    runs: Runs = {(Recipe(**each["recipe"]), each["in_flight"]): each["accuracies"] for each in kept["runs"]}
    numbers = sorted({number for _, number in runs})
    recipes = [recipe for recipe in RECIPES if (recipe, numbers[0]) in runs]
    machine, first = kept["machine"], "in_flight=4 is equal to the strategy's, to the bit"
    return "\n\n".join(
        [
            BEGIN,
            f"Test accuracy after {kept['epochs']} epochs, percent: mean and range of {kept['seeds']} seeds. A fit of"
            " what is marked ⚠ begins with the warning.",
            _rows(
                ["", "lr / (1 - momentum)", *(f"Nm = {number}" for number in numbers)],
                [
                    [
                        str(recipe),
                        f"{recipe.effective:g}" if recipe.optimizer == "SGD" else "",
                        *(_cell(runs[recipe, number], warned(recipe, number)) for number in numbers),
                    ]
                    for recipe in recipes
                ],
            ),
            'What `weights="auto"` chooses, with *K* where the first 100 updates have lower learning rates, beside'
            " `stash`; *GroupNorm* stands in the place of BatchNorm in the last rows.",
            _rows(
                ["", "auto", "Nm = 1", *(f"Nm = {number}, {way}" for number in CHOSEN_AT for way in ("stash", "auto"))],
                [_choice(runs, recipe) for recipe in OPTIMIZERS if _is_measured(runs, recipe)],
            ),
            f"The largest lr / (1 - momentum) of {', '.join(f'{rate:g}' for rate in reversed(RATES))} at which each"
            f" seed reaches {GOOD:g}%, and, in brackets, its product with Nm - 1:",
            _rows(
                ["SGD", *(f"Nm = {number}" for number in numbers)],
                [
                    [f"momentum {momentum:g}", *(_borne(runs, momentum, number) for number in numbers)]
                    for momentum in MOMENTUMS
                ],
            ),
            "The largest stable lr × h on a quadratic of curvature h, where gradients are s steps stale, and, in"
            " brackets, its product with s / (1 - momentum):",
            _rows(
                ["", *(f"s = {steps}" for steps in STALENESS)],
                [
                    [
                        f"momentum {momentum:g}{', Nesterov' * nesterov}",
                        *(_stable(momentum, steps, nesterov) for steps in STALENESS),
                    ]
                    for momentum, nesterov in ((0.0, False), (0.5, False), (0.9, False), (0.9, True), (0.99, False))
                ],
            ),
            f"Measured {kept['date']} by a plain loop, one thread; its run of {FIRST} with {first}. Python"
            f" {machine['python']}, torch {machine['torch']}, lightning {machine['lightning']}.",
            END,
        ]
    )


def _is_measured(runs: Runs, recipe: Recipe) -> bool:
    """Tell whether ``recipe`` and what ``weights="auto"`` chooses for it were measured; ``--quick`` does not."""
    recipes = (recipe, replace(recipe, weights="auto").chosen)
    return all((each, number) in runs for each in recipes for number in CHOSEN_AT)


def _choice(runs: Runs, recipe: Recipe) -> list[str]:
    chosen = replace(recipe, weights="auto").chosen
    cells = [str(recipe), chosen.weights + ", K" * (chosen.correction > 0), _cell(runs[recipe, 1], False)]
    for number in CHOSEN_AT:
        cells.append(_cell(runs[recipe, number], warned(recipe, number)))
        cells.append(_cell(runs[chosen, number], warned(chosen, number)) if chosen != recipe else "")
    return cells


def _cell(found: Sequence[float], is_warned: bool) -> str:
    mean = sum(found) / len(found)
    return f"{mean:.1f} ({min(found):.1f} .. {max(found):.1f}){' ⚠' * is_warned}"


def _borne(runs: Runs, momentum: float, in_flight: int) -> str:
    for rate in RATES:
        if min(runs.get((sgd(rate, momentum), in_flight), [0.0])) >= GOOD:
            return "≥ " * (rate == RATES[0]) + f"{rate:g}" + f" ({rate * (in_flight - 1):.2g})" * (in_flight > 1)
    return "none"


def _stable(momentum: float, steps: int, nesterov: bool) -> str:
    rate = largest_stable(momentum, steps, nesterov)
    return f"{rate:.2g}" + f" ({rate * steps / (1 - momentum):.2f})" * (steps > 0)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cite() -> None:
    """Puts the tables of the results that are kept into the docs."""
    replace_block(DOCS, tables(json.loads(RESULTS.read_text())), BEGIN, END)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 where the strategy differs from the loop."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one recipe, one seed, one epoch: for a first impression")
    parser.add_argument("--write", action="store_true", help="keep the results, and put the tables into the docs")
    parser.add_argument("--cite", action="store_true", help="measure nothing: put the tables of what is kept there")
    given = parser.parse_args(arguments)
    if given.cite:
        cite()
        return 0
    if given.quick and given.write:
        parser.error("--quick is too short to be kept; leave --write out")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    epochs, seeds = (1, SEEDS[:1]) if given.quick else (EPOCHS, SEEDS)
    if not is_exact(FIRST, 4, seeds[0], epochs):
        print("the strategy differs from the loop, so the loop tells nothing", file=sys.stderr)
        return 1
    grid = [sgd(rate, momentum) for rate in RATES for momentum in MOMENTUMS]
    runs = measure(QUICK if given.quick else [*RECIPES, *grid], (1, 4) if given.quick else IN_FLIGHT, seeds, epochs)
    if not given.quick:
        chosen = [replace(recipe, weights="auto").chosen for recipe in OPTIMIZERS]
        runs = {
            **measure(OPTIMIZERS, (1, *CHOSEN_AT), seeds, epochs),
            **measure(chosen, CHOSEN_AT, seeds, epochs),
            **runs,
        }
    kept = {
        "date": date.today().isoformat(),
        "machine": describe_machine(()),
        "epochs": epochs,
        "seeds": len(seeds),
        "runs": [
            {"recipe": asdict(recipe), "in_flight": number, "accuracies": found}
            for (recipe, number), found in runs.items()
        ],
    }
    print(tables(kept))
    if given.write:
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        cite()
    return 0


if __name__ == "__main__":
    sys.exit(main())
