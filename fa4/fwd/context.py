"""Context of the roles of a forward kernel, for device code that several chips share."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.kernel import Context
from .launch import ForwardKernelArguments
from .variant import ForwardVariant


@dataclass(frozen=True, slots=True)
class ForwardContext(Context):
    """A chip's kernel narrows `cfg` to its own configuration."""

    args: ForwardKernelArguments
    cfg: ForwardVariant
