"""Arguments of latent attention (MLA): pairs of tensors that are joined along their columns."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks


def check_pair(names: tuple[str, str], x: Tensor, rope: Tensor, first: Tensor, axes: str) -> None:
    """Raise unless x and rope are plain tensors, equal but for their last axis, with the device and dtype of `first`
    (q_nope). axes: the expected axes but the last, as text."""
    name, of_rope = names
    for label, tensor in zip(names, (x, rope)):
        checks.check_plain(label, tensor, first, like="q_nope")
        checks.check_dtype(label, tensor)
        if tensor.dtype != first.dtype:
            raise TypeError(f"{label} has dtype {tensor.dtype}, expected {first.dtype} like q_nope")
        if tensor.ndim != axes.count(",") + 2:
            columns = "latent_dim" if label == name else "rope_dim"
            raise ValueError(f"{label} has shape {checks.shown(tensor)}, expected ({axes}, {columns})")
    if x.shape[:-1] != rope.shape[:-1]:
        expected = checks.shown(x, -1, "rope_dim")
        raise ValueError(f"{of_rope} has shape {checks.shown(rope)}, expected {expected} like {name}")


def check_widths(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> None:
    """Raise unless queries and keys have the same columns."""
    for name, x, other, like in (("latent", latent, q_nope, "q_nope"), ("k_rope", k_rope, q_rope, "q_rope")):
        if x.shape[-1] != other.shape[-1]:
            raise ValueError(f"{name} has {x.shape[-1]} columns, expected {other.shape[-1]} like {like}")


def check_scale(softmax_scale: float | None) -> None:
    """Raise if there is no scale: the width of absorbed queries says nothing about it."""
    if softmax_scale is None:
        raise ValueError("softmax_scale is None, expected a number: 1 / sqrt of the head_dim before absorption")


def join(nope: Tensor, rope: Tensor) -> Tensor:
    """Join the columns."""
    return torch.cat((nope, rope), -1)
