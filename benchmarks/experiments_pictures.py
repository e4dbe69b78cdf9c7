"""Pictures of the experiments on weight policies, as SVG by matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from typing import TYPE_CHECKING, Any

from benchmarks.experiments_table import Comparison, Result, relative
from benchmarks.experiments_tasks import TASKS, Task
from benchmarks.staleness_training import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "sync": "#000000",
    "stash": "#D55E00",
    "stash, clip": "#E69F00",
    "prediction": "#56B4E9",
    "prediction, K": "#0072B2",
    "prediction, clip": "#009E73",
    "prediction, M = Nm": "#CC79A7",
}
"""Variants that are drawn, and their colours: those of Okabe and Ito (2008), which all people tell apart."""

NEVER = 12.0
"""Place of what never reaches the target, on an axis of ratios."""

HIGHEST = 3.5
"""Upper end of an axis of losses, nats."""

LOSSES = (0.03, 0.1, 0.3, 1.0, 2.0, 3.0)
"""Losses with a tick."""


def survival(comparison: Comparison) -> str:
    """Updates until the target relative to ``sync``, over minibatches in flight: a column for each task."""
    numbers = [number for number in comparison.in_flight if number > 1]
    kinds: Mapping[str, Callable[[str, Recipe, int], Result | None]] = {
        "plain rate": comparison.plain,
        "tuned rate": comparison.tuned,
    }

    def draw(axes: Axes, name: str, kind: str) -> None:
        of = kinds[kind]
        for place, label in enumerate(COLOURS):
            ratios = [1.0]
            for number in numbers:
                recipe = _variants(TASKS[name], number)[label]
                sync = of(name, TASKS[name].sync(recipe), number)
                ratios.append(min(relative(of(name, recipe, number), sync), NEVER))
            shift = 1 + 0.02 * (place - 2)  # lines that lie on each other can be told apart
            axes.plot([1, *numbers], [each * shift for each in ratios], "o-", color=COLOURS[label], label=label)
        axes.set(xscale="log", yscale="log", ylim=(0.5, 16), xlabel="minibatches in flight, Nm")
        axes.set_xticks([1, *numbers], [str(number) for number in (1, *numbers)])
        axes.set_yticks([0.5, 1, 2, 4, 8, NEVER], ["0.5", "1", "2", "4", "8", "never"])
        axes.minorticks_off()
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_ylabel(f"updates, sync = 1\n({kind})")

    return _panels(comparison.tasks, list(kinds), draw)


def curves(comparison: Comparison) -> str:
    """Validation loss over updates at the plain rate, of the first seed: a row for each number in flight."""
    rows = {f"Nm = {number}": number for number in comparison.in_flight if number > 1}

    def draw(axes: Axes, name: str, row: str) -> None:
        for label, colour in COLOURS.items():
            if found := comparison.losses(name, _variants(TASKS[name], rows[row])[label], rows[row]):
                run, losses = found
                updates = [(index + 1) * run.every for index in range(len(losses))]
                axes.plot(updates, [min(each, HIGHEST) for each in losses], color=colour, label=label, linewidth=1.2)
        axes.axhline(TASKS[name].target, color="#999999", linestyle=":")
        axes.set(yscale="log", xlabel="updates", ylabel=f"validation loss\n({row})")
        low, high = axes.get_ylim()
        axes.set_yticks(ticks := [each for each in LOSSES if low <= each <= high], [f"{each:g}" for each in ticks])
        axes.minorticks_off()

    return _panels(comparison.tasks, list(rows), draw)


def _variants(task: Task, in_flight: int) -> dict[str, Recipe]:
    """The variants that are drawn, the native prediction under that name."""
    found = {"sync": task.sync(task.recipe), **task.variants(in_flight)}
    found[f"{task.native}, M = Nm"] = task.accumulating(in_flight)[task.native]
    return {label.replace(task.native, "prediction"): recipe for label, recipe in found.items()}


def _panels(columns: Sequence[str], rows: Sequence[str], draw: Callable[[Axes, str, str], None]) -> str:
    """An SVG with a panel for each task and row, and one legend."""
    from matplotlib.figure import Figure

    with drawing():
        size = (3.3 * len(columns), 2.6 * len(rows) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        panels: Any = figure.subplots(len(rows), len(columns), squeeze=False)
        for row, line in zip(rows, panels, strict=True):
            for name, axes in zip(columns, line, strict=True):
                draw(axes, name, row)
                if row == rows[0]:
                    axes.set_title(TASKS[name].title, fontsize="medium")
                if name != columns[0]:
                    axes.set_ylabel("")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        return as_svg(figure)


def drawing() -> AbstractContextManager[None]:
    """Letters stay text and names of elements stay the same, so that an unchanged picture is an unchanged file."""
    import matplotlib

    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "experiments", "font.size": 9.0})


def as_svg(figure: Figure) -> str:
    """An SVG whose text has no date, and no blanks at ends of lines."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
