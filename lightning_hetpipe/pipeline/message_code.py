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
from lightning_hetpipe.rules.versions import Reading


class RemoteFailure(RuntimeError):
    """Error that a stage in another process has raised."""


class _EncodedFailure(NamedTuple):
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
        stage_messages.Move,
        stage_messages.Flags,
        stage_messages.StageState,
        stage_messages.Output,
        stage_messages.InputGradients,
        stage_messages.Evaluated,
        Value,
        Nth,
        Addends,
        Autocast,
        Reading,
        _EncodedFailure,
    ]
)


def encode(message: Any) -> bytes:
    """
    Raises:
        NotPlain: for what is no message.
    """
    if isinstance(message, Failure):
        message = _EncodedFailure(message.minibatch, type(message.error).__name__, str(message.error))
    return _MESSAGES.encode(message)


def decode(data: bytes | memoryview) -> Any:
    """
    Raises:
        NotPlain: if ``data`` is no message.
    """
    message = _MESSAGES.decode(data)
    if not isinstance(message, _EncodedFailure):
        return message
    discarded = message.error == Discarded.__name__
    return Failure(message.minibatch, Discarded() if discarded else RemoteFailure(f"{message.error}: {message.text}"))
