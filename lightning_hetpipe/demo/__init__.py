"""The demo's models and data, so that an installed package can run them: handwritten digits and a small GPT."""

from lightning_hetpipe.demo.digits import Digits
from lightning_hetpipe.demo.gpt import GPT
from lightning_hetpipe.demo.resnet import ResNet
from lightning_hetpipe.demo.source_text import SourceText

__all__ = ["GPT", "Digits", "ResNet", "SourceText"]
