"""Costs of capture: its seconds, the graph's time over the plain module's, and host memory for 100M parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from benchmarks.harness import (
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    Spread,
    in_rounds,
    run_alone,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores

NAME = "capture_costs"
WORKER = "benchmarks.capture_costs_worker"
TIMEOUT = 600.0
TIME_TARGET = 1.02
MEMORY_TARGET = 1.2

Rounds = Sequence[Mapping[str, Measurement]]
"""For each round, a measurement of each model that was measured in it."""


def measure(what: str, model: str, cores: Sequence[int] = (), seconds: float = 2.0) -> Measurement:
    """Measures "times" or "memory" of one model in a fresh process with one torch thread."""
    pinned = ("--cores", *map(str, cores)) if cores else ()
    arguments = (what, model, "--seconds", str(seconds), *pinned)
    measurement = run_alone(Process(WORKER, arguments), TIMEOUT)
    return measurement


def run(options: Options) -> Outcome:
    """Measures times in `options.rounds` interleaved rounds, and memory, which hardly varies, in one."""
    from benchmarks.capture_costs_models import LARGE, TIMED  # Not above: it takes seconds, also for `--help`.

    cores = two_cores()
    machine = describe_machine(cores)
    seconds = 0.5 if options.quick else 2.0

    def jobs(what: str, models: Mapping[str, object]) -> dict[str, Callable[[], Measurement]]:
        return {model: partial(measure, what, model, cores, seconds) for model in models}

    times, failures = in_rounds(jobs("times", TIMED), options.rounds)
    memory, more_failures = in_rounds(jobs("memory", LARGE), 1)
    return report(machine, times, memory, failures | more_failures)


def report(machine: Mapping[str, object], times: Rounds, memory: Rounds, failures: Mapping[str, str]) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    ratios = {model: spread(times, model, partial(note, name="ratio")) for model in _models(times)}
    peaks = {model: spread(memory, model, memory_ratio) for model in _models(memory)}
    figures = [
        *(Figure(f"graph over eager, {m}", s, target=TIME_TARGET, at_most=True, digits=3) for m, s in ratios.items()),
        *(Figure(f"memory of capture, {m}", s, target=MEMORY_TARGET, at_most=True) for m, s in peaks.items()),
    ]
    text = [
        f"{NAME}: graphs of whole models by torch.export, against the modules themselves; one torch thread",
        provenance(machine, len(times)),
        "",
        table(_time_rows(times)),
        "",
        table(_memory_rows(memory)),
    ]
    text += [f"\nfailed: {model}\n{reason}" for model, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "times": [{model: asdict(value) for model, value in measured.items()} for measured in times],
        "memory": [{model: asdict(value) for model, value in measured.items()} for measured in memory],
        "targets": {"graph over eager": TIME_TARGET, "memory over parameters and activations": MEMORY_TARGET},
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def note(measurement: Measurement, name: str) -> float:
    """A figure that the worker has noted."""
    value = measurement.notes[name]
    assert isinstance(value, int | float)
    return float(value)


def spread(rounds: Rounds, model: str, figure: Callable[[Measurement], float]) -> Spread:
    """Summarises a figure of one model over the rounds that have it."""
    return Spread.of(figure(measured[model]) for measured in rounds if model in measured)


def fixed_cost(measurement: Measurement) -> float:
    """Seconds that a minibatch of next to no work takes longer through the graph."""
    return note(measurement, "few_graph_s") - note(measurement, "few_eager_s")


def memory_ratio(measurement: Measurement) -> float:
    """The most memory up to the end of capture, over parameters and activations."""
    peak = max(note(measurement, "watched"), note(measurement, "capture"))
    return peak / (note(measurement, "parameters") + note(measurement, "activations"))


def _models(rounds: Rounds) -> list[str]:
    return list({model: None for measured in rounds for model in measured})


def median(rounds: Rounds, model: str, name: str) -> float:
    """The median of what the worker has noted of a model under ``name``."""
    return spread(rounds, model, partial(note, name=name)).median


def _verdict(value: float, target: float) -> str:
    return "met" if value <= target else "missed"


def _time_rows(rounds: Rounds) -> list[tuple[str, ...]]:
    header = ("model", "layers", "capture s", "again s", "eager ms", "graph ms", "graph/eager", "range", "target", "")
    rows: list[tuple[str, ...]] = [(*header, "fixed µs")]
    for model in _models(rounds):
        ratio = spread(rounds, model, partial(note, name="ratio"))
        rows.append(
            (
                model,
                f"{median(rounds, model, 'layers'):.0f}",
                f"{median(rounds, model, 'capture_s'):.2f}",
                f"{median(rounds, model, 'again_s'):.2f}",
                f"{median(rounds, model, 'eager_s') * 1e3:.2f}",
                f"{median(rounds, model, 'graph_s') * 1e3:.2f}",
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f} .. {ratio.high:.3f}",
                f"{TIME_TARGET:.2f}",
                _verdict(ratio.median, TIME_TARGET),
                f"{spread(rounds, model, fixed_cost).median * 1e6:.0f}",
            )
        )
    return rows


def _memory_rows(rounds: Rounds) -> list[tuple[str, ...]]:
    parts = ("parameters", "activations", "watched", "capture", "again", "layer_times")
    rows: list[tuple[str, ...]] = [("model", "capture s", *(f"{part} MB" for part in parts), "ratio", "target", "")]
    for measured in rounds:
        for model, measurement in measured.items():
            ratio = memory_ratio(measurement)
            rows.append(
                (
                    model,
                    f"{note(measurement, 'capture_s'):.2f}",
                    *(f"{note(measurement, part) / 1e6:,.0f}" for part in parts),
                    f"{ratio:.2f}",
                    f"{MEMORY_TARGET:.2f}",
                    _verdict(ratio, MEMORY_TARGET),
                )
            )
    return rows
