"""The life of a minibatch: the events of a run, of which every feature is an extension.

One :class:`~lightning_hetpipe.run.driver.Driver` raises the events; it alone knows Lightning's loop and the
engine. Minibatch p, of which the weights after Lightning's step p are version p, lives through these. All are raised in
Lightning's thread, but for ``user_step`` and ``section``, which are raised in the runner's.

======================  ================================================================================================
event                   what has just become true
======================  ================================================================================================
epoch_begins(first)     Lightning's loop begins an epoch, whose first minibatch is ``first``
fetching(p)             *around*: the DataLoader is asked for the batch of p
transferring(p)         *around*: the hooks of that batch's transfer run, ahead of Lightning's loop
submitting(p)           p is about to be put in flight
user_step(p)            *around*: all of the user's step for p
section(p)              *around*: each section of it, between two calls of pipelined modules; a pair of functions
submitted(p, v)         p is in flight, on the weights of version v
waiting(p)              *around*: Lightning's loop is at step p, and waits for its gradients
arrived(p)              they are there, or p has failed
finished(p, args)       they are there, and Lightning's buffers are those that p's forward has left
stepped(v)              step v is over, with all its callbacks, and its weights are in the live parameters
continues(v)            later minibatches are in flight, and stay so
publishing(v)           *around*: the live weights become version v on all stages
published(v)            they are, and minibatches are in flight
emptied(v)              they are, and the pipeline starts empty, at version v
inline_step(p)          *around*: the user's step for p runs in Lightning's own thread, on the live weights
inline_output(p, ...)   it was called with ``args``, and has returned ``output``
inline_backward(p)      *around*: Lightning's own backward of it
draining(p)             *around*: an evaluation is to begin after step p, and waits until nothing in flight moves
evaluating(p)           *around*: that evaluation
epoch_ends()            Lightning's loop is through with the epoch, and what is in flight is of no use
discarded()             nothing is in flight any more
closed()                the run is over
======================  ================================================================================================

Where the user's step runs in Lightning's own thread (the first minibatch of a fit, and all with a single stage),
there are ``epoch_begins``, ``fetching``, the ``inline_...`` events, ``evaluating``, ``epoch_ends`` and ``closed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.user_section import NO_SECTION, UserSection, UserSections

Around = AbstractContextManager[Any]
NOTHING: Around = nullcontext()


class Extension:
    """A feature of a run: implements the events that concern it."""

    def epoch_begins(self, first: int) -> None: ...

    def fetching(self, minibatch: int) -> Around:
        return NOTHING

    def transferring(self, minibatch: int) -> Around:
        return NOTHING

    def submitting(self, minibatch: int) -> None: ...

    def user_step(self, minibatch: int) -> Around:
        return NOTHING

    def section(self, minibatch: int) -> UserSection:
        return NO_SECTION

    def submitted(self, minibatch: int, version: int) -> None: ...

    def waiting(self, minibatch: int) -> Around:
        return NOTHING

    def arrived(self, minibatch: int) -> None: ...

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None: ...

    def stepped(self, version: int) -> None: ...

    def continues(self, version: int) -> None: ...

    def publishing(self, version: int) -> Around:
        return NOTHING

    def published(self, version: int) -> None: ...

    def emptied(self, version: int) -> None: ...

    def inline_step(self, minibatch: int) -> Around:
        return NOTHING

    def inline_output(self, minibatch: int, args: Sequence[Any], output: Any) -> None: ...

    def inline_backward(self, minibatch: int) -> Around:
        return NOTHING

    def draining(self, minibatch: int) -> Around:
        return NOTHING

    def evaluating(self, minibatch: int) -> Around:
        return NOTHING

    def epoch_ends(self) -> None: ...

    def discarded(self) -> None: ...

    def closed(self) -> None: ...


class Extensions(Extension):
    """Several extensions as one, for whoever raises events.

    Each event reaches them in their order; what is opened around something is opened in the reverse order, so that the
    first of them has the innermost one.
    """

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self.all = list(extensions)

    def epoch_begins(self, first: int) -> None:
        for extension in self.all:
            extension.epoch_begins(first)

    def fetching(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.fetching(minibatch))

    def transferring(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.transferring(minibatch))

    def submitting(self, minibatch: int) -> None:
        for extension in self.all:
            extension.submitting(minibatch)

    def user_step(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.user_step(minibatch))

    def section(self, minibatch: int) -> UserSections:
        found = [extension.section(minibatch) for extension in self.all]
        return UserSections([section for section in found if section is not NO_SECTION])

    def submitted(self, minibatch: int, version: int) -> None:
        for extension in self.all:
            extension.submitted(minibatch, version)

    def waiting(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.waiting(minibatch))

    def arrived(self, minibatch: int) -> None:
        for extension in self.all:
            extension.arrived(minibatch)

    def finished(self, minibatch: BatchInFlight, args: Sequence[Any]) -> None:
        for extension in self.all:
            extension.finished(minibatch, args)

    def stepped(self, version: int) -> None:
        for extension in self.all:
            extension.stepped(version)

    def continues(self, version: int) -> None:
        for extension in self.all:
            extension.continues(version)

    def publishing(self, version: int) -> Around:
        return self._around(lambda extension: extension.publishing(version))

    def published(self, version: int) -> None:
        for extension in self.all:
            extension.published(version)

    def emptied(self, version: int) -> None:
        for extension in self.all:
            extension.emptied(version)

    def inline_step(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.inline_step(minibatch))

    def inline_output(self, minibatch: int, args: Sequence[Any], output: Any) -> None:
        for extension in self.all:
            extension.inline_output(minibatch, args, output)

    def inline_backward(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.inline_backward(minibatch))

    def draining(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.draining(minibatch))

    def evaluating(self, minibatch: int) -> Around:
        return self._around(lambda extension: extension.evaluating(minibatch))

    def epoch_ends(self) -> None:
        for extension in self.all:
            extension.epoch_ends()

    def discarded(self) -> None:
        for extension in self.all:
            extension.discarded()

    def closed(self) -> None:
        """The last one ends first, and each of them, whatever others raise."""
        with ExitStack() as stack:
            for extension in self.all:
                stack.callback(extension.closed)

    def _around(self, opened: Callable[[Extension], Around]) -> Around:
        found = [around for extension in reversed(self.all) if (around := opened(extension)) is not NOTHING]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return _All(found)


class _All:
    """Opens several, the first one outermost."""

    def __init__(self, opened: Sequence[Around]) -> None:
        self._opened = opened
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for around in self._opened:
                stack.enter_context(around)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)
