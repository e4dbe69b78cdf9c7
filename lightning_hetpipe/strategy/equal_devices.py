"""What is decided where all devices are the same and no memory limit is known: layers by their times, and Nm = k + 1.

Nm, on which results depend (law L1), is so a matter of settings alone. Measured times decide the cuts only, on which
results do not depend.
"""

from __future__ import annotations

from lightning_hetpipe.capture.profiling import Study
from lightning_hetpipe.planning.search.division import stage_times
from lightning_hetpipe.strategy.decision import Decision, told_in_flight
from lightning_hetpipe.strategy.layout import place, stage_count
from lightning_hetpipe.strategy.measuring import layer_seconds
from lightning_hetpipe.strategy.settings import FitSettings


def decide(study: Study, settings: FitSettings, reported: bool) -> Decision:
    """Stages and Nm as ``settings`` ask for them.

    Args:
        study: What the watched step has shown.
        settings: What the strategy was asked for.
        reported: Whether one stage is measured, too, as there is a logger to be told.

    Raises:
        SettingError: if more stages are asked for than there are layers.
    """
    names, devices = [layer.name for layer, _, _ in study.layers], settings.devices
    stages = stage_count(settings.stages, len(devices), len(names))
    times = [0.0] * len(names)
    if stages > 1 or reported:
        times = layer_seconds(study, devices[-1], settings.bar)
    cuts = settings.choose_cuts(times, stages)
    in_flight = settings.in_flight
    each = stage_times(times, cuts)
    why = f"in_flight={in_flight} was asked for"
    if in_flight == "auto":
        in_flight = stages + 1 if stages > 1 else 1
        why = "one more in flight than there are stages keeps all of them busy"
    said = []
    if stages > 1:
        slowest = max(range(stages), key=each.__getitem__)
        said = [
            f"HetPipe: {stages} stages, which start at {', '.join(names[cut] for cut in cuts)}, and"
            f" {told_in_flight(in_flight)}",
            f"because no cut makes the slowest stage faster ({slowest}: {1000 * each[slowest]:.3g} ms for a"
            f" minibatch), and {why}",
        ]
    return Decision(cuts, place(stages, devices), in_flight, each, said)
