"""One process of the GPU's trial: compares fits of one group of cases, or times tasks by turns.

Each result is a line of JSON on stdout as soon as it is there, so that a process that is cut off loses nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import training_worker
from benchmarks.training_task import Task
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.exact import running, test_plain_run, test_side_effects
from tests.exact.pipelines import even
from tests.oracle import Recipe, State
from tests.support.equality import difference
from tests.support.models import (
    ADAMW,
    SGD,
    Learner,
    images,
    mlp,
    recurring,
    resnet,
    sentences,
    tied_language_model,
    transformer,
    vectors,
)
from tests.support.trainers import quiet_trainer

EQUAL, REFUSED, DIFFERS, ERROR = "equal", "refused", "differs", "error"


@dataclass(frozen=True)
class Result:
    """Outcome of one case.

    Attributes:
        part: The group of cases.
        case: Its name.
        result: One of the four words.
        detail: How it differs, the sentence of the refusal, or the error's last lines.
        seconds: That it took.
    """

    part: str
    case: str
    result: str
    detail: str
    seconds: float


class WantedFailed(Exception):
    """Failure of the run that a case is compared with."""


Case = Callable[[], str | None]
"""Compares two runs; returns how they differ, or None."""


def results(part: str, cases: Mapping[str, Case]) -> Iterator[Result]:
    """The result of each case in turn."""
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            how = case()
            result, detail = (EQUAL, "") if how is None else (DIFFERS, how)
        except SettingError as refusal:
            result, detail = REFUSED, str(refusal)
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            result, detail = ERROR, f"{type(error).__name__}: {str(error)[:600]}\n{where}"
        yield Result(part, name, result, detail, round(time.perf_counter() - began, 2))


def compared(wanted: Callable[[], Any], found: Callable[[], Any]) -> str | None:
    """Tell how ``found`` differs from the ``wanted`` result, and whether the ``wanted`` run repeats; None if equal."""
    try:
        expected = wanted()
    except SettingError:
        raise
    except Exception as error:
        raise WantedFailed(f"the run that it is compared with: {type(error).__name__}: {error}") from error
    how = difference(expected, found(), "it")
    if how is None:
        return None
    again = difference(expected, wanted(), "it")
    return f"{how}; {'a repetition of what it should be equals it' if again is None else f'but a repetition {again}'}"


def settings_on(accelerator: str) -> dict[str, Any]:
    """Settings of the Trainer."""
    return {"accelerator": accelerator, "devices": 1}


def strategies_of_one() -> dict[str, Callable[[], HetPipeStrategy]]:
    """With one minibatch in flight: two stages lie on the one card."""
    return {f"k={k}": partial(HetPipeStrategy, stages=k, in_flight=1) for k in (1, 2)}


def compiled_flex(body: Any, x: Tensor) -> Tensor:
    """flex_attention as people use it, with a mask of its own."""
    q = x[:, None, None].expand(-1, 1, 128, -1).repeat(1, 1, 1, 2)
    found: Any = _flex()(q, 2 * q, 1 + q, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -float("inf")))
    y: Tensor = body.drop(found[:, 0, 0, : x.shape[1]])
    return y


@cache
def _flex() -> Any:
    return torch.compile(flex_attention)


def plain(accelerator: str) -> dict[str, Case]:
    """With ``in_flight=1`` everything equals a plain Trainer's, the generators' states included."""
    settings = settings_on(accelerator)
    cases: dict[str, Case] = {}
    precisions: dict[str, Any] = {"bf16-mixed": ["dropout", "noise"], "16-mixed": ["dropout", "noise"]}
    named = [(case, "32-true") for case in test_plain_run.CASES]
    named += [(case, precision) for precision, each in precisions.items() for case in each]
    for case, precision in named:
        own = {**settings, "precision": precision}
        for name, strategy in strategies_of_one().items():

            def run(case: str = case, own: Any = own, strategy: Any = strategy) -> str | None:
                wanted = partial(test_plain_run.outcome, test_plain_run.CASES[case], "auto", **own)
                return compared(wanted, lambda: test_plain_run.outcome(test_plain_run.CASES[case], strategy(), **own))

            cases[f"{case}, {precision}, {name}"] = run
    return cases


def flex(accelerator: str) -> dict[str, Case]:
    """flex_attention compiled; a group of its own, as compilation takes long."""
    settings = settings_on(accelerator)

    def run(strategy: Callable[[], HetPipeStrategy]) -> str | None:
        def outcome(strategy: Any) -> Any:
            return test_plain_run.outcome((test_plain_run.Model, compiled_flex), strategy, **settings)

        return compared(lambda: outcome("auto"), lambda: outcome(strategy()))

    kinds = strategies_of_one()
    return {f"compiled flex_attention, {name}": partial(run, strategy) for name, strategy in kinds.items()}


def seed_the_device(net: Any, h: Tensor) -> Tensor:
    seed: Any = torch.cuda.manual_seed if h.is_cuda else torch.manual_seed
    seed(42)
    return h + 0.1 * torch.rand_like(h)


def draw_twice(net: Any, h: Tensor) -> Tensor:
    """By the state of the device's generator."""
    module: Any = torch.cuda if h.is_cuda else torch
    state = module.get_rng_state()
    noise = torch.rand_like(h)
    module.set_rng_state(state)
    return h + noise - torch.rand_like(h)


def scatter(net: Any, h: Tensor) -> Tensor:
    """Adds in an order that a GPU leaves to chance, in forward and backward."""
    places = torch.arange(h.shape[1], device=h.device) % 3
    summed = torch.zeros(len(h), 3, device=h.device, dtype=h.dtype).index_add(1, places, h)
    return h + 0.01 * summed[:, places]


EFFECTS = [*test_side_effects.EFFECTS, test_side_effects.norm_gradients_together, seed_the_device, draw_twice, scatter]


def trained(effect: Any, strategy: Any, accelerator: str) -> Any:
    """All that a fit with a side effect leaves; tensors that are no buffers lie on the device from the start."""
    test_side_effects.AUX.clear()
    L.seed_everything(3, verbose=False)
    device = torch.device("cpu" if accelerator == "cpu" else torch.accelerator.current_accelerator() or "cpu")
    net = test_side_effects.Net(effect)
    net.count, net.held = net.count.to(device), [each.to(device) for each in net.held]
    task = test_side_effects.Task(net)
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, **settings_on(accelerator))
    trainer.fit(task, vectors(24, 4))
    values = [*net.queue, *net.held, net.count, *test_side_effects.AUX]
    kept = [torch.as_tensor(value).detach().cpu() for value in values]
    return [task.state_dict(), kept, net.array.tolist(), net.norms, dict(net.kinds), dict(net.order)]


def effects(accelerator: str) -> dict[str, Case]:
    """Side effects of forwards, at one in flight."""
    cases: dict[str, Case] = {}
    for effect in EFFECTS:
        for name, strategy in strategies_of_one().items():

            def run(effect: Any = effect, strategy: Any = strategy) -> str | None:
                return compared(
                    lambda: trained(effect, "auto", accelerator), lambda: trained(effect, strategy(), accelerator)
                )

            cases[f"{effect.__name__}, {name}"] = run
    return cases


def effects_sync(accelerator: str) -> dict[str, Case]:
    """The same in a pipeline without staleness, where what draws without a seed differs by law."""

    def run(effect: Any) -> str | None:
        synchronous = HetPipeStrategy(stages=2, in_flight=3, weights="sync")
        return compared(lambda: trained(effect, "auto", accelerator), lambda: trained(effect, synchronous, accelerator))

    return {f"{effect.__name__}, sync": partial(run, effect) for effect in EFFECTS}


def effects_stash(accelerator: str) -> dict[str, Case]:
    """The same with three in flight: two runs are equal."""

    def run(effect: Any) -> str | None:
        def stashing() -> Any:
            return trained(effect, HetPipeStrategy(stages=2, in_flight=3, weights="stash"), accelerator)

        return compared(stashing, stashing)

    return {f"{effect.__name__}, stash twice": partial(run, effect) for effect in EFFECTS}


TASKS: dict[str, tuple[Callable[[Recipe], Learner], Any]] = {
    "mlp": (mlp, vectors),
    "resnet": (resnet, images),
    "transformer": (partial(transformer, dropout=0.0), sentences),
    "tied": (tied_language_model, sentences),
}
RECIPES = {"sgd": SGD, "adamw": ADAMW}


def moved(value: Any, device: torch.device) -> Any:
    return [each.to(device) for each in value]


def against_oracle(
    name: str, recipe: str, accelerator: str, k: int, nm: int, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> str | None:
    """Tell how a pipeline differs from the oracle's loop on the same card."""
    torch.manual_seed(0)
    make, make_loader = TASKS[name]
    task, loader = make(RECIPES[recipe]), make_loader(26, 3)
    device = torch.device("cpu" if accelerator == "cpu" else torch.accelerator.current_accelerator() or "cpu")
    task.to(device)
    batches = [moved(batch, device) for batch in loader]

    def expected() -> Any:
        own = dict(options)
        if "scaler" in own:
            own["scaler"] = torch.amp.GradScaler(device.type)
        return running.expect(task, [batches, batches], nm, **own)

    def found() -> Any:
        net: Any = task.net
        strategy = even(len(list(net.children())), k, nm)
        start = State.of(task, RECIPES[recipe].optimizer(task))
        record = running.fit(task, loader, strategy=strategy, **settings_on(accelerator), **settings)
        for key, tensor in (*task.named_parameters(), *task.named_buffers()):
            tensor.data = {**start.weights, **start.buffers}[key].clone()
            tensor.grad = None
        return record

    def parts(run: Any) -> Any:
        return [run.outputs, run.states, run.gradients]

    return compared(lambda: parts(expected()), lambda: parts(found()))


def oracle(accelerator: str) -> dict[str, Case]:
    """Two stages on one card equal the oracle's loop; with one minibatch in flight that is plain training."""
    cases: dict[str, Case] = {}
    for nm in (1, 3, 5):
        for name in TASKS:
            recipe = "adamw" if (nm + len(name)) % 2 else "sgd"
            run = partial(against_oracle, name, recipe, accelerator, 2, nm, {}, {})
            cases[f"{name}, {recipe}, k=2, Nm={nm}"] = run
    bf16: Any = ({"autocast": torch.bfloat16}, {"precision": "bf16-mixed"})
    cases["transformer, bf16-mixed, k=2, Nm=3"] = partial(
        against_oracle, "transformer", "adamw", accelerator, 2, 3, *bf16
    )
    if accelerator != "cpu":  # where Lightning takes bfloat16 instead
        fp16: Any = ({"autocast": torch.float16, "scaler": True}, {"precision": "16-mixed"})
        cases["mlp, 16-mixed, k=2, Nm=3"] = partial(against_oracle, "mlp", "sgd", accelerator, 2, 3, *fp16)
    cases["mlp, sgd, k=4, Nm=3"] = partial(against_oracle, "mlp", "sgd", accelerator, 4, 3, {}, {})
    return cases


def fits(make: Callable[[], nn.Module], loader: Any, strategy: Any, accelerator: str, **settings: Any) -> Any:
    """States of a fit of a fresh task."""
    L.seed_everything(4, verbose=False)
    task: Any = make()
    record = running.fit(task, loader, strategy=strategy, **settings_on(accelerator), **settings)
    return [record.outputs, record.states]


def pipelines(accelerator: str) -> dict[str, Case]:
    """Pipelines of two stages on one card: ``sync`` equals plain; dropout repeats, with every weight policy."""
    cases: dict[str, Case] = {}
    for name, (make, loader) in TASKS.items():
        for precision in ("32-true", "bf16-mixed", "16-mixed"):

            def run(make: Any = make, loader: Any = loader, precision: Any = precision) -> str | None:
                one = partial(fits, partial(make, ADAMW), loader(26, 3), accelerator=accelerator, precision=precision)
                synchronous = HetPipeStrategy(stages=2, in_flight=3, weights="sync")
                return compared(lambda: one("auto"), lambda: one(synchronous))

            cases[f"{name}, {precision}, sync equals plain"] = run
    drawing: dict[str, tuple[Any, Any]] = {"transformer": (transformer, sentences), "recurring": (recurring, vectors)}
    for name, (make, loader) in drawing.items():
        for weights in ("stash", "auto", "pipeoptim"):

            def twice(make: Any = make, loader: Any = loader, weights: Any = weights) -> str | None:
                def one() -> Any:
                    strategy = HetPipeStrategy(stages=2, in_flight=3, weights=weights)
                    return fits(partial(make, SGD), loader(26, 3), strategy, accelerator)

                return compared(one, one)

            cases[f"{name} with dropout, {weights} twice"] = twice
    return cases


class SeededStep(L.LightningModule):
    """Sets a seed of all devices, or of one, in ``training_step``, before a module that drops out."""

    def __init__(self, of_device: bool) -> None:
        super().__init__()
        self.of_device = of_device
        self.drop = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        self.rest = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seed: Any = torch.cuda.manual_seed if self.of_device and batch[0].is_cuda else torch.manual_seed
        seed(7)
        return nn.functional.cross_entropy(self.rest(self.drop(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def seeds(accelerator: str) -> dict[str, Case]:
    """A seed that ``training_step`` sets governs the masks of what it calls next."""

    def one(strategy: Any, of_device: bool) -> Any:
        L.seed_everything(4, verbose=False)
        task = SeededStep(of_device)
        trainer = quiet_trainer(strategy=strategy, max_epochs=2, **settings_on(accelerator))
        trainer.fit(task, vectors(24, 4))
        return task.state_dict()

    def run(strategy: Any, of_device: bool) -> str | None:
        return compared(lambda: one("auto", of_device), lambda: one(strategy(), of_device))

    kinds = {**strategies_of_one(), "sync": partial(HetPipeStrategy, stages=2, in_flight=3, weights="sync")}
    return {
        f"seed of {'the device' if of_device else 'all'} in training_step, {name}": partial(run, strategy, of_device)
        for of_device in (False, True)
        for name, strategy in kinds.items()
    }


GROUPS: Mapping[str, Callable[[str], dict[str, Case]]] = {
    "plain": plain,
    "oracle": oracle,
    "seeds": seeds,
    "effects": effects,
    "effects sync": effects_sync,
    "pipelines": pipelines,
    "effects stash": effects_stash,
    "flex": flex,
}
"""By name, what matters most first."""


def by_turns(tasks: Mapping[str, Task], turns: int) -> Iterator[dict[str, Any]]:
    """Trains each task once in each turn; every other turn goes in the opposite order."""
    failed = set[str]()
    for turn in range(turns):
        named = [*tasks.items()]
        for name, task in named[:: -1 if turn % 2 else 1]:
            if name in failed:
                continue
            if task.accelerator != "cpu":
                torch.accelerator.empty_cache()
                torch.accelerator.reset_peak_memory_stats()
            try:
                (measured,) = training_worker.TRAINING[task.variant](task)
            except Exception as error:
                failed.add(name)
                yield {"task": name, "turn": turn, "failure": f"{type(error).__name__}: {str(error)[:600]}"}
                continue
            peak = torch.accelerator.max_memory_allocated() if task.accelerator != "cpu" else 0
            yield {"task": name, "turn": turn, "peak_bytes": peak, **asdict(measured)}


def say(result: Mapping[str, Any]) -> None:
    """Print one line."""
    print(json.dumps(result), flush=True)


def main(what: str, *arguments: str) -> None:
    """Run a group on an accelerator, or the tasks that JSON holds, by name, so many times by turns."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if what == "turns":
        tasks = {name: Task.from_json(json.dumps(task)) for name, task in json.loads(arguments[0]).items()}
        for found in by_turns(tasks, int(arguments[1])):
            say(found)
        return
    accelerator, share = arguments[0], arguments[1] if len(arguments) > 1 else "1/1"
    torch.set_num_threads(1)
    part, of = map(int, share.split("/"))
    cases = [*GROUPS[what](accelerator).items()][part - 1 :: of]
    for result in results(what, dict(cases)):
        say(asdict(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
