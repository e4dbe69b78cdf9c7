"""A test accelerator: four devices over host memory, which behave to torch and Lightning as GPUs do.

    def test_something(accelerator: TestAccelerator) -> None:  # a fixture of tests/conftest.py
        set_limit(1, 64 << 20)  # bytes that device 1 may hold
        Trainer(accelerator=accelerator, devices=4, strategy=HetPipeStrategy()).fit(task, loader)
        assert torch.accelerator.max_memory_allocated(1) <= ...  # since the test began

Devices are ``torch.device("testacc", 0)`` to 3. Each operator is the CPU's on the same memory, and so are its bits.
Operands on two devices are refused as on CUDA, and so is what a device has no room for (``torch.OutOfMemoryError``).
Streams and events are logical clocks: an operator whose stream has not waited for what another one does to its operands
is refused each time, and so is memory that is handed out while another stream may use it (source/order.cpp).
The C++ extension is built when a test first asks for the fixture (a minute, once for all processes); where it cannot be
built the test is skipped. After the test the process is as one with a GPU's driver, but without a GPU.

Otherwise than on a CPU, torch's optimizers take their ``foreach`` forms here by default, as on CUDA.
"""

from __future__ import annotations

from tests.support.accelerator.build import missing
from tests.support.accelerator.device_module import NAME, hide, set_limit, show
from tests.support.accelerator.lightning_accelerator import TestAccelerator

__all__ = ["NAME", "TestAccelerator", "hide", "missing", "set_limit", "show"]
