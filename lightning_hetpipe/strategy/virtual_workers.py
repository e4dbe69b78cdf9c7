"""A strategy for several virtual workers: who this process is, how all of them start, meet, agree and end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning as L
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost
from lightning_hetpipe.launch import node_hosts, servers
from lightning_hetpipe.launch.launcher import Launcher, ServingLauncher, WasLeftOut, check_processes
from lightning_hetpipe.launch.node_hosts import ServingNodes
from lightning_hetpipe.launch.ranks import Rank, Role, WorkerRange, announce, find_rank
from lightning_hetpipe.launch.told_to_end import REASON, TERMINATED, ToldToEnd
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.lightning_private import recount_batches, train_loaders
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.shares import whole_steps
from lightning_hetpipe.run.together import check_returning
from lightning_hetpipe.settings import seconds
from lightning_hetpipe.strategy import relations
from lightning_hetpipe.strategy.weights import HostWeights
from lightning_hetpipe.strategy.wsp_callback import WSPCallback
from lightning_hetpipe.workers import collectives, program_group
from lightning_hetpipe.workers.program_group import sessions_so_far
from lightning_hetpipe.workers.shared_data import InjectedRank, Shares, deal_among, let_be_long
from lightning_hetpipe.workers.shared_metrics import share
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group

T = TypeVar("T")


class VirtualWorkers(HostWeights):
    """Lightning's *rank* is the virtual worker: one process each, and no process group.

    Args:
        given: Settings of ``HetPipeStrategy``.
        arguments: ``HostWeights``'s.
    """

    in_flight: int | Literal["auto"]
    weights: str
    lr_correction: int | Literal["auto"] | None
    plan: Plan | None

    def __init__(self, given: SimpleNamespace, **arguments: Any) -> None:
        super().__init__(**arguments)
        each = given.virtual_workers
        self.virtual_workers: int | WorkerRange = each if isinstance(each, int) else WorkerRange(*each)
        self.wsp: WSPCallback | None = given.wsp
        self.timeout = seconds(given.timeout)
        self._num_nodes = 1
        self._group: Group | None = None
        self._shared: Synchroniser | NoSynchroniser = NoSynchroniser()
        self._shares: Shares | None = None
        self._recorded: tuple[int, ...] | None = None  # of the checkpoint that is loaded
        self._failure: BaseException | None = None
        self._found_rank: Rank | None = None
        self._waiting_call: str | None = None

    @property
    def _rank(self) -> Rank:
        if self.cluster_environment is None:  # not given to a Trainer yet
            return find_rank(self.virtual_workers, self._num_nodes, LightningEnvironment(), self._planned_workers())
        if self._found_rank is None:
            planned = self._planned_workers()
            self._found_rank = find_rank(self.virtual_workers, self._num_nodes, self.cluster_environment, planned)
        return self._found_rank

    def _planned_workers(self) -> Sequence[int]:
        """Number of virtual workers on each node, where a plan says it."""
        return ()

    def _serving_nodes(self) -> ServingNodes | None:
        """The nodes of a plan, where some serve stages of virtual workers that others lead, and are to start hosts."""
        return None

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        self._num_nodes = value
        self._found_rank = None

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        """N, the number of virtual workers."""
        return self._rank.size

    @property
    def global_rank(self) -> int:
        """i, which virtual worker this is."""
        return self._rank.index

    @property
    def local_rank(self) -> int:
        return self._rank.local

    @property
    def node_rank(self) -> int:
        return self._rank.node

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": InjectedRank(self.global_rank)}

    def process_dataloader(self, dataloader: object) -> object:
        """Give the share of this virtual worker to a ``dataloader`` whose sampler Lightning has made."""
        if self._shares is not None:
            self._shares.deal(dataloader)
        if self._group is not None and len(self._group.seats.taken) < self._group.size:
            deal_among(self._group.seats.taken, self.global_rank, dataloader)
        return super().process_dataloader(dataloader)

    def _divide(self, trainer: L.Trainer) -> None:
        """Divide the data of a run of ``trainer``, before its loaders are made."""
        given = self._group.settings.shares if self._group is not None else "equal"
        recorded, self._recorded, self._shares = self._recorded, None, None
        if recorded is not None and given not in ("auto", recorded):
            rank_zero_info(
                f"the checkpoint was saved with shares={list(recorded)}, and this run goes on with"
                f" shares={list(given) if isinstance(given, tuple) else given!r}"
            )
        if given == "equal":
            return
        if trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int):
            rank_zero_info(
                "shares stay equal: limit_train_batches, overfit_batches and fast_dev_run give all virtual workers as"
                " many batches"
            )
            return
        callbacks: list[L.Callback] = getattr(trainer, "callbacks", [])  # set by a connector, without declaring it
        if any(isinstance(callback, LearningRateFinder) for callback in callbacks):
            rank_zero_info("shares stay equal: a search for a learning rate waits for all after every step")
            return
        if self.global_rank:
            let_be_long(trainer)
        recorded = None if recorded is None else whole_steps(recorded, trainer.accumulate_grad_batches)
        lengths = given if isinstance(given, tuple) else recorded
        self._shares = Shares(self.global_rank, self.world_size, lengths, given == "auto")

    def barrier(self, name: str | None = None) -> None:
        if (group := self._together("strategy.barrier")) is not None:
            group.gather(None, "strategy.barrier()" if name is None else f"strategy.barrier({name!r})")

    def broadcast(self, obj: T, src: int = 0) -> T:
        if (group := self._together("strategy.broadcast")) is None:
            return obj
        given: T = collectives.broadcast(group, obj, src)
        return given

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or (together := self._together("strategy.reduce")) is None:
            return tensor
        return collectives.reduce(together, tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        together = self._together("all_gather")
        return tensor if together is None else collectives.all_gather(together, tensor, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        group = self._together("strategy.reduce_boolean_decision")
        return decision if group is None else collectives.decide(group, decision, all)

    @property
    def _in_flight_now(self) -> int:
        """Nm of the training that runs."""
        return 1

    def _together(self, what: str) -> Group | None:
        """The virtual workers, for a call of ``what``, which all of them make."""
        if self._group is not None:
            if collectives.runs_ahead(self._in_flight_now):
                raise collectives.ahead(what)
            if isinstance(self._shared, Synchroniser) and not self._shared.meet():
                raise collectives.apart(what)
            if not collectives.is_logging():
                self._waiting_call = what
        return self._group

    def _waited_in(self) -> str | None:
        """A call, other than by ``self.log``, in which virtual workers have waited for each other since last asked."""
        call, self._waiting_call = self._waiting_call, None
        return call

    def _share(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Everyone's ``tensor``, for a metric."""
        group = self._together(what)
        return [tensor] if group is None else collectives.everyones(group, tensor, what)

    # The life of a run.

    def setup_environment(self) -> None:
        self._open_group()
        super().setup_environment()

    def _open_group(self) -> None:
        """Meets the other virtual workers, if there are any; those of an earlier run of the program are still there."""
        self._failure = None
        self._check_shares()
        hosts = self._found_hosts()
        if self.world_size == 1:
            return
        assert self.cluster_environment is not None
        wsp = self._wsp_settings()
        if self.plan is not None and (said := relations.other_than_planned(wsp, self.plan)):
            rank_zero_info(said)
        further = None if hosts is None else hosts.servers
        self._group = program_group.meet(self._rank, self.cluster_environment, wsp, self.timeout, further)
        self._group.interrupted = self._is_interrupted
        share(self._share)

    def _configure_launcher(self) -> None:
        """Make the launcher, where this process is one of several, or is to start them."""
        rank = self._rank
        check_processes(rank)
        self._launcher = None
        if rank.role is Role.HOST:
            self._launcher = ServingLauncher(self._serve)
            announce(rank)
        elif rank.size > 1 or rank.nodes > 1:
            self._launcher = Launcher(
                rank,
                self._told_to_children,
                on_end=lambda local, code: program_group.note_end(rank.index - rank.local + local, code),
                closed=program_group.end,
                end_timeout=lambda: self._wsp_settings().end_timeout,
                resumed_from=self._resumed_from,
                restarts=lambda: self._wsp_settings().restarts,
            )
            announce(rank)

    def _resumed_from(self) -> Path | None:
        """The checkpoint that a fit resumes from in a process that comes back to a run; None in any other."""
        if self.global_rank == 0:
            return None
        self._open_group()
        returning = None if self._group is None else self._group.seats.returning
        if returning is None:
            return servers.resumed_from()
        check_returning(getattr(self._launcher, "trainer", None), self.global_rank)
        return returning.checkpoint

    def _told_to_children(self) -> dict[str, str]:
        """Starts the server of this launch, unless others were named; gives what children need to find it."""
        assert self.cluster_environment is not None
        self._check_shares()
        wsp, nodes = self._wsp_settings(), self._serving_nodes()
        if nodes is not None:
            node_hosts.start(self._rank, self.cluster_environment, wsp, nodes)
        variables = servers.start(self._rank, self.cluster_environment, wsp, everywhere=nodes is not None)
        return {**variables, **sessions_so_far()}

    def _found_hosts(self) -> node_hosts.FoundHosts | None:
        """Addresses at which nodes of this launch serve, where some do."""
        if (nodes := self._serving_nodes()) is None:
            return None
        assert self.cluster_environment is not None
        return node_hosts.find(self._rank, self.cluster_environment, self._wsp_settings(), self.timeout, nodes)

    def _serve(self) -> int:
        """Serve the virtual workers that other nodes lead; gives the exit code."""
        nodes = self._serving_nodes()
        assert nodes is not None
        assert self.cluster_environment is not None
        return node_hosts.serve(self._rank, self.cluster_environment, self._wsp_settings(), self.timeout, nodes)

    def _wsp_settings(self) -> WSPSettings:
        trainer = getattr(self._launcher, "trainer", None)
        given = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, WSPCallback)]
        if self.wsp is not None and self.wsp not in given:
            given.append(self.wsp)
        wsp = (relations.only_wsp(given) or WSPCallback()).settings
        return wsp if self.plan is None else relations.wsp_as_planned(wsp, self.plan)

    def _check_shares(self) -> None:
        """Refuse shares of another number of virtual workers."""
        shares = self._wsp_settings().shares
        if isinstance(shares, tuple) and len(shares) != self.world_size:
            raise SettingError(
                f"shares={list(shares)!r} has {len(shares)} entries, and {self.world_size} virtual"
                f" worker{'s' if self.world_size > 1 else ''} train; give one for each, or leave shares out"
            )

    def teardown(self) -> None:
        """Leaves a fit. The virtual workers stay together, to the program's end, unless this one has failed."""
        self._shared, self._recorded = NoSynchroniser(), None
        try:
            if self._group is not None and self._failure is not None:
                group, self._group = self._group, None
                share(None)
                if isinstance(self._failure, ToldToEnd):
                    told = "" if self.global_rank else f"{SIGTERMException.__name__}: it was {REASON}"  # any who waits
                    group.part(told, why=REASON if self._failure.alone else "")
                elif isinstance(self._failure, VirtualWorkerLost) and self._failure.how and group.index:
                    group.part(why=self._failure.how)
                else:
                    alone = isinstance(self._failure, VirtualWorkerLost | WasLeftOut)
                    group.part(f"{type(self._failure).__name__}: {self._failure}", alone)
            elif self._group is not None:
                self._group.leave_fit()
        finally:
            if self.cluster_environment is not None:
                super().teardown()

    def _agreed(self, value: T) -> T:
        """Virtual worker 0's ``value``; not by ``broadcast``, as who counts its calls sees Lightning's."""
        if self._group is None:
            return value
        given: T = collectives.broadcast(self._group, value, 0)
        return given

    def _synchroniser(self, trainer: L.Trainer) -> Synchroniser | NoSynchroniser:
        if self._group is None:
            return NoSynchroniser()
        synchroniser = Synchroniser(self._group, trainer.lightning_module, self._shares)
        wsp = self._group.settings
        if wsp.aggregate == "sum":
            number = f"up to {self._group.size}" if self._rank.least else str(self._group.size)
            rank_zero_warn(
                f"the updates of {number} virtual workers are added, which acts like a learning rate {number} times as"
                " large; lower it, or set WSPCallback(aggregate='mean')"
            )
        agreed = [f"in_flight={self.in_flight}", f"wave={wsp.wave}", f"update_dtype={wsp.update_dtype}"]
        agreed += [f"weights={self.weights}", f"lr_correction={self.lr_correction}", f"placement={wsp.placement}"]
        agreed.append(f"checksum of plan={None if self.plan is None else self.plan.fingerprint}")
        agreed.append(f"shares={self._shares or 'equal'}")
        synchroniser.enter(agreed)
        if self._group.seats.returning is not None:
            let_be_long(trainer)
            for loader in train_loaders(trainer):  # made before it had a seat
                deal_among(self._group.seats.taken, self.global_rank, loader)
            if train_loaders(trainer):
                recount_batches(trainer)
        self._shared = synchroniser
        return synchroniser

    def _is_interrupted(self) -> bool:
        trainer = getattr(self._launcher, "trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failure = exception
        if isinstance(exception, SIGTERMException) and exception.code is None:  # a script would end as if all were well
            exception.code = TERMINATED
