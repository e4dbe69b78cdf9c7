"""Members of a group run at the same time, all of them to the end, and the first failure is everybody's."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup, MemberPool
from lightning_hetpipe.rules.channel_layouts import ChannelCounts
from tests.split.dividing import CPU, Whole, divided, started
from tests.split.nets import vgg


def pool(members: int, home: int = 0) -> MemberPool:
    return MemberPool("hetpipe-stage-0", DeviceGroup([CPU] * members, ChannelCounts([1.0] * members), home), 1)


def test_all_members_run_at_once() -> None:
    """Each waits for all others, which it would do for ever if they ran one after the other."""
    barrier = threading.Barrier(3)

    def job() -> str:
        barrier.wait(60)
        return threading.current_thread().name

    with started(pool(3, home=1)) as members:
        found = members.run([job] * 3)
    assert found == ["hetpipe-stage-0-member-0", threading.current_thread().name, "hetpipe-stage-0-member-2"]
    assert members.join(10)


def test_forwards_and_backwards_of_a_region_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2)
    met: list[str] = []
    run = MemberPool.run

    def together(self: MemberPool, jobs: list[object], uses: object = ()) -> list[object]:
        def meeting(job: object) -> object:
            def inner() -> object:
                barrier.wait(60)
                met.append(threading.current_thread().name)
                return job()  # type: ignore[operator]

            return inner

        return run(self, [meeting(job) for job in jobs], uses)  # type: ignore[arg-type,misc]

    monkeypatch.setattr(MemberPool, "run", together)
    with divided(Whole(vgg(), torch.randn(2, 3, 8, 8)), (1, 1)) as both:
        both.results(both.apart)
    assert len(met) == 2 * 2 * len(both.regions)


@pytest.mark.parametrize("home", [0, 1, 2])
def test_the_first_failure_is_raised_once_all_are_through(home: int) -> None:
    done: list[int] = []

    def failing(member: int) -> None:
        done.append(member)
        raise ArithmeticError(str(member))

    with started(pool(3, home)) as members:
        with pytest.raises(ArithmeticError, match="1"):
            members.run([lambda: done.append(0), lambda: failing(1), lambda: failing(2)])
        assert sorted(done) == [0, 1, 2]
        assert members.run([lambda: "on", None, lambda: "again"]) == ["on", None, "again"]
