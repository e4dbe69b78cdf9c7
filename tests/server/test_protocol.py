"""L3 to L5 under whatever interleaving, duplication, loss and reordering hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lightning_hetpipe.server.protocol.identifiers import Refusal, RemoteFault
from lightning_hetpipe.server.protocol.member import Goal, MemberState
from tests.server.world import LEASE, Fault, World


class Interleavings(RuleBasedStateMachine):
    """VWs step in any order, through waves and cuts of their own; messages get lost, halved, doubled, or come late."""

    world: World

    @initialize(
        n=st.integers(1, 4),
        distance=st.sampled_from([0, 0, 1, 3]),
        servers=st.integers(1, 3),
        mean=st.booleans(),
    )
    def begin(self, n: int, distance: int, servers: int, mean: bool) -> None:
        # Halves and quarters of eighths are exact; a third is not, so any order of its sums would not do.
        aggregate = "mean" if mean and (distance == 0 or n in (1, 2, 4)) else "sum"
        self.world = World(n, distance, servers, aggregate)

    def drive(self, vw: int, fault: Fault) -> None:
        try:
            self.world.step(vw, fault)
        except RemoteFault as refused:
            if refused.refusal is not Refusal.LEFT_OUT or not self.world.lossy:
                raise
            self.world.kill(vw)

    @precondition(lambda self: self.world.vws)
    @rule(data=st.data(), fault=st.sampled_from([Fault.NONE] * 4 + list(Fault)), steps=st.integers(1, 6))
    def step(self, data: st.DataObject, fault: Fault, steps: int) -> None:
        vw = data.draw(st.sampled_from(sorted(self.world.vws)))
        for _ in range(steps):
            if vw not in self.world.vws:
                return
            member = self.world.vws[vw].member
            if member.state is MemberState.IDLE and member.goal is Goal.NONE:
                ahead = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
                cut = member.cut + ahead if ahead else 0
                self.world.wave(vw, cut=cut, update=not cut or data.draw(st.booleans()))
            self.drive(vw, fault)
            fault = Fault.NONE

    @rule(rounds=st.integers(1, 12))
    def all_step(self, rounds: int) -> None:
        for _ in range(rounds):
            for vw in sorted(self.world.vws):
                member = self.world.vws[vw].member
                if member.state is MemberState.IDLE and member.goal is Goal.NONE:
                    self.world.wave(vw)
                self.drive(vw, Fault.NONE)

    @rule(seconds=st.floats(0.1, 2 * LEASE))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.sent)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        self.world.again(data.draw(st.integers(0, len(self.world.sent) - 1)))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


class Restarts(Interleavings):
    """And servers are started anew, one after the other or at once, at any time."""

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        for server in data.draw(st.sets(st.integers(0, self.world.servers - 1), min_size=1)):
            self.world.restart(server)


class Deaths(Restarts):
    """And VWs die, or are silent for too long. Once one holds weights, the others can go on without any."""

    def survivors(self) -> list[int]:
        return [vw for vw, one in self.world.vws.items() if one.member.commit_index is not None]

    @precondition(lambda self: len(self.survivors()) == len(self.world.vws) > 1)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(data.draw(st.sampled_from(sorted(self.world.vws))))

    @precondition(lambda self: len(self.survivors()) == len(self.world.vws) > 1)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        one = self.world.vws[data.draw(st.sampled_from(sorted(self.world.vws)))]
        self.world.lossy = True
        one.heartbeats = False
        self.world.pass_time(1.5 * LEASE)
        one.heartbeats = True


MACHINES = [Interleavings, Restarts, Deaths]


def explore(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks
        ),
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_laws_hold_whatever_happens(machine: type[RuleBasedStateMachine]) -> None:
    explore(machine, 20, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_laws_hold_whatever_happens_for_long(machine: type[RuleBasedStateMachine]) -> None:
    explore(machine, 400, 60)
