"""Private names of Lightning for what fetches batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_hetpipe import lightning_private as of_lightning
from tests.private.guarding import guards
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


def fetcher_of(loader: Any) -> Any:
    fetcher = _PrefetchDataFetcher(prefetch_batches=0)
    combined = CombinedLoader(loader, "max_size_cycle")
    combined.limits = [float("inf")]
    fetcher.setup(combined)
    return fetcher


@guards("_DataFetcher", "_start_profiler", "_stop_profiler", "_combined_loader")
def test_data_fetchers() -> None:
    fetcher = fetcher_of(batches(3))
    broken = "the look-ahead could not stand in for Lightning's fetcher"
    assert isinstance(fetcher, of_lightning.DataFetcher), broken
    iter(fetcher)
    for name in ("combined_loader", "_combined_loader", "iterator", "length", "fetched", "done"):
        assert hasattr(fetcher, name), f"{broken}: {name} is gone"
    for name in ("_start_profiler", "_stop_profiler"):
        assert callable(getattr(fetcher, name)), f"{broken}: {name} is gone"
    batch, batch_idx, dataloader_idx = next(fetcher)
    assert (len(batch), batch_idx, dataloader_idx) == (2, 0, 0), broken
    assert (fetcher.fetched, fetcher.done, fetcher.length) == (1, False, 3), broken
    next(fetcher), next(fetcher)
    assert fetcher.done, broken


@guards("_DataLoaderIterDataFetcher")
def test_the_fetcher_of_dataloader_iter() -> None:
    assert issubclass(of_lightning.DataLoaderIterFetcher, of_lightning.DataFetcher), (
        "training_step(dataloader_iter) would be looked ahead of"
    )


@guards("_state_dicts")
def test_states_of_loaders() -> None:
    class Resumable(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    fetcher = fetcher_of(Resumable(batches(3).dataset))
    assert of_lightning.loader_iterator(fetcher.combined_loader) is None
    iter(fetcher)
    assert of_lightning.loader_iterator(fetcher.combined_loader) is fetcher.combined_loader._iterator is not None
    broken = "a checkpoint would save a resumable DataLoader's state ahead of its step (law L9)"
    assert fetcher.combined_loader._state_dicts() == [{"at": 7}], broken


@guards("_MultiProcessingDataLoaderIter", "_get_data", "_get_iterator", "_iterator")
def test_dataloaders_with_workers() -> None:
    events: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        events.append("wait")
        yield

    loader = DataLoader(batches(1).dataset, 2, num_workers=1)
    fetcher = fetcher_of(loader)
    iter(fetcher)
    redirects = of_lightning.with_workers(fetcher, waiting, lambda: events.append("start"))
    next(fetcher)
    assert events == ["wait"], "user code would stand still while Lightning's thread waits for DataLoader workers"
    next(iter(loader))
    assert events == ["wait", "start", "wait"], "DataLoader workers would be forked while stages work"
    for redirect in redirects:
        redirect.remove()
    list(loader)
    list(fetcher)
    assert events.count("start") == 1


@guards("_on_before_batch_transfer")
def test_hooks_before_the_transfer() -> None:
    class Hooked(Learner):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return (batch, dataloader_idx) if batch == "batch" else batch

    class Moves(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            found.append(of_lightning.move_before_transfer(pl_module, "batch"))

    found: list[Any] = []
    quiet_trainer("auto", callbacks=[Moves()]).fit(Hooked(), batches(1))
    assert found == [("batch", 0)], "on_before_batch_transfer would not run for batches that are fetched ahead"
