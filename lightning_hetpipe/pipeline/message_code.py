"""Messages to bytes and back.

An error travels as its class's name and its text: to whoever decodes it, it is a :class:`RemoteFailure`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline import stage_messages
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.plain_code import PlainCode
from lightning_hetpipe.pipeline.stage_messages import Failure
from lightning_hetpipe.pipeline.values import Addends, Nth, Value


class RemoteFailure(RuntimeError):
    """What a stage in another process has raised."""


class _Failed(NamedTuple):
    minibatch: int
    error: str
    text: str


_MESSAGES = PlainCode(
    [
        stage_messages.Forward,
        stage_messages.Backward,
        stage_messages.Evaluate,
        stage_messages.Cancel,
        stage_messages.Version,
        stage_messages.Flags,
        stage_messages.State,
        stage_messages.Output,
        stage_messages.InputGradients,
        stage_messages.Evaluated,
        Value,
        Nth,
        Addends,
        Autocast,
        _Failed,
    ]
)


def encode(message: Any) -> bytes:
    """
    Raises:
        NotPlain: for what is no message.
    """
    if isinstance(message, Failure):
        message = _Failed(message.minibatch, type(message.error).__name__, str(message.error))
    return _MESSAGES.encode(message)


def decode(data: bytes | memoryview) -> Any:
    """
    Raises:
        NotPlain: if ``data`` is no message.
    """
    message = _MESSAGES.decode(data)
    if not isinstance(message, _Failed):
        return message
    discarded = message.error == Discarded.__name__
    return Failure(message.minibatch, Discarded() if discarded else RemoteFailure(f"{message.error}: {message.text}"))
