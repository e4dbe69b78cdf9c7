"""The models that training processes train: one for each name, with its data, its loss and its two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.training_task import ModelName, OptimizerName, Task

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, made anew for each process with the same weights.

    Attributes:
        net: Makes it; it takes one tensor and gives one.
        samples: Makes so many samples: inputs and targets.
        loss: Of its output and the targets.
        halves: Cuts it for a pipeline of two processes, as evenly as its layers allow; their optimizer sees to each.
            None if no benchmark cuts the model.
        optimizer: Name of its optimizer, if the task names none.
    """

    net: Callable[[Task], nn.Module]
    samples: Callable[[Task, int, Generator], Pair]
    loss: Callable[[Tensor, Tensor], Tensor]
    halves: Callable[[Any], tuple[nn.Module, nn.Module]] | None
    optimizer: OptimizerName


def mlp(task: Task) -> nn.Sequential:
    """`layers` times a Linear and its ReLU, each pair one layer to cut at."""
    layers: list[nn.Module] = []
    for number in range(task.layers):
        linear = nn.Linear(task.width, task.width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers.append(nn.Sequential(linear, nn.ReLU()) if number < task.layers - 1 else nn.Sequential(linear))
    return nn.Sequential(*layers)


def vectors(task: Task, samples: int, generator: Generator) -> Pair:
    """Vectors, each to be made into the same one, rolled."""
    inputs = torch.randn(samples, task.width, generator=generator)
    return inputs, inputs.roll(1, dims=1)


def resnet(task: Task) -> nn.Sequential:
    """The demo's residual net."""
    from lightning_hetpipe.demo import ResNet

    return ResNet(width=task.width, blocks=task.layers).net


def images(task: Task, samples: int, generator: Generator) -> Pair:
    """Grey images of 8 x 8, as the digits are, and one of ten classes that their brightest row tells."""
    inputs = torch.randn(samples, 1, 8, 8, generator=generator)
    return inputs, inputs.sum(3).flatten(1).argmax(1)


def gpt(task: Task) -> nn.Sequential:
    """The demo's GPT without dropout; its embedding and its head are not tied."""
    from lightning_hetpipe.demo import GPT

    return GPT(context=LENGTH, width=task.width, blocks=task.layers, heads=4, dropout=0.0).net


LENGTH = 64
"""Words in a text."""


def texts(task: Task, samples: int, generator: Generator) -> Pair:
    """Bytes, and those that follow."""
    ids = torch.randint(256, (samples, LENGTH + 1), generator=generator)
    ids[:, 1::2] = ids[:, :-1:2]  # half of them can be known
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def word_gpt(task: Task) -> nn.Sequential:
    """A GPT of any vocabulary without dropout; its embedding and its head are not tied."""
    from lightning_hetpipe.demo.models import Block

    blocks = [Block(task.width, max(4, task.width // 64), 0.0) for _ in range(task.layers)]
    head = nn.Linear(task.width, task.words, bias=False)
    return nn.Sequential(Places(task), *blocks, nn.LayerNorm(task.width), head)


class Places(nn.Module):
    """Embeddings of words and of their places."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.word = nn.Embedding(task.words, task.width)
        self.place = nn.Parameter(torch.zeros(task.length, task.width))

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.word(ids) + self.place[: ids.shape[1]]
        return embedded


def gpt2(task: Task) -> nn.Module:
    """Hugging Face's GPT-2 as its configuration has it, dropout included."""
    from transformers import GPT2Config, GPT2LMHeadModel

    make: Any = GPT2Config  # its types lack what all configurations take
    config = make(
        vocab_size=task.words,
        n_positions=task.length,
        n_embd=task.width,
        n_layer=task.layers,
        n_head=4,
        use_cache=False,
    )
    return Logits(GPT2LMHeadModel(config).train())


def long_texts(task: Task, samples: int, generator: Generator) -> Pair:
    """Words, and the word that follows each."""
    ids = torch.randint(task.words, (samples, task.length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def resnet50(task: Task) -> nn.Module:
    """torchvision's."""
    from torchvision.models import resnet50 as make

    net: nn.Module = make()
    return net


def pictures(task: Task, samples: int, generator: Generator) -> Pair:
    """Noise in three colours, and one of a thousand classes."""
    shape = (samples, 3, task.length, task.length)
    return torch.randn(shape, generator=generator), torch.randint(1000, (samples,), generator=generator)


def of_each_word(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class Logits(nn.Module):
    """A model of Hugging Face's that takes words and gives nothing but logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def bert(task: Task) -> nn.Module:
    """Hugging Face's BERT with a head that classifies; small, random, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    make: Any = BertConfig  # its types lack what all configurations take
    config = make(
        vocab_size=256,
        hidden_size=task.width,
        num_hidden_layers=task.layers,
        num_attention_heads=4,
        intermediate_size=4 * task.width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return Logits(BertForSequenceClassification(config).train())


def sentences(task: Task, samples: int, generator: Generator) -> Pair:
    """Words, and whether the first of them is of the larger half."""
    ids = torch.randint(256, (samples, LENGTH), generator=generator)
    return ids, (ids[:, 0] >= 128).long()


class FirstHalf(nn.Module):
    """BERT's embeddings and the first of its layers."""

    def __init__(self, bert: Any, layers: int) -> None:
        super().__init__()
        self.embeddings = bert.embeddings
        self.layers = nn.ModuleList(bert.encoder.layer[:layers])

    def forward(self, ids: Tensor) -> Tensor:
        return _through(self.layers, self.embeddings(input_ids=ids))


class LastHalf(nn.Module):
    """The others, the pooler and the head."""

    def __init__(self, bert: Any, layers: int, head: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(bert.encoder.layer[layers:])
        self.pooler = bert.pooler
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pooler(_through(self.layers, hidden)))
        return logits


def _through(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        given = layer(hidden)
        hidden = given[0] if isinstance(given, tuple) else given
    return hidden


def bert_halves(net: Any) -> tuple[nn.Module, nn.Module]:
    model = net.model
    middle = len(model.bert.encoder.layer) // 2
    return FirstHalf(model.bert, middle), LastHalf(model.bert, middle, model.classifier)


def cut_at(share: float) -> Callable[[nn.Sequential], tuple[nn.Module, nn.Module]]:
    """Cuts a Sequential behind that share of its children."""

    def halves(net: nn.Sequential) -> tuple[nn.Module, nn.Module]:
        middle = round(share * len(net))
        return net[:middle], net[middle:]

    return halves


def optimizer_of(task: Task, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of ``task``."""
    match task.optimizer or MODELS[task.model].optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=task.momentum)
        case "adamw":  # A low first beta, as staleness is momentum enough; the same for all.
            return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.5, 0.95))
        case "soap":
            from pytorch_optimizer import SOAP

            return SOAP(parameters, lr=1e-3)
        case "muon":
            from pytorch_optimizer import Muon

            weights = [*parameters]
            matrices = [each for each in weights if each.ndim >= 2]
            others = [each for each in weights if each.ndim < 2]
            groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
            return Muon(groups, lr=1e-3, foreach=False)  # else it multiplies stacks of matrices, and steps whole


MODELS: Mapping[ModelName, Model] = {
    "mlp": Model(mlp, vectors, functional.mse_loss, cut_at(0.5), "sgd"),
    "resnet": Model(resnet, images, functional.cross_entropy, cut_at(0.5), "sgd"),
    "gpt": Model(gpt, texts, of_each_word, cut_at(0.5), "adamw"),
    "words": Model(word_gpt, long_texts, of_each_word, cut_at(0.5), "adamw"),
    "gpt2": Model(gpt2, long_texts, of_each_word, None, "adamw"),
    "resnet50": Model(resnet50, pictures, functional.cross_entropy, None, "sgd"),
    "bert": Model(bert, sentences, functional.cross_entropy, bert_halves, "adamw"),
}


def build(task: Task) -> nn.Module:
    """The model of ``task``, the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[task.model].net(task)
