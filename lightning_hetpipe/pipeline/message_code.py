"""Messages as records, which plain data may have in it.

An error travels as its class's name, its text and its notes: to whoever reads it, it is a :class:`RemoteFailure`
(a ``SettingError`` stays one, as its text is for users, and so does one for want of memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline import stage_messages
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.stage_messages import Failure
from lightning_hetpipe.pipeline.values import Addends, Nth, Value
from lightning_hetpipe.rules.versions import Reading


class RemoteFailure(RuntimeError):
    """Error that a stage in another process has raised."""


STAYING: Mapping[str, type[Exception]] = {
    SettingError.__name__: SettingError,
    torch.OutOfMemoryError.__name__: torch.OutOfMemoryError,
}
"""Errors that stay what they are, by name."""


class _EncodedFailure(NamedTuple):
    minibatch: int
    error: str
    text: str
    notes: Sequence[str]


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
    error = message.error
    return _EncodedFailure(
        message.minibatch, type(error).__name__, str(error), [*map(str, getattr(error, "__notes__", ()))]
    )


def of_record(record: Any) -> Any:
    """The message that was made :func:`to_record`."""
    if not isinstance(record, _EncodedFailure):
        return record
    if record.error == Discarded.__name__:
        return Failure(record.minibatch, Discarded())
    error: Exception
    if record.error in STAYING:
        error = STAYING[record.error](record.text)
    else:
        error = RemoteFailure(f"{record.error}: {record.text}")
    for note in record.notes:
        error.add_note(note)
    return Failure(record.minibatch, error)
