"""Context of the roles of a backward kernel, for device code that several chips share."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.kernel import Context
from .launch import BackwardKernelArguments
from .variant import BackwardVariant


@dataclass(frozen=True, slots=True)
class BackwardContext(Context):
    """A chip's kernel narrows `cfg` to its own configuration."""

    args: BackwardKernelArguments
    cfg: BackwardVariant

    @property
    def first_reduce_warp(self) -> int:
        return self.channels.roles["reduce"].warps[0]
