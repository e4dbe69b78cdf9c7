"""The life of a minibatch: the events of a run, of which every feature is an extension.

One :class:`~lightning_hetpipe.run.driver.Driver` raises the events; it alone knows Lightning's loop and the
pipeline. Minibatch p, of which the weights after Lightning's step p are version p, lives through these. All are raised
in Lightning's thread, but for ``user_step`` and ``section``, which are raised in the runner's.

==========================  ============================================================================================
event                       what has just become true
==========================  ============================================================================================
epoch_begins(first)         Lightning's loop begins an epoch, whose first minibatch is ``first``
fetching(p)                 *around*: the DataLoader is asked for the batch of p
transferring(p)             *around*: the hooks of that batch's transfer run, ahead of Lightning's loop
submitting(p)               p is about to be put in flight
user_step(p)                *around*: all of the user's step for p
section(p)                  *around*: each section of it, between two calls of pipelined modules; a pair of functions
submitted(p, v)             p is in flight, on the weights of version v
waiting(p)                  *around*: Lightning's loop is at step p, and waits for its gradients
arrived(p)                  the gradients of p are there, or p has failed
finished(p, args)           the gradients of p are there, and Lightning's buffers are those that its forward has left
inline_step(p)              *around*: the user's step for p runs in Lightning's own thread, on the live weights
inline_output(p, ...)       it was called with ``args``, and has returned ``output``
inline_backward(p)          *around*: Lightning's own backward of it
placed()                    what the first minibatch has shown was planned, and layers lie on their stages' devices
computed(work, p, start)    Lightning's own thread has done the forward or the backward of p, since the time ``start``
stepped(v)                  step v is over, with all its callbacks, and Lightning asks for the next batch
settled(v)                  the live weights and layers are those of version v, which is published next
synchronising(v)            *around*: step v has ended a wave, which is merged with other virtual workers'
continues(v)                later minibatches are in flight, and stay so
publishing(v)               *around*: the live weights become version v on all stages
published(v)                version v is on all stages, and minibatches are in flight
emptied(v)                  version v is on all stages, and the pipeline starts empty at it
draining(p)                 *around*: an evaluation is to begin after step p, and waits until nothing in flight moves
evaluating(p)               *around*: that evaluation
epoch_ends()                Lightning's loop is through with the epoch; what is in flight is discarded next
discarded()                 nothing is in flight any more
closed()                    the run is over
==========================  ============================================================================================

Where the user's step runs in Lightning's own thread (the first minibatch of a fit or of an evaluation, and all of a
spread run), there are ``epoch_begins``, ``fetching``, ``transferring``, those from ``inline_step`` to ``computed``,
``epoch_ends``, ``discarded`` and ``closed``.

Version v is published by ``Driver.publish``, and copied by ``Engine.publish``: when Lightning asks for the next batch,
or, where nothing runs ahead of Lightning's loop, at the next step. A wave is pushed before that, at ``stepped``
(``extensions/waves_and_cuts.py``); gradients reach Lightning in ``PipelinedSteps.backward`` (``steps.py``);
``rules/versions.py`` says which version p uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec

from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.user_section import NO_SECTION, UserSection, UserSections

P = ParamSpec("P")

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

    def inline_step(self, minibatch: int) -> Around:
        return NOTHING

    def inline_output(self, minibatch: int, args: Sequence[Any], output: Any) -> None: ...

    def inline_backward(self, minibatch: int) -> Around:
        return NOTHING

    def computed(self, work: str, minibatch: int, start: float) -> None: ...

    def placed(self) -> None: ...

    def stepped(self, version: int) -> None: ...

    def settled(self, version: int) -> None: ...

    def synchronising(self, version: int) -> Around:
        return NOTHING

    def continues(self, version: int) -> None: ...

    def publishing(self, version: int) -> Around:
        return NOTHING

    def published(self, version: int) -> None: ...

    def emptied(self, version: int) -> None: ...

    def draining(self, minibatch: int) -> Around:
        return NOTHING

    def evaluating(self, minibatch: int) -> Around:
        return NOTHING

    def epoch_ends(self) -> None: ...

    def discarded(self) -> None: ...

    def closed(self) -> None: ...


class Extensions:
    """The extensions of one run, which hear of each event in their order.

    An event is named by the method of :class:`Extension` that answers it: ``tell(Extension.published, version)``.
    """

    def __init__(self) -> None:
        self._all: list[Extension] = []
        self._listening: dict[str, list[Callable[..., Any]]] = {}

    def add(self, *extensions: Extension) -> None:
        """Adds ``extensions``, for all events from now on."""
        self._all.extend(extensions)
        self._listening.clear()

    def replace(self, those: Sequence[Extension], other: Extension) -> None:
        """Put ``other`` in the place of ``those``, which stand together and hear of no later event."""
        first = self._all.index(those[0])
        self._all[first : first + len(those)] = [other]
        self._listening.clear()

    def tell(self, event: Callable[Concatenate[Extension, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Raises ``event``."""
        for hear in self._who_hear(event):
            hear(*args, **kwargs)

    def around(self, event: Callable[Concatenate[Extension, P], Around], *args: P.args, **kwargs: P.kwargs) -> Around:
        """Raises ``event``, which lasts as long as what is returned is open; the first extension has the innermost."""
        found = [hear(*args, **kwargs) for hear in reversed(self._who_hear(event))]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return opened(found)

    def section(self, minibatch: int) -> UserSections:
        """The sections of all extensions as one."""
        return UserSections([hear(minibatch) for hear in self._who_hear(Extension.section)])

    def close(self) -> None:
        """Tells all that the run is over, the last one first, and each of them, whatever others raise."""
        with ExitStack() as stack:
            for hear in self._who_hear(Extension.closed):
                stack.callback(hear)

    def _who_hear(self, event: Callable[..., Any]) -> list[Callable[..., Any]]:
        """The methods of those extensions that implement ``event``."""
        name = event.__name__
        if name not in self._listening:
            listening = [each for each in self._all if getattr(type(each), name) is not event]
            self._listening[name] = [getattr(each, name) for each in listening]
        return self._listening[name]


@contextmanager
def opened(those: Iterable[Around]) -> Iterator[None]:
    """Open several, the first one outermost."""
    with ExitStack() as stack:
        for around in those:
            stack.enter_context(around)
        yield
