"""How a compute process uses its cores: OpenMP that sleeps when idle, and memory that is kept.

Processes share the machine's cores. OpenMP's threads spin between kernels by default and starve
the others: ten times slower on two cores. glibc gives large temporaries back after each kernel and
faults them in again for the next.
"""

import ctypes
from collections.abc import MutableMapping

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BYTES = 32 << 20  # glibc before 2.35 refuses more
_KEPT_BYTES = 1 << 30


def calm_openmp(environ: MutableMapping[str, str]) -> None:
    """Set what OpenMP reads when it is loaded: call it before torch is imported."""
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("GOMP_SPINCOUNT", "0")


def settle(num_threads: int) -> None:
    """Compute with so many threads from now on, and keep freed memory for the next kernel."""
    from shared.engine import tiles  # it loads torch, after calm_openmp

    tiles.use(num_threads)
    tiles.torch_alone()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc only; elsewhere there is nothing to set
        if not libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
