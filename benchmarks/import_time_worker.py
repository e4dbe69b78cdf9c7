"""One process of the benchmark of imports: imports Lightning, then the package, and announces how long each took."""

import sys
import time
from importlib import import_module

from benchmarks.harness import Measurement, announce


def main() -> None:
    """Imports both; what the first has imported is not counted again."""
    clocks = [(time.perf_counter(), time.process_time())]
    import_module("lightning")

    clocks.append((time.perf_counter(), time.process_time()))
    before = len(sys.modules)
    import_module("lightning_hetpipe")

    clocks.append((time.perf_counter(), time.process_time()))
    (start, start_cpu), (middle, middle_cpu), (end, end_cpu) = clocks
    announce(
        Measurement(
            "import",
            rate=1 / (end - start),
            cores=(end_cpu - start_cpu) / (end - start),
            threads=1,
            loss=None,
            notes={
                "lightning_s": middle - start,
                "package_s": end - middle,
                "package_cpu_s": end_cpu - middle_cpu,
                "modules": len(sys.modules) - before,
            },
        )
    )


if __name__ == "__main__":
    main()
