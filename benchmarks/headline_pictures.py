"""Picture of the headline benchmark: accuracy over time, as SVG by matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.experiments_pictures import as_svg, drawing
from benchmarks.headline_cluster import COMPARED, LABS, METHODS
from benchmarks.headline_runs import TARGET, Found

STYLES: Mapping[str, tuple[str, str]] = {
    "ddp": ("#000000", "-"),
    "ddp_by_speed": ("#000000", "--"),
    "d0": ("#0072B2", "-"),
    "d4": ("#E69F00", "-"),
    "d32": ("#009E73", "-"),
    "d0_shares": ("#0072B2", "--"),
    "d4_shares": ("#E69F00", "--"),
    "d32_shares": ("#009E73", "--"),
    "d0_short": ("#56B4E9", "--"),
}
"""Colours of Okabe and Ito (2008); dashed is by speed."""


def curves(found: Found) -> str:
    """Accuracy of each method over emulated seconds, of the first seed: a column for each cluster."""
    from matplotlib.figure import Figure

    labs = [lab for lab in COMPARED if any(job.lab == lab for job in found)]
    first = min((job.seed for job in found), default=0)
    with drawing():
        figure = Figure(figsize=(4.6 * max(1, len(labs)), 3.4), layout="constrained")
        panels: Any = figure.subplots(1, max(1, len(labs)), squeeze=False)[0]
        for lab, axes in zip(labs, panels, strict=False):
            for method in COMPARED[lab]:
                for job, result in found.items():
                    if (job.lab, job.method, job.seed) == (lab, method, first):
                        colour, dashes = STYLES[method]
                        percent = [100 * each for each in result.accuracies]
                        axes.plot(
                            result.seconds, percent, dashes, color=colour, label=METHODS[method].title, linewidth=1.2
                        )
            axes.axhline(100 * TARGET, color="#999999", linestyle=":")
            axes.set(xlabel="seconds", ylabel="held-out images right, %", title=LABS[lab].title, ylim=(0, 100))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        return as_svg(figure)
