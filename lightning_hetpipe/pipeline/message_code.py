"""Messages as records, which plain data may have in it.

An error travels as its class's name and its text: to whoever reads it, it is a :class:`RemoteFailure`
(a ``SettingError`` stays one, as its text is for users).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline import stage_messages
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.stage_messages import Failure
from lightning_hetpipe.pipeline.values import Addends, Nth, Value
from lightning_hetpipe.rules.versions import Reading


class RemoteFailure(RuntimeError):
    """Error that a stage in another process has raised."""


class _EncodedFailure(NamedTuple):
    minibatch: int
    error: str
    text: str


RECORDS: Sequence[type[Any]] = (
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
)
"""Classes of messages, and of what is in them."""


def to_record(message: Any) -> Any:
    """``message`` as one of :data:`RECORDS`."""
    if not isinstance(message, Failure):
        return message
    text = "\n".join([str(message.error), *getattr(message.error, "__notes__", ())])
    return _EncodedFailure(message.minibatch, type(message.error).__name__, text)


def of_record(record: Any) -> Any:
    """The message that was made :func:`to_record`."""
    if not isinstance(record, _EncodedFailure):
        return record
    if record.error == Discarded.__name__:
        return Failure(record.minibatch, Discarded())
    if record.error == SettingError.__name__:
        return Failure(record.minibatch, SettingError(record.text))
    return Failure(record.minibatch, RemoteFailure(f"{record.error}: {record.text}"))
