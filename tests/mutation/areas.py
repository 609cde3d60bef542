"""Which tests answer for which files of the package, and which mistakes are none.

The tests of an area are in the order in which they are run: what is fast and specific first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from tests.mutation.plant import Mutant


@dataclass(frozen=True, slots=True)
class Area:
    """Files (patterns, `*` crosses folders) and what pytest is told to run for them: first `tests`, all of them; then,
    of `kernels`, those that run the mutant's line, one after the other. (Each is an argument list of its own.)"""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    kernels: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self.files)


_API, _CHOICE = "tests/test_api.py", "tests/test_dispatch.py"
_OPS_AT_ONCE = (
    " ".join(f"tests/test_{name}.py" for name in ("ops", "autograd", "repeated_calls", "batching", "jagged"))
    + " -k 'not opcheck'"
)
_OPS_COMPILED = "tests/test_compile.py tests/test_ops.py -k 'opcheck or compile'"
_CHOICE_AT_ONCE = f"{_CHOICE} -k 'not what_compiles'"
_DROPOUT = "tests/mods/test_dropout.py -k 'not compile'"
_MODS = ("tests/mods/test_trace.py", "tests/mods/test_flex.py", _DROPOUT)
# What functions read, ready-made ones, block masks and what is refused: of `mods` alone.
_MODS_BY_LINE = tuple(
    f"tests/mods/test_{name}.py"
    for name in (
        "refused",
        "coarse",
        "block_lists",
        "compositions",
        "operators",
        "trace_cache",
        "trace_changes",
        "ready_made",
    )
)
_EXPLAINED, _STALE, _SIZES = "tests/test_explained.py", "tests/test_stale_calls.py", "tests/test_changing_sizes.py"
_JIT = "tests/test_jit.py"
_INTEGRATIONS = ("tests/integrations/test_sdpa.py", "tests/integrations/test_transformers.py")
_FALLBACK, _RUN, _LAYOUTS = "tests/test_fallback.py", "tests/test_run.py", "tests/test_layouts.py"
_CHANNELS, _CURSOR = "tests/pipeline/test_channels.py", "tests/pipeline/test_cursor.py"
_PLACES, _MASK, _ORDER = "tests/test_placement.py", "tests/test_mask.py", "tests/test_schedule.py"
_TABLES = "tests/sm100/test_tables.py"
_PAIRS = "tests/mods/test_pairs.py::test_no_derivative_of_a_hidden_pair_reaches_a_gradient"


def _cases(test: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{test}[{name}]" for name in names)


# Of the tests of kernels those that differ in what they run, each on few tiles.
_SM80_SPLIT = (
    *_cases("tests/sm80/test_emulated.py::test_forward", "gqa_packed_short_queries"),
    *_cases("tests/mods/test_emulated.py::test_forward", "sm80-packed_and_split"),
)
_SM80_RUN = (
    f"{_RUN}::test_rows_past_the_last_sequence_are_zero[sm80-few_queries]",
    f"{_RUN}::test_padding_leaves_the_gradient_of_a_projection_finite[sm80-sequences]",
    f"{_RUN}::test_upstream_gradient_of_lse_may_be_expanded_or_strided[sm80]",
    *_cases(f"{_LAYOUTS}::test_a_layout_changes_no_bit", "sm80-views", "sm80-odd"),
    f"{_LAYOUTS}::test_a_shared_head_and_a_shared_gradient_have_stride_0[sm80]",
)
_SM80_BOTH = (
    *_cases(
        "tests/sm80/test_emulated.py::test_forward_and_gradients",
        *("everything", "batch_and_scale", "packed_rows_past_the_end"),
    ),
    "tests/sm80/test_emulated.py::test_gradients",
    *_cases(_PAIRS, "sm80-prefix_256", "sm80-infinite_derivatives"),
)
_SM80_TABLES = (
    "tests/sm80/test_forward.py::test_the_row_of_a_head_dim",
    "tests/sm80/test_backward.py::test_the_row_of_a_head_dim",
    "tests/sm80/test_forward.py::test_heads_are_packed_and_keys_split_where_rows_are_few",
    "tests/sm80/test_forward.py::test_splits_fill_an_idle_chip_and_leave_a_busy_one_alone",
    "tests/sm80/test_forward.py::test_every_head_dim_has_tiles_that_fit_the_chip",
    "tests/sm80/test_backward.py::test_every_head_dim_has_tiles_that_fit_the_chip",
)
_SM90_FORWARD = (
    "tests/sm90/test_forward.py -k 'fits_the_chip or row_of_a_problem or refused or same_share'",
    "tests/sm90/test_splits.py -k 'parts_of_a_problem or share_a_tile'",
    *_cases(
        "tests/sm90/test_forward.py::test_case",
        *("causal", "window_both_sides", "packed_with_all", "seqused_dense", "half_block_alone"),
        "head_dim_192_128_many",
    ),
    "tests/test_parts.py::test_parts_are_joined[sm90-group_of_five_whole]",
)
_SM100_FORWARD = (
    "tests/sm100/test_forward.py::test_chip_and_problem_decide_about_different_columns",
    "tests/sm100/test_forward.py::test_two_ctas_share_a_tile_where_it_is_full",
    "tests/sm100/test_forward.py::test_every_head_dim_fits_the_chip",
    "tests/sm100/test_forward.py::test_a_pair_refuses",
    *_cases(
        "tests/sm100/test_forward.py::test_case",
        *("causal", "window_both_sides", "packed_with_all", "seqused_dense", "pair_one_key"),
        *("group_of_twelve_is_packed_by_four", "varlen_with_empty", "head_dim_192_128_many"),
    ),
    "tests/sm100/test_forward.py::test_a_pair_serves_sequences_of_any_length",
    "tests/sm100/test_forward.py::test_one_q_tile_a_cta",
    *_cases("tests/sm100/test_forward.py::test_case", "group_of_three_is_not_packed"),
    "tests/sm100/test_widest.py",
    "tests/sm100/test_forward.py::test_schedules_and_thresholds_agree",
)
_SM100_BACKWARD = (
    "tests/sm100/test_backward.py::test_a_pair_takes_head_dims_that_fill_128_columns",
    "tests/sm100/test_backward.py::test_every_head_dim_fits_the_chip",
    *_cases(
        "tests/sm100/test_backward.py::test_gradients_of_named_case",
        *("head_dim_40_padded", "varlen_with_empty", "window_softcap_gqa", "pair_varlen", "head_dim_192_128"),
    ),
    *_cases(
        "tests/sm100/test_backward.py::test_deterministic_gradients_are_bitwise_equal", "gqa-pair", "varlen-single"
    ),
    *_cases(_PAIRS, "sm100-lists_128", "sm100-infinite_derivatives"),
)
_SM120_FORWARD = (
    "tests/sm120/test_fp8.py -k 'fits_the_chip or row_of_a_problem or refused or shared_chip or takes'",
    "tests/sm120/test_mxfp8.py -k 'fits_the_chip or what_it_takes'",
    "tests/sm120/test_nvfp4.py -k 'fits_the_chip or what_it_takes or order_of_the_products or p_is_rounded'",
    *_cases("tests/sm120/test_fp8.py::test_case_is_right", "causal", "widths", "packed_causal", "group_of_three"),
    *_cases("tests/sm120/test_fp8.py::test_parts_are_joined", "packed", "many_rows"),
    "tests/sm120/test_fp8.py::test_rows_of_the_table",
    "tests/sm120/test_fp8.py::test_blocks_that_lists_name",
    "tests/sm120/test_mxfp8.py -k 'packed_used or group_of_three or columns_of_v or few_queries or strides'",
    *_cases("tests/sm120/test_nvfp4.py::test_case_is_right", "window", "few_keys_used", "few_queries", "columns_of_v"),
    "tests/sm120/test_nvfp4.py -k 'rows_of_the_table or unused_keys or strides or lists'",
)
_SM90_BACKWARD = (
    "tests/sm90/test_backward.py -k 'tables or softcap_leaves or place or refused'",
    "tests/sm90/test_backward.py::test_gradients_of_named_case",
    "tests/sm90/test_window_backward.py -k 'refused or need_no or two_blocks or (halves and one_length)'",
    *_cases("tests/sm90/test_backward.py::test_wide_gradients_in_order_are_equal_whatever_the_order_of_events", "full"),
    *_cases(_PAIRS, "sm90-prefix_128", "sm90-infinite_derivatives"),
)

# The first that covers a file is the file's.
AREAS = (
    Area(
        "api",
        (
            "fa4/__init__.py",
            "fa4/api/__init__.py",
            "fa4/api/dense.py",
            "fa4/torch_ops/checks.py",
            "fa4/api/explained.py",
        ),
        (),
        (_API, _EXPLAINED, _OPS_AT_ONCE, _STALE, _OPS_COMPILED, *_MODS),
    ),
    Area(
        "operators",
        (
            "fa4/torch_ops/__init__.py",
            "fa4/torch_ops/autocast.py",
            "fa4/torch_ops/calls.py",
            "fa4/torch_ops/signature.py",
            "fa4/runtime/torch_internals.py",
            "fa4/torch_ops/ops.py",
            "fa4/torch_ops/flops.py",
            "fa4/torch_ops/autograd.py",
            "fa4/runtime/spec.py",
            "fa4/torch_ops/batching.py",
            "fa4/torch_ops/jagged.py",
        ),
        (),
        (
            "tests/test_signature.py",
            "tests/test_torch_internals.py",
            "tests/test_calls.py",
            _STALE,
            _OPS_AT_ONCE,
            _CHOICE_AT_ONCE,
            _SIZES,
            _API,
            _OPS_COMPILED,
            *_MODS,
        ),
    ),
    Area(
        "choice",
        (
            "fa4/runtime/__init__.py",
            "fa4/runtime/dispatch.py",
            "fa4/runtime/limits.py",
            "fa4/runtime/ch*.py",
            "fa4/runtime/conditions.py",
            "fa4/runtime/device.py",
            "fa4/runtime/env.py",
        ),
        (),
        (
            _CHOICE_AT_ONCE,
            "tests/test_cli.py::test_explain_answers_for_chips_that_are_not_here",
            "tests/test_docs.py",
            f"{_CHOICE} -k what_compiles",
            "tests/test_choice.py",
            "tests/test_ahead.py",  # what is recorded of choices
            _API,
        ),
    ),
    Area(
        "jit",
        (
            "fa4/runtime/jit.py",
            "fa4/runtime/dsl.py",
            "fa4/runtime/linked.py",
            "fa4/runtime/manifest.py",
            "fa4/runtime/toolchain.py",
            "fa4/runtime/disk.py",
        ),
        (),
        (
            "tests/test_disk.py",
            f"{_JIT} -k 'not process and not dry_run and not forked'",
            f"{_JIT} -k 'process or dry_run or forked'",
        ),
    ),
    Area("fallback", ("fa4/fallback/*", "fa4/runtime/sequences.py"), (_FALLBACK, _DROPOUT), (_STALE,)),
    Area(
        "dropout",
        ("fa4/api/dropout.py", "fa4/*/dropout.py"),
        (),
        (_DROPOUT, "tests/mods/test_dropout_in_kernels.py::test_bits"),
    ),
    Area(
        "mods",
        ("fa4/api/flex.py", "fa4/masks.py", "fa4/scores.py", "fa4/torch_ops/mod_ops.py", "fa4/mods/*"),
        _MODS,
        (*_MODS_BY_LINE, _STALE),
    ),
    Area(
        "oracle",
        ("fa4/oracle/*",),
        ("tests/test_reference.py", "tests/test_cases.py", _FALLBACK),
    ),
    Area(
        "vllm",
        ("fa4/integrations/vllm/*",),
        ("tests/integrations/test_vllm.py tests/integrations/test_vllm_parts.py",),
        ("tests/integrations/test_vllm_mla.py -k 'not emulated'",),
    ),
    Area("sglang", ("fa4/integrations/sglang/*",), ("tests/integrations/test_sglang.py",), ()),
    Area(
        "neighbours",
        ("fa4/compat/*", "fa4/integrations/*"),
        ("tests/test_compat.py", "tests/test_flash_mla.py", *_INTEGRATIONS),
        ("tests/integrations/test_documents.py",),
    ),
    Area(
        "cache",
        ("fa4/kvcache/*", "fa4/runtime/scaled_rows.py", "fa4/runtime/nvfp4.py"),
        (
            "tests/kvcache/test_calls.py",
            "tests/kvcache/test_scaled_rows.py",
            "tests/kvcache/test_api.py",
            "tests/kvcache/test_torch.py",
            "tests/kvcache/test_nvfp4.py -k 'not emulated and not unused'",
            "tests/test_latent.py",
        ),
        (_SIZES, "tests/test_wrong_arguments.py", "tests/kvcache/test_emulated.py"),
    ),
    Area(
        "latent",
        ("fa4/api/latent.py", "fa4/torch_ops/latent.py"),
        ("tests/test_latent.py",),
    ),
    Area(
        "sparse",
        (
            "fa4/sparse/*",
            "fa4/sm90/sparse/*",
            "fa4/sm100/sparse/*",
            "fa4/bwd/device/list_work.py",
            "fa4/bwd/lists.py",
            "fa4/bwd/lists_plan.py",
            "fa4/fwd/kernels/select.py",
            "fa4/bwd/kernels/ordered_sums.py",
            "fa4/bwd/launchers.py",
        ),
        ("tests/test_sparse.py",),
        (
            "tests/test_select.py",
            "tests/test_ordered_sums.py",
            "tests/sm90/test_sparse.py",
            "tests/sm90/test_sparse_front.py",
            "tests/sm100/test_sparse.py",
            "tests/sm100/test_sparse_forward.py",
        ),
    ),
    Area(
        "indexer",
        ("fa4/indexer/*", "fa4/api/indexer.py", "fa4/sm90/indexer/*"),
        (
            "tests/indexer/test_errors.py",
            "tests/indexer/test_radix.py",
            "tests/indexer/test_torch.py",
        ),
        ("tests/sm90/test_indexer.py",),
    ),
    Area("8-bit output", ("fa4/torch_ops/out_8bit.py",), ("tests/fp8/test_out.py",)),
    Area(
        "low precision",
        (
            "fa4/api/quantized.py",
            "fa4/torch_ops/low_precision.py",
            "fa4/torch_ops/descales.py",
            "fa4/torch_ops/recipes.py",
            "fa4/torch_ops/e2m1.py",
        ),
        (
            "tests/fp8/test_recipes.py",
            "tests/fp8/test_attention.py",
            "tests/fp8/test_four_bits.py",
            "tests/fp8/test_training.py",
        ),
    ),
    Area(
        "states",
        ("fa4/api/states.py", "fa4/distributed/*", "fa4/fwd/kernels/join.py"),
        ("tests/test_states.py", "tests/test_distributed.py"),
        ("tests/test_wrong_arguments.py",),
    ),
    Area(
        "command line",
        (
            "fa4/cli/*",
            "fa4/api/ahead.py",
            "fa4/runtime/recording.py",
            "fa4/__main__.py",
        ),
        ("tests/test_cli.py", "tests/test_ahead.py"),
    ),
    Area("ranges of calls", ("fa4/api/call_ranges.py",), ("tests/test_call_ranges.py",)),
    Area(
        "compiling elsewhere",
        ("fa4/runtime/background.py", "fa4/runtime/workers.py"),
        ("tests/test_background.py", "tests/test_call_ranges.py", "tests/test_ahead.py"),
    ),
    Area("counters", ("fa4/runtime/counters.py",), ("tests/test_counters.py",)),
    Area("growing lengths", ("fa4/torch_ops/growing.py",), ("tests/test_growing.py",)),
    Area(
        "run",
        ("fa4/torch_ops/run/*", "fa4/runtime/memory.py", "fa4/runtime/plan.py"),
        (),
        (f"{_RUN} -k 'not torch and not sm'", f"{_RUN} -k torch", f"{_LAYOUTS} -k torch", *_SM80_RUN, *_SM80_SPLIT),
    ),
    Area(
        "core",
        ("fa4/core/*",),
        (),
        (_MASK, _ORDER, *_SM80_SPLIT, *_SM80_BOTH, *_SM100_FORWARD, *_SM100_BACKWARD),
    ),
    Area(
        "sm80",
        ("fa4/sm80/*", "fa4/fwd/*", "fa4/bwd/*"),
        (),
        (
            *(*_SM80_TABLES, *_SM80_SPLIT, *_SM80_BOTH),
            "tests/mods/test_emulated.py::test_other_values_numbers_lengths_and_lists_compile_nothing",
            "tests/mods/test_emulated.py::test_forward_and_gradients[sm90-documents]",
            # What the chips share: launches, rows and work of forwards, steps that no round of threads divides.
            *_cases("tests/sm90/test_forward.py::test_case", "seqused_dense"),
            "tests/test_parts.py::test_parts_are_joined[sm90-group_of_five_whole]",
            *_cases("tests/sm100/test_forward.py::test_case", "causal"),
            *_cases("tests/sm90/test_backward.py::test_gradients_of_named_case", "head_dim_40_128"),
        ),
    ),
    Area(
        "sm90",
        ("fa4/sm90/*",),
        (),
        (
            *(_PLACES, *_SM90_FORWARD, "tests/sm90/test_wgmma.py", "tests/sm90/test_latent.py"),
            *("tests/sm90/test_widest.py", *_SM90_BACKWARD),
        ),
    ),
    Area("sm100 forward", ("fa4/sm100/fwd/*",), (), (_TABLES, *_SM100_FORWARD)),
    Area("sm100 backward", ("fa4/sm100/bwd/*",), (), (_PLACES, _TABLES, *_SM100_BACKWARD)),
    Area("sm120", ("fa4/sm120/*",), (), _SM120_FORWARD),
    Area(
        "sm100",
        ("fa4/sm100/*", "fa4/pipeline/*"),
        (),
        (_CHANNELS, _CURSOR, _TABLES, "tests/sm100/test_exp2.py", *_SM100_FORWARD, *_SM100_BACKWARD),
    ),
)


@dataclass(frozen=True, slots=True)
class NoMistake:
    """Mutants that change no result: `place` is searched in "class.function: kind: old -> new", old being the lines in
    which the expression and in which the change begins."""

    file: str
    place: str
    reason: str

    def covers(self, mutant: Mutant, lines: Sequence[str]) -> bool:
        """Whether this is one of them; `lines` are those of the file."""
        if not fnmatch(mutant.path, self.file):
            return False
        old = f"{lines[mutant.line - 1].strip()} {lines[mutant.changed - 1].strip()}"
        return re.search(self.place, f"{mutant.where}: {mutant.kind}: {old} -> {mutant.text.decode()}") is not None


NO_MISTAKES = (
    NoMistake("fa4/runtime/dispatch.py", r"keyword dropped: .*summary=", "words for people"),
    NoMistake("fa4/runtime/chips.py", r": ChipFacts\(", "facts of chips, which nothing here can check"),
    NoMistake("fa4/*", r"(AttentionSpec|Chip): constant", "defaults of fields that every call gives"),
    NoMistake("fa4/torch_ops/checks.py", r" flags\(.* -> v, k$", "k and v are only asked who wants a gradient"),
    NoMistake(
        "fa4/*", r"(constant|dropped): .*unroll=|unroll_full=", "how often a loop is unrolled is a matter of speed"
    ),
    NoMistake("fa4/*", r"preferred_smem_carveout=|min_blocks_per_mp=", "wishes for how many blocks share a processor"),
    NoMistake(
        "fa4/*", r"dropped: cute.arch.griddepcontrol_launch_dependents", "the next kernel would only start later"
    ),
    NoMistake(
        "fa4/sm80/tiles.py",
        r"^: |_l2_group: ",
        "sizes of tiles and L2 groups are measured, and tests see that they fit",
    ),
    NoMistake("fa4/sm100/*/tiles.py", r"^: ", "rows of tuned numbers"),
    NoMistake("fa4/sm90/*/tiles.py", r"^: ", "rows of tuned numbers"),
    NoMistake("fa4/sm120/*/tiles.py", r"^: ", "rows of tuned numbers"),
    NoMistake("fa4/sm100/fwd/plan.py", r"^l2_group_of: ", "how many heads advance together is a matter of speed"),
    NoMistake("fa4/fwd/l2_groups.py", r"^l2_groups: ", "how many heads advance together is a matter of speed"),
)


def area_of(path: str) -> Area:
    """The area that a file belongs to.

    Raises:
        LookupError: none covers it.
    """
    for area in AREAS:
        if area.covers(path):
            return area
    raise LookupError(f"no area of tests/mutation/areas.py covers {path}: say which tests answer for it")


def real(mutants: Iterable[Mutant], source: bytes) -> list[Mutant]:
    """Those that are mistakes."""
    lines = source.decode().splitlines()

    def is_none(mutant: Mutant) -> bool:
        return any(rule.covers(mutant, lines) for rule in NO_MISTAKES)

    return [mutant for mutant in mutants if not is_none(mutant)]
