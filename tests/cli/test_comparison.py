"""The table at the end of a sweep."""

from __future__ import annotations

from lightning_hetpipe.cli.comparison import SweepJob, table


def test_a_row_for_each_job_and_a_column_for_each_setting_that_differs() -> None:
    jobs = [
        SweepJob(0, {"seed": "1", "model.width": "8"}, {"samples per second": "3,120", "test loss": "0.5"}, "done"),
        SweepJob(
            1, {"seed": "1", "model.width": "16"}, {"samples per second": "980", "test accuracy": "99.00%"}, "done"
        ),
        SweepJob(2, {"seed": "1", "model.width": "32"}),
    ]
    assert table(jobs).splitlines() == [
        "job  model.width  samples per second  test loss  test accuracy  status",
        "0              8               3,120        0.5              –  done",
        "1             16                 980          –         99.00%  done",
        "2             32                   –          –              –  failed",
    ]
