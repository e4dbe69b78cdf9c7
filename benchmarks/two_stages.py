"""Two stages on two cores, against the plain Trainer and against torch.distributed.pipelining's Schedule1F1B."""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    Figure,
    Measurement,
    Options,
    Outcome,
    Process,
    ProcessFailed,
    Spread,
    figures_table,
    in_rounds,
    run_together,
    table,
)
from benchmarks.machine import describe_machine, provenance, two_cores
from benchmarks.training_task import WORKER, ModelName, Task

NAME = "two_stages"
MICROBATCHES = (2, 4, 8, 16)  # Schedule1F1B refuses fewer microbatches than stages.
QUICK_MICROBATCHES = (2, 4)
TIMEOUT = 600.0

TWO_STAGES = "a HetPipeStrategy(stages=2), one thread per stage"
ONE_THREAD = "b plain Trainer, one thread"
DEFAULT_THREADS = "c plain Trainer, torch's default threads"
SCHEDULE_1F1B = "d Schedule1F1B, two gloo processes, one thread each"
ONE_STAGE = "e HetPipeStrategy(stages=1), one thread"
TWO_AT_ONCE = "f two processes of b at once"
TWO_STAGES_TEST = "g as a, Trainer.test"
ONE_THREAD_TEST = "h as b, Trainer.test"
DDP = "i Lightning's DDP, two gloo processes, one thread each"

VARIANTS = (
    TWO_STAGES,
    ONE_THREAD,
    DEFAULT_THREADS,
    SCHEDULE_1F1B,
    DDP,
    ONE_STAGE,
    TWO_AT_ONCE,
    TWO_STAGES_TEST,
    ONE_THREAD_TEST,
)

WARM_UP = 33
"""Minibatches before those that count: graphs are compared with their modules at minibatches 16, 32, 64 and so on,
which takes as long as a minibatch does, and is next to nothing in a long run."""

TASKS: Mapping[str, Task] = {
    NAME: Task("plain", warmup=WARM_UP),
    f"{NAME}_resnet": Task("plain", warmup=WARM_UP, model="resnet", layers=4, width=16, batch=512),
    f"{NAME}_gpt": Task("plain", warmup=WARM_UP, model="gpt", layers=6, width=128, batch=16),
    f"{NAME}_bert": Task("plain", warmup=WARM_UP, model="bert", layers=6, width=128, batch=16),
}
"""By the benchmark's name, what a plain Trainer is asked to do. A minibatch takes 30 to 150 ms of one core."""

NAMES: Mapping[ModelName, str] = {"mlp": "MLP", "resnet": "ResNet", "gpt": "GPT", "bert": "BERT"}

TITLES: Mapping[ModelName, str] = {
    "mlp": "{layers} x Linear({width}, {width}), SGD with momentum",
    "resnet": "the demo's ResNet, {layers} residual blocks of width {width} and twice that, SGD with momentum",
    "gpt": "the demo's GPT, {layers} blocks of width {width}, 64 bytes, AdamW",
    "bert": "Hugging Face's BERT, {layers} layers of width {width}, 64 words, AdamW",
}

Round = Mapping[str, Mapping[str, Measurement]]
"""For each variant that ran in the round, its measurements by name (one, except for the microbatches of 1F1B)."""


@dataclass(frozen=True)
class Ratio:
    """A comparison of two variants' minibatches per second; `target` is the least value hoped for."""

    label: str
    over: str
    under: str
    target: float | None = None


RATIOS = (
    Ratio("a/b  two stages over one thread", TWO_STAGES, ONE_THREAD, 1.8),
    Ratio("a/d  two stages over Schedule1F1B", TWO_STAGES, SCHEDULE_1F1B, 1.6),
    Ratio("f/b  ceiling: two independent processes over one", TWO_AT_ONCE, ONE_THREAD),
    Ratio("a/f  two stages over the ceiling", TWO_STAGES, TWO_AT_ONCE),
    Ratio("a/i  two stages over DDP", TWO_STAGES, DDP),
    Ratio("a/c  two stages over the default threads", TWO_STAGES, DEFAULT_THREADS),
    Ratio("e/b  one stage over the plain Trainer", ONE_STAGE, ONE_THREAD),
    Ratio("g/h  evaluation, two stages over one thread", TWO_STAGES_TEST, ONE_THREAD_TEST),
)


LIMITS: Mapping[ModelName, float] = {"resnet": 1.85}
"""The least limits hoped for: of the ResNet, as stages can begin inside its residual blocks."""


def measure(task: Task, threads: int | None = 1) -> dict[str, Measurement]:
    """Measures a variant that is one process."""
    (announced,) = run_together([Process(WORKER, (task.to_json(),), threads)], TIMEOUT)
    return {measurement.name: measurement for measurement in announced}


def measure_two_at_once(task: Task) -> dict[str, Measurement]:
    """Measures two independent processes that share the two cores and nothing else: what the hardware has to give."""
    # A core each: this is meant to be a ceiling, and schedulers sometimes leave two busy processes on one core.
    tasks = [replace(task, together=True, cores=task.cores[index : index + 1]) for index in (0, 1)]
    ((one,), (other,)) = run_together([Process(WORKER, (each.to_json(),)) for each in tasks], TIMEOUT)
    return {one.name: replace(one, rate=one.rate + other.rate, cores=one.cores + other.cores)}


def measure_schedule_1f1b(task: Task, microbatches: Sequence[int]) -> dict[str, Measurement]:
    """Measures torch's pipeline at each number of microbatches, named by that number."""
    with tempfile.TemporaryDirectory() as folder:
        task = replace(
            task,
            variant="schedule_1f1b",
            rendezvous=str(Path(folder, "rendezvous")),
            microbatches=tuple(microbatches),
        )
        ranks = [Process(WORKER, (replace(task, rank=rank).to_json(),)) for rank in (0, 1)]
        first, last = run_together(ranks, TIMEOUT)
    return {
        end.name: replace(end, rate=min(start.rate, end.rate), cores=start.cores + end.cores)
        for start, end in zip(first, last, strict=True)
    }


def measure_ddp(task: Task) -> dict[str, Measurement]:
    """Measures two processes that share each minibatch: half of its samples for each."""
    halved = replace(task, variant="ddp", workers=2, batch=task.batch // 2)
    (announced,) = run_together([Process(WORKER, (halved.to_json(),))], TIMEOUT)
    losses = [each.loss for each in announced if each.loss is not None]
    rate, cores = min(each.rate for each in announced), sum(each.cores for each in announced)
    loss = sum(losses) / len(losses) if losses else None
    return {announced[0].name: replace(announced[0], rate=rate, cores=cores, loss=loss)}


def best_microbatches(task: Task) -> tuple[int, ...]:
    """Searches briefly for the two best numbers of microbatches, so that every round can afford both."""
    print("searching for Schedule1F1B's best numbers of microbatches", file=sys.stderr, flush=True)
    try:
        found = measure_schedule_1f1b(replace(task, warmup=3, steps=10, tail=1), MICROBATCHES)
    except ProcessFailed:
        return QUICK_MICROBATCHES  # The rounds will meet the same failure, and report it.
    return tuple(sorted(MICROBATCHES, key=lambda number: -found[str(number)].rate)[:2])


def choose(rounds: Sequence[Round], variant: str) -> str | None:
    """Returns the name of the variant's measurement with the best median over the rounds; None if none was made."""
    names = {name for measured in rounds for name in measured.get(variant, {})}
    return max(sorted(names), key=lambda name: rates(rounds, variant, name).median, default=None)


def rates(rounds: Sequence[Round], variant: str, name: str) -> Spread:
    """Summarises one measurement's minibatches per second over the rounds that have it."""
    return Spread.of(
        measured[variant][name].rate for measured in rounds if variant in measured and name in measured[variant]
    )


def compare(rounds: Sequence[Round], ratio: Ratio) -> Spread | None:
    """Summarises a ratio that is formed within each round; None if no round has both sides."""
    over, under = choose(rounds, ratio.over), choose(rounds, ratio.under)
    if over is None or under is None:
        return None
    both = [measured for measured in rounds if ratio.over in measured and ratio.under in measured]
    if not both:
        return None
    return Spread.of(measured[ratio.over][over].rate / measured[ratio.under][under].rate for measured in both)


def run(options: Options, name: str = NAME) -> Outcome:
    """Measures all variants of the model of that name in `options.rounds` interleaved rounds."""
    cores = two_cores()
    machine = describe_machine(cores)
    task = replace(TASKS[name], cores=cores)
    if options.quick:
        task = replace(task, warmup=5, steps=8, tail=5)
    best = QUICK_MICROBATCHES if options.quick else best_microbatches(task)
    jobs: dict[str, Callable[[], dict[str, Measurement]]] = {
        TWO_STAGES: partial(measure, replace(task, variant="strategy")),
        ONE_THREAD: partial(measure, task),
        DEFAULT_THREADS: partial(measure, task, threads=None),
        SCHEDULE_1F1B: partial(measure_schedule_1f1b, task, best),
        DDP: partial(measure_ddp, task),
        ONE_STAGE: partial(measure, replace(task, variant="strategy", stages=1)),
        TWO_AT_ONCE: partial(measure_two_at_once, task),
        TWO_STAGES_TEST: partial(measure, replace(task, variant="strategy", loop="test")),
        ONE_THREAD_TEST: partial(measure, replace(task, loop="test")),
    }
    if name != NAME:  # one model is enough for what the others are not there to show
        for variant in (ONE_STAGE, TWO_STAGES_TEST, ONE_THREAD_TEST):
            del jobs[variant]
    rounds, failures = in_rounds(jobs, options.rounds)
    return report(name, machine, task, rounds, failures)


def report(
    name: str, machine: Mapping[str, object], task: Task, rounds: Sequence[Round], failures: Mapping[str, str]
) -> Outcome:
    """Turns the measurements into a text to read and data to keep."""
    known = {variant for measured in rounds for variant in measured} | set(failures)
    ratios = [ratio for ratio in RATIOS if name == NAME or {ratio.over, ratio.under} <= known]
    figures = [
        Figure(
            f"{ratio.label}, {NAMES[task.model]}",
            compare(rounds, ratio),
            target=ratio.target,
        )
        for ratio in ratios
    ]
    figures.append(
        Figure(
            f"limit  two stages over one thread at most, by layers' times, {NAMES[task.model]}",
            limit(rounds),
            "",
            LIMITS.get(task.model),
        )
    )
    text = [
        f"{name}: {TITLES[task.model].format(**asdict(task))}, batch {task.batch}",
        f"{provenance(machine, len(rounds))}, in each {task.steps} minibatches after {task.warmup}",
        "",
        table(_variant_rows(rounds, [variant for variant in VARIANTS if variant in known])),
        *_busy(rounds),
        "",
        figures_table(figures),
    ]
    text += [f"\nfailed: {variant}\n{reason}" for variant, reason in failures.items()]
    data = {
        "machine": dict(machine),
        "task": asdict(task),
        "rounds": [
            {variant: [asdict(value) for value in found.values()] for variant, found in measured.items()}
            for measured in rounds
        ],
        "ratios": {
            figure.name: None if figure.spread is None else {**asdict(figure.spread), "target": figure.target}
            for figure in figures
        },
        "failures": dict(failures),
    }
    return Outcome("\n".join(text), data, complete=not failures, figures=figures)


def _variant_rows(rounds: Sequence[Round], variants: Sequence[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("variant", "minibatches/s", "range", "cores busy", "loss", "")]
    for variant in variants:
        name = choose(rounds, variant)
        if name is None:
            rows.append((variant, "failed", "", "", "", ""))
            continue
        spread = rates(rounds, variant, name)
        found = [measured[variant][name] for measured in rounds if variant in measured]
        loss = found[-1].loss
        rows.append(
            (
                variant,
                f"{spread.median:.2f}",
                f"{spread.low:.2f} .. {spread.high:.2f}",
                f"{Spread.of(value.cores for value in found).median:.2f}",
                "?" if loss is None else f"{loss:.4f}",
                _note(variant, found[-1]),
            )
        )
    return rows


def _note(variant: str, measurement: Measurement) -> str:
    if variant == SCHEDULE_1F1B:
        return f"{measurement.name} microbatches"
    if variant == DEFAULT_THREADS:
        return f"{measurement.threads} threads"
    notes = measurement.notes
    return f"in flight {notes['in_flight']}" if notes else ""


def _noted(rounds: Sequence[Round]) -> list[Measurement]:
    """The measurements of two stages that have notes about these."""
    return [each for measured in rounds for each in measured.get(TWO_STAGES, {}).values() if each.notes]


def limit(rounds: Sequence[Round]) -> Spread | None:
    """Summarises how much faster than one thread the two stages can be at most: the time of all layers over that of the
    slower stage, as timed in one process before training. None if no round has them."""
    found = _noted(rounds)
    return Spread.of(sum(each.numbers("times")) / max(each.numbers("times")) for each in found) if found else None


def _busy(rounds: Sequence[Round]) -> list[str]:
    """A line about how busy the two stages were."""
    found = _noted(rounds)
    if not found:
        return []
    busy = [Spread.of(each).median for each in zip(*(each.numbers("busy") for each in found), strict=True)]
    return [f"stages of a: busy {' and '.join(f'{each:.0%}' for each in busy)} of the time"]
