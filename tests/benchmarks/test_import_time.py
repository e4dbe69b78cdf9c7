"""The benchmark of imports: what it counts, and what the report makes of it."""

import pytest

from benchmarks.harness import Measurement
from benchmarks.import_time import NAME, measure, report

MACHINE = {"cpu": "a cpu", "load_average": 0.0, "torch": "2", "lightning": "2"}


def imported(package: float) -> Measurement:
    notes = {"lightning_s": 3.0, "package_s": package, "package_cpu_s": package / 2, "modules": 100}
    return Measurement("import", rate=1.0, cores=1.0, threads=1, loss=None, notes=notes)


@pytest.mark.slow
def test_both_imports_are_timed_in_a_process_of_its_own() -> None:
    (found,) = measure(1)
    notes = {name: float(str(value)) for name, value in found.notes.items()}
    assert min(notes.values()) > 0
    assert 1 / found.rate == pytest.approx(notes["lightning_s"] + notes["package_s"])


def test_the_report_has_medians_over_all_processes() -> None:
    outcome = report(MACHINE, [{NAME: [imported(0.1), imported(0.2)]}, {NAME: [imported(0.14)]}], {})
    package, cpu, lightning = outcome.figures
    assert outcome.complete
    assert package.cells() == ("140", "100 .. 200", "150", "met")
    assert cpu.cells() == ("70", "50 .. 100", "", "")
    assert lightning.cells() == ("3000", "3000 .. 3000", "", "")
    assert not report(MACHINE, [{}], {NAME: "it broke"}).complete
