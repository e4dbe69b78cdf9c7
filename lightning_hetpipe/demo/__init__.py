"""The demo's models and data, so that an installed package can run them: handwritten digits and a small GPT."""

from lightning_hetpipe.demo.data import Digits, SourceText
from lightning_hetpipe.demo.models import GPT, ResNet

__all__ = ["GPT", "Digits", "ResNet", "SourceText"]
