"""Libraries that take part in an emulation: they set switches of their own, and name their kernels' warps and barriers.

A library registers itself when it is imported. One that must take part before that names a `Library` under the entry
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
    """What a library adds to emulations; this one adds nothing."""

    def emulating(self, facts: ChipFacts, sms: int) -> contextlib.AbstractContextManager[None]:
        """Entered with every emulation of that chip, before anything of torch or CuTe DSL is replaced."""
        return contextlib.nullcontext()

    def names(self, entry: str) -> Names | None:
        """Names for the kernel with this PTX entry; None for a kernel of others."""
        return None

    def own_caches(self) -> Mapping[str, str]:
        """Environment variables that keep its files where they are outside, while those of others are moved.

        Only for a library that tells an emulated chip's kernels from a real one's.
        """
        return {}


_registered: dict[str, Library] = {}
_loaded = False


def register(name: str, library: Library) -> None:
    """Let a library take part in every emulation that begins from now on; the name replaces an earlier one."""
    _registered[name] = library


def registered() -> list[Library]:
    """All of them; the first call loads the entry points."""
    global _loaded
    if not _loaded:
        _loaded = True
        for entry_point in metadata.entry_points(group=GROUP):
            if entry_point.name not in _registered:
                try:
                    register(entry_point.name, entry_point.load())
                except Exception as error:  # of a library that the emulated program may not even use
                    warnings.warn(f"{entry_point.value} takes no part in emulations: {error!r}", stacklevel=2)
    return list(_registered.values())


def names_of(entry: str) -> Names | None:
    """What the first library that knows the kernel calls its warps and barriers."""
    return next((names for library in registered() if (names := library.names(entry)) is not None), None)


@contextlib.contextmanager
def emulating(facts: ChipFacts, sms: int) -> Iterator[None]:
    """Every library's context."""
    with contextlib.ExitStack() as stack:
        for library in registered():
            stack.enter_context(library.emulating(facts, sms))
        yield


def own_caches() -> dict[str, str]:
    """The variables of all libraries."""
    return {name: value for library in registered() for name, value in library.own_caches().items()}
