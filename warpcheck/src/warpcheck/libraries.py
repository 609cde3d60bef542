"""Libraries that take part in an emulation: they set switches, and name the warps and barriers of their kernels.

A library registers itself when it is imported. A library that must take part earlier names a `Library` under the entry
point group `warpcheck.libraries`, which the first emulation of the process loads.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from warpcheck.machine.chips import ChipFacts

GROUP = "warpcheck.libraries"


class Names(NamedTuple):
    """warps: index within the CTA -> name. barriers: byte in dynamic shared memory -> name of the mbarrier there."""

    warps: Mapping[int, str]
    barriers: Mapping[int, str]


class Library:
    """Contributions of a library to an emulation; by default none."""

    def emulating(self, facts: ChipFacts, sms: int, *, sampled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for every emulation of the chip; entered before torch and CuTe DSL are patched.

        sampled: only some clusters of each grid run (`EmulationOptions.sample`), so no kernel may hand out work by a
        counter in global memory.
        """
        return contextlib.nullcontext()

    def names(self, entry: str) -> Names | None:
        """Return names for the kernel with this PTX entry; None for a kernel of another library."""
        return None

    def own_caches(self) -> Mapping[str, str]:
        """Return environment variables of caches that stay in place while those of other packages move.

        Only for a library that distinguishes kernels of an emulated chip from those of a real chip.
        """
        return {}


_registered: dict[str, Library] = {}
_loaded = False


def register(name: str, library: Library) -> None:
    """Register a library for every later emulation; it replaces a library of the same name."""
    _registered[name] = library


def registered() -> list[Library]:
    """Return all libraries; the first call loads the entry points."""
    global _loaded
    if not _loaded:
        _loaded = True
        for entry_point in metadata.entry_points(group=GROUP):
            if entry_point.name not in _registered:
                try:
                    register(entry_point.name, entry_point.load())
                except Exception as error:  # the emulated program may not use the library
                    warnings.warn(f"{entry_point.value} takes no part in emulations: {error!r}", stacklevel=2)
    return list(_registered.values())


def names_of(entry: str) -> Names | None:
    """Return the names from the first library that has names for the kernel."""
    return next((names for library in registered() if (names := library.names(entry)) is not None), None)


@contextlib.contextmanager
def emulating(facts: ChipFacts, sms: int, *, sampled: bool) -> Iterator[None]:
    """Enter the contexts of all libraries (see `Library.emulating`)."""
    with contextlib.ExitStack() as stack:
        for library in registered():
            stack.enter_context(library.emulating(facts, sms, sampled=sampled))
        yield


def own_caches() -> dict[str, str]:
    """Return the variables of all libraries."""
    return {name: value for library in registered() for name, value in library.own_caches().items()}
