"""The arrays as they are committed, one file each, and how covertable makes them anew."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.covering.model import (
    BACKENDS,
    CACHES,
    CALLS,
    EIGHT_BITS,
    FOUR_BITS,
    SPARSE,
    TRAINING_IN_EIGHT_BITS,
    WIDE,
    WIDEST,
    Exclusion,
    Model,
    Row,
)

_FOLDER = Path(__file__).parent / "arrays"


@dataclass(frozen=True)
class Array:
    """A covering array: rows of the model in which all levels of `strength` factors meet, and of one factor more in
    `denser`.

    native: groups of backends. Rows that each backend of a group takes on its own chip come first, group by group, and
    hold all levels that meet in such rows.
    presets: levels that meet in a row whatever the strength.
    backends: those whose chips alone run the array; the model is of rows that the first takes there. Every GPU runs
        those of the portable kernels.
    beside: names of arrays that the same chips run; levels that meet in their rows need no row here.
    """

    name: str
    model: Model
    strength: int
    native: tuple[tuple[str, ...], ...] = ()
    denser: tuple[str, ...] = ()
    presets: tuple[dict[str, str], ...] = ()
    backends: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        return _FOLDER / f"{self.name}.tsv"

    def rows(self) -> list[Row]:
        """As committed."""
        header, *lines = self.file.read_text().splitlines()
        return [dict(zip(header.split("\t"), line.split("\t"))) for line in lines]

    def rows_beside(self) -> list[Row]:
        """Rows of the arrays beside that are rows of the model."""
        return [row for name in self.beside for row in ARRAYS[name].rows() if self.model.has(row)]

    def digest(self) -> str:
        """By which results name the array that they are of."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()[:16]

    def made(self) -> list[Row]:
        """By covertable, the same each time."""
        first = [*self.rows_beside(), *self.presets]
        for backends in self.native:
            first = _made(replace(self, model=self.model.native(*backends)), first)
        return _made(self, first)[len(self.rows_beside()) :]

    def write(self) -> None:
        lines = ["\t".join(self.model.factors)]
        lines += ["\t".join(row.values()) for row in self.made()]
        self.file.write_text("\n".join(lines) + "\n")

    def missing(self, rows: list[Row]) -> list[dict[str, str]]:
        """Allowed combinations of levels that no row has."""
        groups = list(itertools.combinations(self.model.factors, self.strength))
        groups += itertools.combinations(self.denser, self.strength + 1)
        missing = []
        for names in groups:
            met = {tuple(row[name] for name in names) for row in rows}
            unmet = itertools.product(*(self.model.factors[name] for name in names))
            chosen = (dict(zip(names, levels)) for levels in unmet if levels not in met)
            missing += [one for one in chosen if self.model.has_some(one)]
        return missing


def _made(array: Array, first: list[dict[str, str]]) -> list[dict[str, str]]:
    """`first`, whose gaps are filled, and the rows that are missing beside these."""
    from covertable import make

    factors = {name: list(levels) for name, levels in array.model.factors.items()}
    conditions = [_condition(exclusion) for exclusion in array.model.exclusions]
    denser = [{"fields": list(array.denser), "strength": array.strength + 1}] if array.denser else []
    presets = [dict(row) for row in first]
    rows = make(factors, strength=array.strength, constraints=conditions, presets=presets, sub_models=denser)
    return [{name: row[name] for name in factors} for row in rows]


def _condition(exclusion: Exclusion) -> dict[str, Any]:
    levels = exclusion.levels.items()
    conditions = [{"operator": "in", "left": factor, "values": list(of)} for factor, of in levels]
    return {"operator": "not", "condition": {"operator": "and", "conditions": conditions}}


_CHIPS = dict(dtype=("float32",))
_TRAINING = CALLS.without(direction=("inference", "partly"), **_CHIPS)
_INFERENCE = CALLS.without(
    direction=("training", "partly"), captured=("trained",), deterministic=("yes",), dlse=("yes",), **_CHIPS
)
_CACHES = CACHES.without(**_CHIPS, bits=("nvfp4",))
_OF_WIDEST = dict(head_dim=WIDEST, head_dim_v=("same", "smaller"))
_LATENT = dict(
    head_dim=("512", "576"),
    head_dim_v=("latent",),
    **dict.fromkeys(("score_mod", "mask_mod", "rotary"), ("none",)),
    bits=("16",),
    descale=("tensor",),
)
_8BIT_LATENT = _LATENT | dict(bits=("fp8", "int8", "rows"), descale=CACHES.factors["descale"])
_LISTED_LATENT = dict(
    head_dim=_LATENT["head_dim"],
    head_dim_v=_LATENT["head_dim_v"],
    group=("8", "mqa", "128"),
    direction=("inference",),
    layout=("contiguous", "unaligned"),
)
_LATENT_ROWS = _8BIT_LATENT | dict(
    bits=("rows",), **{name: CACHES.factors[name] for name in ("score_mod", "mask_mod")}, head_dim=("576",)
)
_NOT_WIDE = dict(
    head_dim=tuple(x for x in CALLS.factors["head_dim"] if x not in WIDE),
    **{name: CALLS.factors[name][1:] for name in ("score_mod", "captured", "mask_mod", "block_mask")},
)
# Without functions that differ little, for the path in plain torch, from others or from parts of others.
_CALLS_IN_TORCH = CALLS.without(
    head_dim=("96", "128", "192", "256"), score_mod=("bias",), mask_mod=("prefix", "columns", "dilated")
)
_CACHES_IN_TORCH = CACHES.without(
    bits=("nvfp4",),
    head_dim=("96", "128", "192"),
    pages=("64", "256"),
    score_mod=("bias",),
    mask_mod=("columns", "dilated", "either"),
)
# Regressions: dq and dk were NaN; the kernel did not compile for sm_90.
_SOFTCAP_AND_MASK = dict(
    form="dense", head_dim="64", head_dim_v="same", softcap="yes", score_mod="none", mask_mod="documents", dropout="yes"
)
_BY_HEADS = dict(recipe=("none", "tensor", "head"), scale=("default", "given"))
_MULTIPLIED = _BY_HEADS | dict(
    form=("dense",),
    head_dim=("16", "64", "96", "128", "192", "256"),
    lengths=("large", "larger", "square"),
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), ("none",)),
    dropout=("no",),
)
_MULTIPLIED_BACKWARD = dict(
    precision=("fp8",),
    form=("dense",),
    head_dim=("64", "96", "128"),
    seqused=("none",),
    scale=("default", "given"),
    **dict.fromkeys(("score_mod", "mask_mod"), ("none",)),
    dropout=("no",),
)
_SCALED_BACKWARD = _MULTIPLIED_BACKWARD | dict(
    precision=("mxfp8",), head_dim=("64",), head_dim_v=("same", "smaller"), lengths=("large", "larger", "square")
)
_SCALED = dict(
    recipe=("mxfp8", "mixed"),
    scale=("default", "given"),
    head_dim=("64", "96", "128", "192"),
    head_dim_v=("same", "smaller"),
    lengths=("large", "larger", "square"),
    block_mask=("none",),
)
_MULTIPLIED_4BIT = dict(
    head_dim=("32", "64", "96", "128"), scale=("default", "given"), lengths=FOUR_BITS.factors["lengths"][:-1],
    dropout=("no",),
)  # fmt: skip
_BY_16 = "16", "64", "96", "128", "256"
_FETCHED_BYTES = dict(head_dim="256", head_dim_v="same", pages="128", bits="fp8", leftpad="yes", queries="1")

ARRAYS = {
    array.name: array
    for array in (
        Array("training", _TRAINING, 2, native=(BACKENDS, ("sm80", "sm100")), presets=(_SOFTCAP_AND_MASK,)),
        # Hopper's own backward of wide heads takes calls without functions alone.
        Array("training-wide", _TRAINING.without(**_NOT_WIDE).native("sm90"), 2, backends=("sm90",)),
        Array("inference", _INFERENCE, 2, native=(BACKENDS,)),
        # How rows of a cache come to the matrix unit follows from these together.
        Array("caches", _CACHES, 2, denser=("head_dim", "bits", "pages", "leftpad"), presets=(_FETCHED_BYTES,)),
        Array("caches-sm100", _CACHES.native("sm100"), 2, backends=("sm100",), beside=("caches",)),
        # Numbers of 4 bits come to the matrix unit by kernels of their own.
        Array(
            "caches-nvfp4",
            CACHES.without(**_CHIPS).with_levels(bits=("nvfp4",), descale=("tensor",)),
            2,
            backends=("sm80", "sm90", "sm100"),
        ),
        # Heads that few kernels take.
        Array("training-widest", _TRAINING.with_levels(**_OF_WIDEST), 2, backends=("sm80", "sm90", "sm100")),
        Array("inference-widest", _INFERENCE.with_levels(**_OF_WIDEST), 2, backends=("sm80", "sm90", "sm100")),
        Array("caches-widest", _CACHES.with_levels(**_OF_WIDEST), 2, backends=("sm80", "sm90", "sm100")),
        # Hopper's latent forward loads a cache's rows once, as K and as V.
        Array("caches-latent", _CACHES.with_levels(**_LATENT), 2, backends=("sm90", "sm100")),
        Array("caches-latent-8bit", _CACHES.with_levels(**_8BIT_LATENT), 2, backends=("sm90", "sm100")),
        # Rows of 656 bytes with functions, which the portable kernels take.
        Array("caches-rows", _CACHES.with_levels(**_LATENT_ROWS), 2, backends=("sm80",)),
        # Calls on e4m3 tensors, and those that a kernel of a chip multiplies as such.
        Array("eight-bits", EIGHT_BITS, 2, backends=("sm90", "sm100", "sm120")),
        Array("eight-bits-multiplied", EIGHT_BITS.with_levels(**_MULTIPLIED), 2, backends=("sm90",)),
        Array("training-in-eight-bits", TRAINING_IN_EIGHT_BITS, 2, backends=("sm90", "sm100", "sm120")),
        Array(
            "training-in-eight-bits-sm100",
            TRAINING_IN_EIGHT_BITS.with_levels(**_MULTIPLIED_BACKWARD),
            2,
            backends=("sm100",),
        ),
        Array(
            "training-in-eight-bits-scaled",
            TRAINING_IN_EIGHT_BITS.with_levels(**_SCALED_BACKWARD),
            2,
            backends=("sm100",),
        ),
        Array("eight-bits-sm100", EIGHT_BITS.with_levels(**_BY_HEADS, head_dim=_BY_16), 2, backends=("sm100",)),
        Array("eight-bits-scaled", EIGHT_BITS.with_levels(**_SCALED), 2, backends=("sm100", "sm120")),
        # Calls on e2m1 tensors that the kernel of sm_120 multiplies as such, and of all kinds.
        Array("four-bits", FOUR_BITS.with_levels(**_MULTIPLIED_4BIT), 2, backends=("sm120",)),
        Array("four-bits-dequantised", FOUR_BITS, 2),
        # Each query attends to the keys that it lists.
        Array("sparse", SPARSE.without(**_CHIPS), 2),
        Array("sparse-latent", SPARSE.without(**_CHIPS).with_levels(**_LISTED_LATENT), 2, backends=("sm90", "sm100")),
        # On Hopper, gradients of latents are those of other wide heads.
        Array(
            "sparse-latent-training",
            SPARSE.without(**_CHIPS).with_levels(**_LISTED_LATENT | dict(direction=("training",))),
            2,
            backends=("sm100",),
        ),
        Array("sparse-triples", SPARSE.without(head_dim=("128", "192", "256")), 3),
        Array("calls-triples", _CALLS_IN_TORCH, 3),
        Array("caches-triples", _CACHES_IN_TORCH, 3),
    )
}
PAIRS, TRIPLES = ("training", "inference", "caches", "sparse"), ("calls-triples", "caches-triples", "sparse-triples")
IN_TORCH = *TRIPLES, "four-bits", "four-bits-dequantised"

if __name__ == "__main__":
    import sys

    for name in sys.argv[1:] or ARRAYS:
        ARRAYS[name].write()
        print(name, len(ARRAYS[name].rows()))
