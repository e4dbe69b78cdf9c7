"""Changes of a division are divisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.costs import Division
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.search.plans import changes
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import clusters, divisions, profiles
from tests.support.marks import explores


@explores(40)
@given(profile=profiles(5), cluster=clusters(3), ordered=st.booleans(), given_=st.booleans(), data=st.data())
def test_changes_are_divisions(
    profile: Profile, cluster: Cluster, ordered: bool, given_: bool, data: st.DataObject
) -> None:
    """And of as many stages, where that is given."""
    costs = PlanningProblem(profile, cluster, optimizer=0, ordered=ordered).costs
    every = {
        (tuple(next(n for n, kind in enumerate(costs.kinds) if slot in kind.slots) for slot, *_ in stages), splits)
        for stages in divisions(len(profile.layers), cluster.slots, ordered)
        for splits in [tuple(first for _, first, _ in stages)]
    }
    place = data.draw(st.sampled_from(sorted(every)))
    stages = len(place[0]) if given_ else None
    problem = PlanningProblem(profile, cluster, optimizer=0, ordered=ordered, stages=stages)
    assert {(each.kinds, each.splits) for each in changes(problem, Division.of(costs, *place))} <= {
        each for each in every if stages in (None, len(each[0]))
    }
