"""A training process of `time_to_target`: trains one variant and announces its validation losses over time."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Generator, Tensor, distributed, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

from benchmarks.harness import Measurement, announce
from benchmarks.training_models import of_each_word
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo import GPT, SourceText

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """One run: a GPT learns the standard library's source with AdamW, an update for each ``texts`` texts."""

    variant: Literal["plain", "strategy", "schedule_1f1b"]
    lr: float
    updates: int
    parts: int = 1
    """Equal parts of an update's texts: accumulated minibatches, or 1F1B's microbatches."""
    weights: str = "auto"
    """For "strategy": the weight policy."""
    in_flight: int | None = None
    """For "strategy": Nm; None for its default."""
    threads: int = 1
    """torch's, of each process; for "strategy", of each stage."""
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the operating system likes."""
    seed: int = 1
    """Decides the initial weights, and the order of the texts."""
    rank: int = 0
    """For "schedule_1f1b": the stage that this process is."""
    rendezvous: str = ""
    """For "schedule_1f1b": a path that does not exist yet, for the two processes to find each other."""
    cut: int = 3
    """For "schedule_1f1b": how many of the model's layers the first stage has."""
    every: int = 20
    """Updates between two validations."""
    texts: int = 16
    length: int = 64
    """Bytes of a text."""
    width: int = 64
    blocks: int = 4
    source_bytes: int = 1_000_000
    """Bytes of source code that are read, to train and to validate."""
    validation: int = 128
    """Texts that validate, at most."""

    def to_json(self) -> str:
        """The job as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "cores": tuple(values["cores"])})


class Curve:
    """Copies of the weights every few updates, and when they were made; validated once training is over.

    So no variant's time has validations in it. Its zero is the end of the first update: a strategy's start-up, in which
    it captures the model, does not grow with the run.
    """

    def __init__(self, job: Job, net: GPT) -> None:
        self.job = job
        self.net = net
        self.updates = 0
        self.made = self.zero = time.perf_counter()
        self.cpu_zero = self.cpu = 0.0
        self.seconds: list[float] = []
        self.weights: list[Tensor] = []

    def updated(self) -> None:
        """To be called after each optimizer step."""
        self.updates += 1
        if self.updates == 1:
            self.zero, self.cpu_zero = time.perf_counter(), time.process_time()
        if self.updates % self.job.every == 0:
            self.seconds.append(time.perf_counter() - self.zero)
            self.cpu = time.process_time() - self.cpu_zero
            with torch.no_grad():
                self.weights.append(parameters_to_vector(self.net.parameters()))

    def measurement(self, losses: Sequence[float], **notes: object) -> Measurement:
        """The measurement, in updates; ``losses`` are those of the copies."""
        return Measurement(
            self.job.variant,
            rate=(self.updates - 1) / self.seconds[-1],
            cores=self.cpu / self.seconds[-1],
            threads=torch.get_num_threads(),
            loss=losses[-1] if losses else None,
            notes={"seconds": self.seconds, "losses": losses, "start_s": self.zero - self.made, **notes},
        )


def model(job: Job) -> GPT:
    """The model, with the initial weights of the seed."""
    torch.manual_seed(job.seed)
    return GPT(
        context=job.length,
        width=job.width,
        blocks=job.blocks,
        dropout=0.0,
        lr=job.lr,
        betas=(0.9, 0.999),
    )


def source(job: Job) -> tuple[TensorDataset, Pair]:
    """The texts that are trained on, and some of those that validate, as one batch."""
    data = SourceText(context=job.length, max_bytes=job.source_bytes)
    data.setup("fit")
    inputs, targets = data.parts["val"].tensors
    few = slice(None, None, -(-len(inputs) // job.validation))
    return data.parts["train"], (inputs[few], targets[few])


def batches(job: Job, texts: int) -> DataLoader[Any]:
    """So many texts at a time, in an order that depends on the seed only, and whole updates in an epoch."""
    train, _ = source(job)
    whole = Subset(train, range(len(train) // job.texts * job.texts))
    order = RandomSampler(whole, generator=Generator().manual_seed(job.seed))
    # As a sampler, so that each minibatch is taken out of the tensors at once.
    return DataLoader(train, batch_size=None, sampler=BatchSampler(order, texts, drop_last=True))


def validated(job: Job, copies: Sequence[Tensor]) -> list[float]:
    """The validation loss of each copy of the weights, in nats per byte."""
    _, validation = source(job)
    net = model(job).eval()
    losses = []
    for copy in copies:
        vector_to_parameters(copy, net.parameters())
        with torch.inference_mode():
            losses.append(net.loss(validation).item())
    return losses


def train_with_trainer(job: Job) -> Measurement:
    """Variants "plain" and "strategy"."""
    strategy = HetPipeStrategy(stages=2, in_flight=job.in_flight or "auto", weights=job.weights)
    net = model(job)
    curve = Curve(job, net)

    class Recorder(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
            if trainer.global_step > curve.updates:
                curve.updated()

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=strategy if job.variant == "strategy" else "auto",
            accelerator="cpu",
            devices=1,
            max_epochs=-1,
            max_steps=job.updates,
            accumulate_grad_batches=job.parts,
            callbacks=[Recorder()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(net, batches(job, job.texts // job.parts))
    notes: dict[str, object] = {}
    if job.variant == "strategy":
        report = strategy.last_run
        assert report is not None
        notes["in_flight"] = report.in_flight
        notes["layers"] = [len(stage.layers) for stage in report.stages]
        notes["busy"] = [round(stage.busy or 0.0, 3) for stage in report.stages]
    return curve.measurement(validated(job, curve.weights), **notes)


def train_with_schedule_1f1b(job: Job) -> Measurement:
    """Variant "schedule_1f1b": torch's synchronous pipeline in a plain loop; this process is one of its two stages.

    The last stage validates the weights of both.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=2)
    net = model(job)
    curve = Curve(job, net)
    layers = [*net.net]
    net.net = nn.Sequential(*(layers[job.cut :] if job.rank else layers[: job.cut]))
    made: Any = net.configure_optimizers()  # for this stage's weights
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    stage = PipelineStage(net.net, stage_index=job.rank, num_stages=2, device=torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=job.parts, loss_fn=of_each_word)
    loader = batches(job, job.texts)
    while curve.updates < job.updates:
        for inputs, targets in loader:
            optimizer.zero_grad()
            if job.rank == 0:
                schedule.step(inputs, return_outputs=False)
            else:
                schedule.step(target=targets, return_outputs=False)
            optimizer.step()
            scheduler.step()
            curve.updated()
            if curve.updates == job.updates:
                break
    losses = validated(job, joined(curve.weights, job.rank))
    distributed.destroy_process_group()
    return curve.measurement(losses)


def joined(own: Sequence[Tensor], rank: int) -> list[Tensor]:
    """The whole model's weights in the last stage's process, nothing in the first one's."""
    if rank == 0:
        distributed.send(torch.tensor(own[0].numel()), dst=1)
        distributed.send(torch.stack([*own]), dst=1)
        return []
    size = torch.tensor(0)
    distributed.recv(size, src=0)
    first = torch.empty(len(own), int(size))
    distributed.recv(first, src=0)
    return [torch.cat(pair) for pair in zip(first, own, strict=True)]


def main(argument: str) -> None:
    """Does the job that `argument` holds as JSON."""
    job = Job.from_json(argument)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    announce(train_with_schedule_1f1b(job) if job.variant == "schedule_1f1b" else train_with_trainer(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
