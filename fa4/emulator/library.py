"""What emulations must know of fa4: which chip its calls are for, its kernels' roles and barriers, and its cache."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from warpcheck.libraries import Library, Names
from warpcheck.machine.chips import ChipFacts

from ..runtime.device import chip_by_number, emulating


class Fa4(Library):
    @contextlib.contextmanager
    def emulating(self, facts: ChipFacts, sms: int, *, sampled: bool) -> Iterator[None]:
        """CPU tensors dispatch to the chip's backends."""
        chip = chip_by_number(facts.number, sms=sms, emulated=True)
        with emulating(dataclasses.replace(chip, sampled=sampled)):
            yield

    def names(self, entry: str) -> Names | None:
        from ..pipeline.kernel import describe  # which imports CuTe DSL

        description = describe(entry)
        return None if description is None else Names(description.roles, description.barriers)

    def own_caches(self) -> Mapping[str, str]:
        """The key of a compiled kernel holds whether the chip is emulated."""
        from ..runtime.env import CACHE_DIR
        from ..runtime.jit import cache_root

        return {CACHE_DIR.name: str(cache_root())}


FA4 = Fa4()
