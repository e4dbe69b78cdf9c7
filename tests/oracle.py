"""The oracle: a plain loop that trains with the pipeline's staleness. No Lightning, no threads, no stages.

Minibatches are numbered p = 1, 2, ... over the whole run. Version v is what minibatch v left: the weights after its
optimizer step, or unchanged where gradients are still being accumulated. Minibatch p computes its gradient on version
max(v_e, p - Nm), where v_e is the version at which the pipeline last started empty: at the start of every epoch, and
where a run was resumed; other weight policies have other versions, and predictions (``tests/oracle_policies.py``).
Buffers (BatchNorm's statistics) are not stale: minibatch p starts from what p - 1 left, also where both call the same
module several times.

Each gradient is that of one plain ``backward``, so that its sums associate as autograd's: the uses of a tensor or of a
weight are added one by one, the latest first, with no partial sum for a pass, a stage or a pipelined module.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from tests.oracle_policies import corrected, missed, predictions_of, version_of

Batch = Any
Outputs = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Recipe:
    """Recipe for the optimizer of a model and, if there is one, its learning rate scheduler."""

    optimizer: Callable[[nn.Module], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    interval: Literal["step", "epoch"] = "step"


@dataclass(frozen=True, repr=False)
class State:
    """A copy of everything that training changes."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Any]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> State:
        return State(
            {name: weight.detach().clone() for name, weight in model.named_parameters()},
            {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
            copy_of(optimizer.state_dict()),
        )


def copy_of(value: Any) -> Any:
    """A copy of nested dicts and lists with tensors; faster than ``copy.deepcopy``."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_of(each) for key, each in value.items()}
    return [copy_of(each) for each in value] if isinstance(value, list) else value


@dataclass(repr=False)
class Run:
    """Results of a run, minibatch by minibatch.

    ``outputs[i]`` are those of minibatch i + 1; their ``loss`` is already divided by the number of accumulated batches,
    as Lightning hands it to callbacks. ``states[v]`` is version v, so ``states[0]`` the start. ``gradients[p]`` exist
    for each p that ended with an optimizer step: what was accumulated for it, before clipping.
    """

    outputs: list[Outputs] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[Tensor]:
        return [outputs["loss"] for outputs in self.outputs]


def train(
    model: M,
    step: Callable[[M, Batch], Outputs],
    epochs: Sequence[Sequence[Batch]],
    recipe: Recipe,
    in_flight: int | Sequence[int],
    *,
    accumulate: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    restarts: Collection[int] = (),
    skips: Collection[int] = (),
    stop_after: int | None = None,
    weights: str = "stash",
    lr_correction: int | tuple[int, int] | None = None,
    plain: int | None = None,
    edit: Callable[[int, M], None] | None = None,
) -> Run:
    """Trains a copy of ``model``.

    Args:
        model: stays as it is.
        step: outputs of one batch, ``loss`` among them.
        epochs: the batches of each epoch.
        recipe: optimizer and scheduler.
        in_flight: Nm; one number, or one for each epoch.
        accumulate: batches per optimizer step; one number, or one for each epoch. The last batch of an epoch steps.
        clip_norm: clips the gradients by their total norm, if given.
        clip_value: clips each element of the gradients, if given.
        autocast: the forward pass runs under autocast with this dtype, if given.
        scaler: scales losses, if given: minibatch p's by the scale of the version that it computes on.
        restarts: versions, besides each epoch's first, from which the pipeline started empty.
        skips: minibatches at which ``optimizer_step`` makes no step, though one is due.
        stop_after: the last minibatch.
        weights: the weight policy.
        lr_correction: as ``minibatches`` has it.
        plain: as ``minibatches`` has it.
        edit: called with (p, model) when minibatch p is done, as a callback that changes weights would be.
    """
    run = Run()
    options: dict[str, Any] = {"accumulate": accumulate, "clip_norm": clip_norm, "clip_value": clip_value}
    options |= {"autocast": autocast, "scaler": scaler, "restarts": restarts, "skips": skips, "stop_after": stop_after}
    options |= {"weights": weights, "lr_correction": lr_correction, "plain": plain}
    for p, trained in minibatches(run, model, step, epochs, recipe, in_flight, **options):
        if edit is not None:
            edit(p, trained)
    return run


def minibatches(
    run: Run,
    model: M,
    step: Callable[[M, Batch], Outputs],
    epochs: Sequence[Sequence[Batch]],
    recipe: Recipe,
    in_flight: int | Sequence[int],
    *,
    accumulate: int | Sequence[int] = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    restarts: Collection[int] = (),
    skips: Collection[int] = (),
    stop_after: int | None = None,
    virtual_worker: int = 0,
    resumed: tuple[int, State] | None = None,
    weights: str = "stash",
    lr_correction: int | tuple[int, int] | None = None,
    plain: int | None = None,
) -> Iterator[tuple[int, M]]:
    """Trains a copy of ``model``, as ``train`` says, and writes ``run``; yields (p, the copy) when minibatch p is done.

    Version p is what the copy holds when the iterator goes on, so whoever iterates may change it.

    Args:
        virtual_worker: whose random numbers it draws.
        resumed: how many minibatches came before, and the state that they left: ``run`` begins there.
        weights: the weight policy.
        lr_correction: after how many updates rates are the recipe's; before, update t has tau^(1 - t / K) of them less;
            and the least tau.
        plain: the seed of torch's default generator, which draws instead of the minibatch's generators (law L7, without
            a pipeline). A DataLoader draws from it at the start of each epoch.
    """
    model = copy.deepcopy(model).train()
    optimizer = recipe.optimizer(model)
    start = 0
    if resumed is not None:
        start, state = resumed
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data.copy_({**state.weights, **state.buffers}[name])
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    run.states.append(State.of(model, optimizer))
    device = next(model.parameters()).device
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    run.scales.append(scaler.get_scale())
    moved: dict[str, Tensor] = {}  # by the last step, for ``pipeoptim``
    predictions = [predictions_of(weights, model, optimizer, moved)]
    p, updates = start, 0
    if plain is not None:
        torch.manual_seed(plain)
    with contextlib.nullcontext(_ignored) if plain is not None else own_dropouts(model, virtual_worker) as minibatch_is:
        for epoch, batches in enumerate(epochs):
            if plain is not None:
                torch.empty((), dtype=torch.int64).random_()
            every = accumulate if isinstance(accumulate, int) else accumulate[epoch]
            nm = in_flight if isinstance(in_flight, int) else in_flight[epoch]
            lacks = missed(weights, nm, every)
            empty_at = begin = p
            for index, batch in enumerate(batches):
                if p in restarts:
                    empty_at = p
                p += 1
                minibatch_is(p)
                version = max(empty_at, version_of(weights, p, nm, begin, every))
                steps = index // every - (version - begin) // every
                predicted = run.states[version - start].weights
                if steps:
                    by = predictions[version - start]
                    predicted = {n: by[n](w, steps) if n in by else w for n, w in predicted.items()}
                scaler.scale(torch.zeros((), device=device))  # makes the scale, which unscale_ asks for
                with (
                    weights_of(model, predicted),
                    own_scale(model, run.scales[version - start], scaler) as scaled,
                ):
                    with torch.autocast(
                        device.type, autocast or torch.bfloat16, autocast is not None, cache_enabled=False
                    ):
                        outputs = step(model, batch)
                    loss = outputs["loss"] / every
                    scaled(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                run.outputs.append({name: value.detach().clone() for name, value in outputs.items()})
                run.outputs[-1]["loss"] = loss.detach().clone()

                ends_epoch = index + 1 == len(batches)
                steps_now = (index + 1) % every == 0 or ends_epoch
                if steps_now and p in skips:
                    optimizer.zero_grad()
                    updates, moved = updates + 1, {}
                elif steps_now:
                    scaler.unscale_(optimizer)
                    run.gradients[p] = gradients(model)
                    # In the optimizer's order, which is Lightning's: the sum in the norm depends on it.
                    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
                    if clip_norm is not None:
                        nn.utils.clip_grad_norm_(stepped, clip_norm)
                    if clip_value is not None:
                        nn.utils.clip_grad_value_(stepped, clip_value)
                    there = {name: weight.detach().clone() for name, weight in model.named_parameters()}
                    with corrected(optimizer, updates, lr_correction, lacks):
                        scaler.step(optimizer)
                    updates += 1
                    moved = {name: weight.detach() - there[name] for name, weight in model.named_parameters()}
                    scaler.update()
                    optimizer.zero_grad()
                if scheduler is not None and (steps_now if recipe.interval == "step" else ends_epoch):
                    scheduler.step()
                yield p, model
                run.states.append(State.of(model, optimizer))
                run.scales.append(scaler.get_scale())
                with corrected(optimizer, updates, lr_correction, lacks):
                    predictions.append(predictions_of(weights, model, optimizer, moved))
                if p == stop_after:
                    return


def train_together(
    model: M,
    step: Callable[[M, Batch], Outputs],
    data: Sequence[Sequence[Sequence[Batch]]],
    recipe: Recipe,
    in_flight: int | Sequence[int],
    wave: int | Sequence[int] | Mapping[int, Sequence[int]],
    *,
    mean: bool = False,
    cuts: Collection[int] | Mapping[int, Collection[int]] = (),
    update_dtype: torch.dtype | None = None,
    resumed: Sequence[tuple[int, State]] | None = None,
    **options: Any,
) -> list[Run]:
    """Trains N virtual workers with D = 0 (laws L3, L4 and L6); returns the run of each.

    Up to a cut, every ``wave`` minibatches a worker's update (its weights minus those it took last) is added to the
    global weights: wave after wave, within a wave worker after worker. It then takes the global weights, which are its
    version at the wave's end. Its last wave before a cut may be short, and is followed by the weights of the cut.
    A worker that has come to the end of its data waits there, and adds nothing. Where workers' waves have lengths of
    their own, cuts come after as many waves.

    Args:
        model: stays as it is.
        step: outputs of one batch, ``loss`` among them.
        data: the batches of each epoch of each worker; their numbers may differ.
        recipe: optimizer and scheduler, of each worker.
        in_flight: Nm; one number, or one for each epoch.
        wave: W; one number, or W_v of each worker, or these by epoch.
        mean: updates are divided by N.
        cuts: after how many minibatches of an epoch there is a cut, besides its end; of every epoch, or by epoch. With
            W_v, after how many waves.
        update_dtype: in which updates travel; what is lost by it is part of the worker's next update.
        resumed: as ``minibatches`` has it, of each worker; all have the same weights.
        options: as ``minibatches`` has them.
    """
    runs = [Run() for _ in data]
    starts: Sequence[tuple[int, State] | None] = resumed or [None] * len(data)
    workers = [
        minibatches(run, model, step, epochs, recipe, in_flight, virtual_worker=i, resumed=start, **options)
        for i, (run, epochs, start) in enumerate(zip(runs, data, starts, strict=True))
    ]
    start_of = resumed[0][1].weights if resumed else dict(model.named_parameters())
    total = {name: weight.detach().clone() for name, weight in start_of.items()}
    lost = [{name: torch.zeros_like(weight) for name, weight in total.items()} for _ in data]
    taken = [{name: weight.clone() for name, weight in total.items()} for _ in data]
    models: dict[int, M] = {}

    def take(i: int) -> None:
        taken[i] = {name: weight.clone() for name, weight in total.items()}
        if i in models:
            for name, weight in models[i].named_parameters():
                weight.data.copy_(total[name])

    for epoch in range(len(data[0])):
        lengths = [len(epochs[epoch]) for epochs in data]
        given = wave[epoch] if isinstance(wave, Mapping) else wave
        of_wave = [given] * len(data) if isinstance(given, int) else given
        until = [1] * len(data) if isinstance(given, int) else of_wave  # minibatches up to a cut of number 1
        last = max(-(-length // each) for length, each in zip(lengths, until, strict=True))
        start = 0
        of_epoch = cuts.get(epoch, ()) if isinstance(cuts, Mapping) else cuts
        for cut in sorted({*(cut for cut in of_epoch if cut < last), last}):
            counts = [max(0, min(cut * u, n) - start * u) for n, u in zip(lengths, until, strict=True)]
            waves = [
                [min(each, count - done) for done in range(0, count, each)]
                for count, each in zip(counts, of_wave, strict=True)
            ]
            for c in range(max(map(len, waves))):
                pushing = [i for i in range(len(data)) if c < len(waves[i])]
                for i in pushing:
                    for _ in range(waves[i][c]):
                        _, models[i] = next(workers[i])
                for i in pushing:
                    for name, weight in models[i].named_parameters():
                        update = weight.detach() - taken[i][name]
                        if update_dtype is not None:
                            wanted = update + lost[i][name]
                            update = wanted.to(update_dtype)
                            lost[i][name] = wanted - update.to(wanted.dtype)
                            update = update.to(wanted.dtype)
                        total[name] += update / len(data) if mean else update
                for i in pushing:
                    if c + 1 < len(waves[i]):
                        take(i)
            for i, length in enumerate(lengths):
                if length >= cut * until[i] or cut == last:
                    take(i)
            start = cut
        for i in models.keys() - {0}:
            for buffer, first in zip(models[i].buffers(), models[0].buffers(), strict=True):
                buffer.data.copy_(first)
    for worker in workers:
        assert next(worker, None) is None  # which records the last version
    return runs


def _ignored(p: int) -> None:
    """Begin minibatch ``p``, which has no generators of its own."""


@contextlib.contextmanager
def weights_of(model: nn.Module, version: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model computes with other weights; gradients still gather in its own parameters' ``.grad``."""
    live = {name: weight.data for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data = version[name]
    try:
        yield
    finally:
        for name, weight in model.named_parameters():
            weight.data = live[name]


@contextlib.contextmanager
def own_scale(model: nn.Module, scale: float, scaler: torch.amp.GradScaler) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gives what scales a loss by ``scale``; its gradients are then brought to the present scale, and accumulated."""
    if not scaler.is_enabled():
        yield lambda loss: loss
        return
    before = gradients(model)
    model.zero_grad()
    yield lambda loss: loss * torch.tensor(scale, device=loss.device)
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            weight.grad *= scaler.get_scale() / scale
        if name in before:
            weight.grad = before[name] if weight.grad is None else before[name] + weight.grad


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients that there are."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


class Noise(nn.Module):
    """Normal random numbers, of the shape of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


@contextlib.contextmanager
def own_dropouts(model: nn.Module, virtual_worker: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives each ``nn.Dropout`` and ``Noise`` of the model a generator for each minibatch (law L7), and in it for each
    call that the step makes of the module around it.

    Yields a function that says which minibatch comes next.
    """
    chance = RandomGenerators(run_seed(), virtual_worker)
    paths: dict[nn.Dropout | Noise, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Dropout | Noise):
            paths.setdefault(module, []).append(path)
    calls: Counter[tuple[nn.Module, int]] = Counter()
    outermost: Counter[nn.Module] = Counter()
    inside: list[nn.Module] = []
    minibatch = 0

    def begin(p: int) -> None:
        nonlocal minibatch
        minibatch = p
        calls.clear()
        outermost.clear()
        inside.clear()

    def enter(module: nn.Module, _: Any) -> None:
        if not inside:
            outermost[module] += 1
        inside.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        inside.pop()

    def drawing(module: nn.Dropout | Noise) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if isinstance(module, nn.Dropout) and (not module.training or module.p == 0 or x.numel() == 0):
                return x
            # A module that stands in several places is named by the place; one that is called again, by an ordinal. A
            # call of the step's begins anew, and is part of the name.
            call = outermost[inside[0]] - 1
            again, place = divmod(calls[module, call], len(paths[module]))
            calls[module, call] += 1
            generator = chance.generator(minibatch, paths[module][place], again, x.device, call)
            if isinstance(module, Noise):
                return torch.empty_like(x).normal_(generator=generator)
            # The arithmetic of torch's own dropout on a CPU: a mask of zeros and 1 / (1 - p).
            kept = torch.empty_like(x).bernoulli_(1 - module.p, generator=generator)
            return x * kept.div_(1 - module.p)

        return forward

    for each in paths:
        vars(each)["forward"] = drawing(each)
    inner = [module for module in model.modules() if module is not model] if paths else []
    hooks = [module.register_forward_pre_hook(enter) for module in inner]
    hooks += [module.register_forward_hook(leave) for module in inner]
    try:
        yield begin
    finally:
        for hook in hooks:
            hook.remove()
        for each in paths:
            del vars(each)["forward"]


def run_seed() -> int:
    """Seed of every random operation of a run: what ``seed_everything`` was given, else torch's own seed."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
