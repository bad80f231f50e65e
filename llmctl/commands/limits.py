"""Limits of the process under which nothing can work, told before something fails in a worse way."""

from __future__ import annotations

from llmctl.errors import OutOfMemoryError

LEAST_ADDRESS_SPACE = 200 << 20
"""With less numpy's import never ends: its BLAS library asks for memory again and again."""


def require_address_space() -> None:
    """OutOfMemoryError where `ulimit -v` leaves no room for numpy."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise OutOfMemoryError(
            f"this process may use {limit >> 20} MB of address space (ulimit -v), at least {LEAST_ADDRESS_SPACE >> 20} are needed"
        )
