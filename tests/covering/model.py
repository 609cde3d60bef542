"""Options of calls as factors with levels, and the combinations that no call has.

A covering array of strength 2 is a list of rows (a level for each factor) in which every allowed pair of levels of two
factors occurs; of strength 3, every triple. `calls` and `caches` turn a row and a seed into a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, str]


@dataclass(frozen=True)
class Exclusion:
    """No row has all of `levels`. refusal: words of the error that such a call raises; None: it makes no sense, or the
    array would say the same twice. by_seed: the seed decides whether the reason holds for a call of such a row."""

    levels: dict[str, tuple[str, ...]]
    reason: str
    refusal: str | None = None
    by_seed: bool = False

    def holds(self, row: Row) -> bool:
        return all(row[factor] in levels for factor, levels in self.levels.items())


@dataclass(frozen=True)
class Model:
    """The factors of one surface. foreign: by backend, the rows that its kernels leave to another backend."""

    name: str
    factors: dict[str, tuple[str, ...]]
    exclusions: tuple[Exclusion, ...]
    foreign: Mapping[str, tuple[Exclusion, ...]] = field(default_factory=dict)

    def allows(self, row: Row) -> bool:
        return not any(exclusion.holds(row) for exclusion in self.exclusions)

    def has(self, row: Row) -> bool:
        """Whether a row's levels are the model's, and it allows them."""
        return all(row[factor] in levels for factor, levels in self.factors.items()) and self.allows(row)

    def has_some(self, chosen: Row) -> bool:
        """Whether it allows some row with these levels, by trying levels of the factors that decide soonest."""
        open_factors = [
            [factor for factor in exclusion.levels if factor not in chosen]
            for exclusion in self.exclusions
            if all(chosen[factor] in levels for factor, levels in exclusion.levels.items() if factor in chosen)
        ]
        if not open_factors:
            return True
        fewest = min(open_factors, key=len)
        return (
            any(self.has_some({**chosen, fewest[0]: level}) for level in self.factors[fewest[0]]) if fewest else False
        )

    def without(self, **levels: tuple[str, ...]) -> Model:
        """The model without some levels of some factors."""
        left = {
            name: tuple(x for x in all_of if x not in levels.get(name, ())) for name, all_of in self.factors.items()
        }
        return replace(self, factors=left)

    def with_levels(self, **levels: tuple[str, ...]) -> Model:
        """The model with other levels of some factors."""
        return replace(self, factors=self.factors | levels)

    def native(self, *backends: str) -> Model:
        """The model of the rows that each of these backends takes on its own chip, whatever the seed."""
        exclusions = list(self.exclusions)
        for backend in backends:
            exclusions += [exclusion for exclusion in self.foreign[backend] if exclusion not in exclusions]
        return replace(self, exclusions=tuple(exclusions))


def _no(reason: str, refusal: str | None = None, **levels: str | tuple[str, ...]) -> Exclusion:
    return Exclusion({k: (v,) if isinstance(v, str) else v for k, v in levels.items()}, reason, refusal)


def _no_each(
    reason: str, *choices: tuple[dict[str, Any], ...], by_seed: bool = False, **levels: str | tuple[str, ...]
) -> tuple[Exclusion, ...]:
    """One for each combination of the choices' levels."""
    merged = ({k: v for chosen in one for k, v in chosen.items()} for one in itertools.product(*choices))
    return tuple(replace(_no(reason, **levels, **one), by_seed=by_seed) for one in merged)


def _where_trained(reason: str, **levels: str | tuple[str, ...]) -> tuple[Exclusion, ...]:
    """Where captured tensors get gradients: with "partly", the seed decides."""
    exclusions = (_no(reason, captured="trained", direction=direction, **levels) for direction in _BACKWARDS)
    return tuple(replace(one, by_seed="partly" in one.levels["direction"]) for one in exclusions)


WIDE = "192", "256", "wide"
WIDEST = "320", "512", "576"
TRAINABLE = "alibi", "relative_bias", "bias", "bias_of_pairs", "nonlinear", "of_rows", "of_sequences", "number"
_SCORES = (*TRAINABLE, "position_free")
_MASKS = "prefix", "documents", "heads", "empty_rows", "columns", "dilated", "both", "either"
_BLOCKS = "128", "64", "128x64", "heads"
_BACKWARDS = "training", "partly"
_CALLS_OF_ALL = (
    _no("kernels take 16-bit numbers", dtype="float32"),
    *_where_trained(
        "deterministic sums of captured gradients", deterministic="yes", score_mod=("relative_bias", "bias", "of_rows")
    ),
    *_where_trained(
        "deterministic sums of captured gradients, of shifted sequences",
        deterministic="yes",
        score_mod="bias_of_pairs",
        form="jagged",
        seqused=("keys", "queries", "both"),
    ),
    *_where_trained("gradients that sequences choose", score_mod="of_sequences", form=("packed", "jagged")),
)
# Not certain, so that no row is built to see it: tests/sm120 holds that 16-bit calls get the portable kernels.
_PORTABLE = Exclusion({}, "the portable kernels multiply 16-bit numbers, and read caches", by_seed=True)
# Which of the two kernels a row gets follows from its dims, scales and masks together.
_OF_E4M3 = Exclusion({}, "calls that no kernel of e4m3 takes get a portable one", by_seed=True)
_NO_576 = _no("columns of O for two CTAs are at most 512", head_dim="576", head_dim_v="same")
_CACHES_OF_ALL = (_no("kernels take 16-bit numbers", dtype="float32"),)

CALLS = Model(
    "calls",
    dict(
        form=("dense", "packed", "jagged", "flex", "compat"),
        dtype=("bfloat16", "float16", "float32"),
        head_dim=("small", "64", "96", "128", "odd", *WIDE),
        head_dim_v=("same", "smaller", "larger"),
        group=("1", "2", "8", "mqa"),
        lengths=("ragged", "one_query", "one_key", "tiles", "more_queries", "several_tiles", "few_queries", "zero"),
        seqused=("none", "keys", "queries", "both"),
        mask=("full", "causal", "left", "both_sides", "causal_left", "empty_rows"),
        scale=("default", "given", "negative"),
        softcap=("no", "yes"),
        score_mod=("none", *_SCORES),
        captured=("fixed", "trained"),
        mask_mod=("none", *_MASKS),
        block_mask=("none", *_BLOCKS),
        dropout=("no", "yes"),
        sink=("no", "yes"),
        direction=("training", "inference", "partly"),
        deterministic=("no", "yes"),
        dlse=("no", "yes"),
        layout=("contiguous", "heads_first", "padded", "expanded", "unaligned"),
    ),
    (
        _no(
            "a softcap is a score_mod",
            "softcap and score_mod are both given",
            form=("dense", "packed", "jagged"),
            softcap="yes",
            score_mod=_SCORES,
        ),
        _no(
            "a block mask says itself who sees whom",
            "block_mask is given with causal or window_size",
            block_mask=_BLOCKS,
            mask=("causal", "left", "both_sides", "causal_left", "empty_rows"),
        ),
        _no(
            "a block mask has a block",
            "expected at least 1",
            block_mask=_BLOCKS,
            form=("dense", "flex"),
            lengths="zero",
        ),
        _no("a block mask is made of a mask_mod", block_mask=_BLOCKS, mask_mod="none"),
        _no("dense queries are all in use: there is no such argument", form="dense", seqused=("queries", "both")),
        _no("no such argument", form=("flex", "compat"), seqused=("keys", "queries", "both")),
        _no("no such argument", form="flex", mask=("causal", "left", "both_sides", "causal_left", "empty_rows")),
        _no("no such argument", form="flex", softcap="yes"),
        _no("no such argument", form="flex", dropout="yes"),
        _no("no such argument", form=("flex", "compat"), sink="yes"),
        _no("a mask comes as a block mask", form="flex", block_mask="none", mask_mod=_MASKS),
        _no("no such argument", form="compat", mask_mod=_MASKS),
        _no("alibi_slopes only", form="compat", score_mod=tuple(x for x in _SCORES if x != "alibi")),
        _no("slopes get no gradients there", form="compat", captured="trained"),
        _no("nothing is captured", score_mod=("none", "position_free"), captured="trained"),
        _no("nothing is trained", direction="inference", captured="trained"),
        _no("nothing is trained", direction="inference", dlse="yes"),
        _no("nothing is trained", direction="inference", deterministic="yes"),
        _no("rows without keys come of lengths here", mask="empty_rows", lengths=("ragged", "tiles", "several_tiles")),
        _no("rows without keys come of lengths here", mask="empty_rows", lengths=("one_query", "few_queries")),
        _no("there is one row", seqused=("keys", "both"), lengths="one_key"),
    ),
    {
        "sm80": _CALLS_OF_ALL,
        "sm90": (
            *_CALLS_OF_ALL,
            _no("no dropout of so wide heads", head_dim=WIDEST, dropout="yes"),
            _no("no dropout of so wide heads", head_dim="256", head_dim_v="larger", dropout="yes"),
            _NO_576,
        ),
        "sm100": _CALLS_OF_ALL,
        "sm120": (_PORTABLE,),
    },
)


def _without_rows(single: tuple[str, ...] = ("1", "5"), **levels: str | tuple[str, ...]) -> tuple[Exclusion, ...]:
    """No pages whose rows TMA cannot load. single: sizes of which it loads no box."""
    reason = "no single rows of pages of so wide heads"
    return (
        _no(reason, **levels, pages=single),
        _no(reason, **levels, leftpad="yes", pages=(*single, "16", "64", "128", "256")),
    )


_OWN_V = dict(head_dim_v=("same", "smaller"))  # latents come by the kernel of their own
_CACHE_SCORES = "alibi", "relative_bias", "bias", "bias_of_pairs", "nonlinear", "position_free"
CACHES = Model(
    "caches",
    dict(
        dtype=("bfloat16", "float16", "float32"),
        head_dim=("small", "64", "96", "128", "odd", "192", "256"),
        head_dim_v=("same", "smaller"),
        group=("1", "2", "8", "mqa"),
        pages=("none", "1", "5", "16", "64", "128", "256"),
        bits=("16", "fp8", "int8", "nvfp4"),
        descale=("tensor", "heads", "both"),
        leftpad=("no", "yes"),
        batch_idx=("no", "yes"),
        rotary=("none", "interleaved", "halves", "seqlens"),
        append=("none", "rows", "packed"),
        queries=("1", "2", "4", "17", "130", "packed"),
        lengths=("ragged", "zero", "tiles", "full", "long"),
        mask=("full", "causal", "left", "both_sides"),
        scale=("default", "given", "negative"),
        softcap=("no", "yes"),
        sink=("no", "yes"),
        score_mod=("none", *_CACHE_SCORES),
        mask_mod=("none", "documents", "heads", "empty_rows", "columns", "dilated", "both", "either"),
        splits=("0", "1", "3", "invariant"),
        layout=("contiguous", "padded"),
    ),
    (
        _no("a softcap is a score_mod", "softcap and score_mod are both given", softcap="yes",
            score_mod=_CACHE_SCORES),
        _no("numbers of 16 bits have no factor", bits="16", descale=("heads", "both")),
        _no("pages say where a sequence is", "cache_batch_idx", batch_idx="yes",
            pages=("1", "5", "16", "64", "128", "256")),
        _no("rotation is of new rows", rotary=("interleaved", "halves", "seqlens"), append="none"),
        _no("there are no rows to append to an empty place", lengths="full", append=("rows", "packed")),
        _no("8-bit numbers of multiples of 16", bits=("fp8", "int8"), head_dim="odd"),
        _no("16 columns have a scale", bits="nvfp4", descale=("heads", "both")),
        _no("rows of kernels are multiples of 16 bytes", bits="nvfp4", head_dim="odd"),
        _no("rows of kernels are multiples of 16 bytes", bits="nvfp4", head_dim="small", head_dim_v="smaller"),
        # Rows of 656 bytes (bits="rows") are of one kind.
        _no("a latent of 512 columns and 64 rotated ones", bits="rows",
            head_dim=("small", "64", "96", "128", "odd", "192", "256", "320", "512")),
        _no("the rotated columns are bfloat16", bits="rows", dtype=("float16", "float32")),
        _no("the factors are in the rows", bits="rows", descale=("heads", "both")),
        _no("there is one head", bits="rows", group=("1", "2")),
        _no("new rows come rotated", bits="rows", rotary=("interleaved", "halves", "seqlens")),
        _no("new rows would be written twice", "are the same memory", head_dim="512", head_dim_v="latent",
            append=("rows", "packed")),
    ),
    {
        "sm80": _CACHES_OF_ALL,
        "sm90": (
            *_CACHES_OF_ALL,
            *_without_rows(head_dim=WIDEST, **_OWN_V),
            _no("no 8-bit numbers of so wide heads", head_dim=WIDEST, **_OWN_V, bits=("fp8", "int8")),
            _NO_576,
        ),
        "sm100": (
            *_CACHES_OF_ALL,
            *_without_rows(head_dim="256", bits=("16", "fp8", "int8")),
            # (of one head, rows of one page are a list of keys)
            *_without_rows(head_dim=WIDEST, bits="16", group=("1", "2")),
            *_without_rows(("5",), head_dim=WIDEST, bits="16", group=("8", "mqa")),
        ),
        "sm120": (_PORTABLE,),
    },
)  # fmt: skip
_E4M3_BY_BLOCKS = "block128", "mxfp8"
EIGHT_BITS = Model(
    "eight bits",
    dict(
        recipe=("none", "tensor", "head", *_E4M3_BY_BLOCKS),
        form=("dense", "packed"),
        head_dim=("16", "64", "96", "128", "odd", "256"),
        head_dim_v=("same", "smaller", "larger"),
        group=CALLS.factors["group"],
        lengths=("large", "larger", "square", "ragged", "few_queries", "zero"),
        seqused=("none", "keys"),
        mask=("full", "causal", "left", "both_sides", "causal_left"),
        scale=CALLS.factors["scale"],
        softcap=("no", "yes"),
        sink=("no", "yes"),
        score_mod=("none", "alibi", "bias"),
        mask_mod=("none", "documents"),
        block_mask=("none", "128", "64"),
        dropout=("no", "yes"),
        layout=("contiguous", "heads_first", "padded", "expanded", "unaligned"),
    ),
    (
        _no("a softcap is a score_mod", softcap="yes", score_mod=("alibi", "bias")),
        _no("blocks of 32 columns", recipe="mxfp8", head_dim=("16", "odd")),
        _no(
            "a block mask says itself who sees whom",
            block_mask=("128", "64"),
            mask=("causal", "left", "both_sides", "causal_left"),
        ),
        _no("a block mask has a block", block_mask=("128", "64"), form="dense", lengths="zero"),
        _no("only with 128 columns of v are there kernels", head_dim="192", head_dim_v="same"),
        _no("a block mask is made of a mask_mod", block_mask=("128", "64"), mask_mod="none"),
    ),
    {
        "sm80": (),
        "sm90": (_no("no dropout of so wide heads", head_dim="256", head_dim_v="larger", dropout="yes"),),
        "sm100": (),
        "sm120": (_OF_E4M3,),
    },
)
TRAINING_IN_EIGHT_BITS = Model(
    "training in eight bits",
    dict(
        precision=("fp8", "fp8-forward", "mxfp8", "mxfp8-forward"),
        form=("dense", "packed"),
        dtype=("bfloat16", "float16"),
        head_dim=("64", "96", "128", "odd", "256"),
        **{name: CALLS.factors[name] for name in ("head_dim_v", "group")},
        lengths=("ragged", "several_tiles", "more_queries", "one_query", "one_key", "few_queries", "zero"),
        **{name: CALLS.factors[name] for name in ("seqused", "mask", "scale", "softcap")},
        score_mod=("none", "alibi"),
        mask_mod=("none", "documents"),
        **{name: CALLS.factors[name] for name in ("dropout", "sink", "deterministic", "dlse", "layout")},
    ),
    (
        _no("a softcap is a score_mod", softcap="yes", score_mod="alibi"),
        _no("blocks of 32 columns", precision=("mxfp8", "mxfp8-forward"), head_dim="odd"),
        _no("dense queries are all in use: there is no such argument", form="dense", seqused=("queries", "both")),
        _no("rows without keys come of lengths here", mask="empty_rows", lengths=("ragged", "several_tiles")),
        _no("rows without keys come of lengths here", mask="empty_rows", lengths=("one_query", "few_queries")),
        _no("there is one row", seqused=("keys", "both"), lengths="one_key"),
    ),
    {
        "sm80": (),
        "sm90": (_no("no dropout of so wide heads", head_dim="256", head_dim_v="larger", dropout="yes"),),
        "sm100": (),
        "sm120": (_OF_E4M3,),
    },
)
FOUR_BITS = Model(
    "four bits",
    dict(
        head_dim=("32", "48", "64", "96", "128", "256"),
        head_dim_v=("same", "smaller", "larger"),
        **{
            name: EIGHT_BITS.factors[name]
            for name in (
                "group", "lengths", "seqused", "mask", "scale", "softcap", "sink", "score_mod", "mask_mod",
                "block_mask", "dropout", "layout",
            )
        },
    ),
    (
        _no("a softcap is a score_mod", softcap="yes", score_mod=("alibi", "bias")),
        _no(
            "a block mask says itself who sees whom",
            block_mask=("128", "64"),
            mask=("causal", "left", "both_sides", "causal_left"),
        ),
        _no("a block mask has a block", block_mask=("128", "64"), lengths="zero"),
        _no("a block mask is made of a mask_mod", block_mask=("128", "64"), mask_mod="none"),
    ),
    EIGHT_BITS.foreign,
)  # fmt: skip
# Which kernels take the parts of a call follows from all of its levels.
_OF_PARTS = Exclusion({}, "lists of rows are a cache with pages of one row, and then a dense backward", by_seed=True)
SPARSE = Model(
    "sparse",
    dict(
        form=("dense", "packed", "used", "pages"),
        per=("token", "block"),
        granularity=("1", "4", "16", "64", "128"),
        lists=("one", "key_heads", "query_heads"),
        chosen=("some", "all", "none"),
        counts=("no", "yes"),
        causal=("no", "yes"),
        window=("no", "own", "some"),
        sink=("no", "yes"),
        dtype=CALLS.factors["dtype"],
        head_dim=("small", "64", "128", "odd", "192", "256"),
        **{name: CALLS.factors[name] for name in ("head_dim_v", "group")},
        lengths=("ragged", "one_query", "one_key", "tiles", "more_queries", "few_queries", "zero"),
        scale=CALLS.factors["scale"],
        direction=("training", "inference"),
        **{name: CALLS.factors[name] for name in ("deterministic", "dlse", "layout")},
    ),
    (
        _no("a cache has no gradients, see tests/test_sparse.py", form="pages", direction="training"),
        _no("nothing is trained", direction="inference", dlse="yes"),
        _no("nothing is trained", direction="inference", deterministic="yes"),
        _no("a list for each of so many heads takes long", group="128", lists="query_heads"),
        _no("the dense kernels take blocks of queries", group="128", per="block"),
        _no("rows of pages are copied anyway", form="pages", layout=("heads_first", "padded", "expanded", "unaligned")),
    ),
    {"sm80": (_OF_PARTS,), "sm90": (_OF_PARTS,), "sm100": (_OF_PARTS,), "sm120": (_OF_PARTS,)},
)
MODELS = {model.name: model for model in (CALLS, CACHES, EIGHT_BITS, TRAINING_IN_EIGHT_BITS, FOUR_BITS, SPARSE)}
BACKENDS = "sm80", "sm90", "sm100"  # of kernels that take all of most rows
