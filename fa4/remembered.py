"""What came of earlier calls, by a key of all that it follows from."""

from __future__ import annotations

import contextlib
from typing import Any, Generic, TypeVar

from .device import stage

T = TypeVar("T")
MOST = 4096


class Remembered(Generic[T]):
    """At most `MOST` values, each for the stage of the devices in which it was found out; full, it forgets them all."""

    def __init__(self) -> None:
        self._values: dict[tuple, tuple[Any, T]] = {}

    def find(self, key: tuple) -> T | None:
        """None where nothing holds here, and where a part of the key has no hash."""
        try:
            there, value = self._values[key]
        except (KeyError, TypeError):
            return None
        return value if there is stage.get() else None

    def keep(self, key: tuple, value: T) -> None:
        if len(self._values) >= MOST:
            self.clear()
        with contextlib.suppress(TypeError):
            self._values[key] = stage.get(), value

    def clear(self) -> None:
        self._values.clear()
