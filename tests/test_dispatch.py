"""The table: order, refusals that list every reason, named backends that obey or raise."""

import itertools
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fa4
from fa4.mods.frontend.trace import trace_score
from fa4.mods.ir.record import ModSpec
from fa4.oracle.cases import Case, make
from fa4.runtime import device, dispatch, env, toolchain
from fa4.runtime.chips import CHIPS
from fa4.runtime.device import Chip, NoTarget, chip_by_number, chip_of, emulating, target_for
from fa4.runtime.dispatch import Backend, HeadDims, NoBackend
from fa4.runtime.spec import AttentionSpec, CacheSpec, Feature, Flags, ProblemSize

PICKY = Backend(
    name="picky",
    summary="for this test",
    chips="sm_100",
    on=lambda chip: chip.number == 100,
    dtypes=(torch.bfloat16,),
    head_dims=HeadDims(multiple=8, largest=128, pairs=((192, 128),)),
    features=frozenset({Feature.CAUSAL}),
    module="fa4.fallback",
    requires=("no_such_module_anywhere",),
)
CPU = chip_of(torch.device("cpu"))
MANY = ProblemSize(1, 4096, 4096)


def spec(**kwargs):
    return make(Case("x", **kwargs), 0).spec


@pytest.fixture
def picky_first(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", (PICKY, *dispatch.BACKENDS))
    dispatch.select.cache_clear()
    yield
    dispatch.select.cache_clear()


def test_a_refusal_lists_every_reason():
    reasons = PICKY.refusals(spec(head_dim=132, dtype=torch.float16, softcap=3.0, sink=True), CPU)
    text = "; ".join(reasons)
    for part in (
        "needs sm_100 (this is cpu)",
        "no_such_module_anywhere",
        "float16",
        "(132, 132)",
        "softcap",
        "learnable_sink",
    ):
        assert part in text


def test_auto_takes_the_first_that_fits(picky_first):
    assert dispatch.select(spec(), CPU).name == "torch"


def test_a_named_backend_obeys_or_raises(picky_first):
    assert dispatch.select(spec(), CPU, "torch").name == "torch"
    with pytest.raises(NoBackend, match="picky needs sm_100"):
        dispatch.select(spec(), CPU, "picky")
    with pytest.raises(ValueError, match="backend is 'nope'"):
        dispatch.select(spec(), CPU, "nope")


def test_explain_tells_why_the_preferred_one_was_not_taken(picky_first):
    explanation = dispatch.explain(spec(), MANY, CPU)
    assert explanation.chosen == "torch" and explanation.refused[0][0] == "picky"
    assert "not picky: needs sm_100" in str(explanation)


def test_head_dims_take_multiples_and_named_pairs():
    assert PICKY.head_dims.takes(64, 128) and PICKY.head_dims.takes(192, 128)
    assert not PICKY.head_dims.takes(192, 192) and not PICKY.head_dims.takes(36, 36)
    for dims in ((36, 64), (64, 36)):  # either alone is refused
        reasons = PICKY.refusals(spec(head_dim=dims[0], head_dim_v=dims[1]), CPU)
        assert any(str(dims) in reason for reason in reasons), reasons


def test_cpu_tensors_live_on_the_emulated_chip_inside_emulating():
    chip = chip_by_number(100, emulated=True)
    with emulating(chip):
        assert chip_of(torch.device("cpu")) is chip
    assert chip_of(torch.device("cpu")) == Chip("cpu")


@pytest.fixture
def two_gpus(monkeypatch):
    """What torch says where an A100 and a B200 are, the second of them current."""
    facts = {0: ((8, 0), 108, 163 << 10, 40 << 20, "A100"), 1: ((10, 0), 148, 227 << 10, 126 << 20, "B200")}
    names = ("multi_processor_count", "shared_memory_per_block_optin", "L2_cache_size", "name")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: facts[index][0])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**dict(zip(names, facts[index][1:])))
    )
    device._cuda_chip.cache_clear()
    yield
    device._cuda_chip.cache_clear()


def test_a_gpu_is_asked_what_it_is(two_gpus):
    a100, b200 = (chip_of(torch.device("cuda", index)) for index in (0, 1))
    assert (a100.number, a100.sms, a100.smem_per_block, a100.name) == (80, 108, 163 << 10, "A100")
    assert (b200.number, b200.sms, b200.smem_per_block, b200.name) == (100, 148, 227 << 10, "B200")
    assert (a100.l2, b200.l2) == (chip_by_number(80).l2, chip_by_number(100).l2) == (40 << 20, 126 << 20)
    assert a100.device_type == "cuda" and not a100.emulated
    assert chip_of(torch.device("cuda")) == b200, "the current device"
    assert (a100.target, b200.target) == (chip_by_number(80).target, chip_by_number(100).target)


def test_what_is_neither_a_cpu_nor_an_nvidia_gpu_has_no_number(two_gpus, monkeypatch):
    assert chip_of(torch.device("meta")) == Chip("meta")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert chip_of(torch.device("cuda", 0)) == Chip("cuda")


@pytest.mark.parametrize("number, sms, smem", [(80, 108, 163), (89, 128, 99), (90, 132, 227), (100, 148, 227)])
def test_a_chip_by_number_has_its_sizes(number, sms, smem):
    chip = chip_by_number(number)
    assert (chip.sms, chip.smem_per_block, chip.device_type) == (sms, smem << 10, "cuda")
    small = chip_by_number(number, sms=3, emulated=True)
    assert (small.sms, small.smem_per_block, small.device_type) == (3, smem << 10, "cpu")


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100"])
def test_kernels_take_head_dims_of_whole_vectors(name):
    """8 elements of 2 bytes each are the 16 bytes that rows are copied by."""
    takes = next(row for row in dispatch.BACKENDS if row.name == name).head_dims.takes
    assert takes(64, 64) and takes(40, 40) and takes(128, 64)
    assert not any(takes(*dims) for dims in ((36, 64), (64, 36), (580, 580), (64, 584)))


LARGEST = {
    "sm120": [(128, 128)],
    "sm100": [(576, 576)],
    "sm90": [(128, 128), (256, 256), (256, 256), (576, 512)],
    "sm80": [(576, 576)],
    "torch": [],
}


@pytest.mark.parametrize("name", LARGEST)
def test_head_dims_end_where_the_table_says(name):
    """Each row of a backend; the pair (192, 128) is the one beyond 128 of Hopper's first row."""
    rows = [row.head_dims for row in dispatch.BACKENDS if row.name == name]
    largest = sorted(x for x, dims in zip(LARGEST[name], rows) if dims.takes(*x))
    assert largest == LARGEST[name]
    assert not any(dims.takes(d + 8, d) or dims.takes(d, d + 8) for (d, _), dims in zip(LARGEST[name], rows))
    assert name == "torch" or not any(dims.takes(36, 36) for dims in rows)
    if name == "sm90":
        takes = rows[0].takes
        assert takes(192, 128) and not takes(192, 192) and not takes(128, 192)
    if name == "torch":
        assert rows[0].takes(1, 1000) and rows[0].takes(999, 3)


def test_hopper_trains_wide_heads_and_leaves_some_backwards_to_the_portable_kernels():
    """Those with functions, and those of head dims above 256, whose forward is its own."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    chip, extent = chip_by_number(90), ProblemSize(1, 300, 300)
    graph = trace_score(lambda score, b, h, q_idx, kv_idx: score + q_idx).graph
    functions = None, ModSpec(score=graph), ModSpec(mask=graph, block=(128, 128)), ModSpec(dropout=True)
    for dims in ((256, 256), (136, 200), (256, 64), (320, 264), (512, 512), (64, 512), (576, 512)):
        problem = replace(spec(head_dim=dims[0], head_dim_v=dims[1]), needs_backward=True)
        for deterministic, mods in itertools.product((False, True), functions):
            asked = replace(problem, deterministic=deterministic, mods=mods)
            row, is_widest = dispatch.select(asked, chip), max(dims) > 256
            if is_widest and asked.has_dropout:
                assert row.name == "sm80"
                continue
            leaves = is_widest or (mods is not None and not mods.dropout)
            assert (row.name, row.backward) == ("sm90", "sm80" if leaves else None)
            told = str(dispatch.explain(asked, extent, chip))
            assert ("backend  sm90, backward sm80\n" in told) == leaves and ("backend  sm90\n" in told) != leaves
    assert dispatch.select(spec(head_dim=576, head_dim_v=576), chip).name == "sm80"


def test_blackwell_takes_wide_heads_in_both_directions():
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    problem, chip = spec(head_dim=256, heads_q=8, heads_kv=2), chip_by_number(100)
    for trains in (False, True):
        assert dispatch.select(replace(problem, needs_backward=trains), chip).name == "sm100"
    narrow = spec(head_dim=128, heads_q=8, heads_kv=2)
    for number, chosen in ((80, "sm80"), (90, "sm90"), (100, "sm100"), (103, "sm100"), (120, "sm80")):
        assert dispatch.select(narrow, chip_by_number(number)).name == chosen


@pytest.mark.parametrize(
    "cache, why",
    [
        (CacheSpec(page_size=8), None),
        (CacheSpec(page_size=16), None),
        (CacheSpec(page_size=384), None),
        (CacheSpec(has_batch_idx=True, has_leftpad=True), None),
        (CacheSpec(page_size=1), None),
        (CacheSpec(page_size=20), None),
        (CacheSpec(page_size=16, has_leftpad=True), None),
        (CacheSpec(page_size=1, dtype=torch.int8), None),
        (CacheSpec(dtype=torch.float8_e4m3fn), None),
    ],
    ids=str,
)
def test_what_blackwell_takes_of_caches(cache, why):
    """The portable kernels serve the rest, and `explain` says why."""
    _assert_blackwell_takes(cache, 128, why)


@pytest.mark.parametrize("cache", [CacheSpec(page_size=4), CacheSpec(page_size=16, has_leftpad=True)], ids=str)
def test_blackwell_has_no_room_for_single_rows_of_wide_heads(cache):
    _assert_blackwell_takes(cache, 256, "lacks single rows of pages of head_dim 256")


def _assert_blackwell_takes(cache, head_dim, why):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    problem = replace(spec(head_dim=head_dim, heads_q=8, heads_kv=2), cache=cache, has_seqused_k=True)
    explanation = dispatch.explain(problem, ProblemSize(1, 1, 4096), chip_by_number(100))
    assert explanation.chosen == ("sm100" if why is None else "sm80")
    assert why is None or why in str(explanation)


def test_unknown_chip_number_is_refused():
    with pytest.raises(ValueError, match="chip number 77 is not known"):
        chip_by_number(77)


def test_spec_features_are_those_in_use():
    assert spec(causal=True, heads_q=4, heads_kv=2).features() == {Feature.CAUSAL, Feature.GQA}
    assert spec(window_size=(3, 0)).features() == {Feature.CAUSAL, Feature.WINDOW}
    assert spec(window_size=(-1, 3)).features() == spec(window_size=(3, -1)).features() == {Feature.WINDOW}
    assert spec(head_dim_v=32, sink=True).features() == {Feature.HEAD_DIM_V, Feature.SINK}
    packed = spec(lengths=((3, 4), (2, 2)), seqused=((3, 4), (1, 2)), softcap=2.0)
    assert packed.features() == {Feature.VARLEN, Feature.SEQUSED, Feature.SOFTCAP}
    one_sided = replace(packed, has_seqused_k=False)
    assert one_sided.features() == packed.features() != replace(one_sided, has_seqused_q=False).features()
    trained = replace(spec(), needs_backward=True)
    assert trained.features() == {Feature.BACKWARD}
    assert replace(trained, deterministic=True).features() == {Feature.BACKWARD, Feature.DETERMINISTIC}
    assert not replace(spec(), deterministic=True).features()  # the forward always is


def test_what_a_call_asks_for_is_in_the_spec():
    asked = dict(deterministic=True, needs_backward=True, num_splits=3, batch_invariant=True)
    made = AttentionSpec.of(make(Case("x"), 0).inputs, Flags(0.5, 7, 0, 2.0, **asked))
    asked |= dict(softmax_scale=0.5, window_left=7, window_right=0, softcap=2.0)
    assert {name: getattr(made, name) for name in asked} == asked


def test_functions_of_a_pair_are_features():
    graph = object()  # only whether there is one matters
    for mods, features in (
        (ModSpec(), set()),
        (ModSpec(score=graph), {Feature.SCORE_MOD}),
        (ModSpec(mask=graph), {Feature.MASK_MOD}),
        (ModSpec(mask=graph, block=(64, 64)), {Feature.MASK_MOD, Feature.BLOCK_MASK}),
        (ModSpec(score=graph, trained=(0,)), {Feature.SCORE_MOD}),
    ):
        assert replace(spec(), mods=mods).features() == features
    trained = replace(spec(), mods=ModSpec(score=graph, trained=(0,)), needs_backward=True)
    assert trained.features() == {Feature.BACKWARD, Feature.SCORE_MOD, Feature.CAPTURED_GRADIENTS}


def test_gradients_of_captured_tensors_that_kernels_lack():
    leaves = {"table": (4, 9), "pairs": (2, 4, 8, 8), "shared": (2, 1, 8, 8), "sequences": (2,)}
    table, pairs, shared, sequences = (torch.ones(shape, requires_grad=True) for shape in leaves.values())
    scores = {
        "heads": lambda score, b, h, q_idx, kv_idx: score + table[h, 0] * kv_idx,
        "distances": fa4.scores.relative_bias(table),
        "pairs": fa4.scores.bias(pairs),
        "shared": fa4.scores.bias(shared),
        "twice": lambda score, b, h, q_idx, kv_idx: score + pairs[b, h, q_idx, kv_idx] + pairs[b, h, kv_idx, q_idx],
        "sequences": lambda score, b, h, q_idx, kv_idx: score * sequences[b],
    }
    in_order, of_packed = "to whose elements several pairs add", "that are chosen by packed sequences"
    lacks = {"distances": in_order, "shared": in_order, "twice": in_order, "sequences": of_packed}
    backend = next(row for row in dispatch.BACKENDS if row.name == "sm80")
    for name, score in scores.items():
        mods = ModSpec(score=trace_score(score).graph, trained=(0,))
        for options in (dict(deterministic=True), dict(varlen=True), dict()):
            asked = replace(spec(), mods=mods, needs_backward=True, **options)
            missing = lacks.get(name, "nothing")
            is_lacking = missing == (in_order if asked.deterministic else of_packed if asked.varlen else None)
            told = "; ".join(backend.refusals(asked, chip_by_number(80)))
            assert (missing in told) == is_lacking, (name, options)
            assert is_lacking or "captured" not in told, (name, options)


# Which backend `auto` takes where nothing speaks against it.
CHOSEN = {
    80: "sm80",
    86: "sm80",
    87: "sm80",
    89: "sm80",
    90: "sm90",
    100: "sm100",
    103: "sm100",
    120: "sm80",
    121: "sm80",
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("number", CHOSEN)
def test_the_backend_of_each_chip(number, dtype):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    problem = spec(dtype=dtype, head_dim=128, seqlen_q=4096, seqlen_k=4096)
    for emulated in (False, True):
        chip = chip_by_number(number, emulated=emulated)
        chosen = dispatch.select(problem, chip).name
        assert chosen == ("torch" if dtype == torch.float32 else CHOSEN[number])


# Compute capability -> what code for it is compiled for, where the table has no row of its own.
UNKNOWN = {88: "sm_80", 105: "sm_100", 107: "sm_100", 122: "sm_120", 129: "sm_120"}


@pytest.mark.parametrize("number, target", UNKNOWN.items())
def test_an_unknown_chip_gets_the_portable_target_of_its_major_version(number, target):
    """Code for X.0 runs on X.z; an "a" target would not, and a newer minor version's would not either."""
    chip = chip_by_number(number)
    assert chip.target == target and chip.compiles
    assert dispatch.select(spec(), chip).name == "sm80"
    family = [facts for facts in CHIPS.values() if facts.number // 10 == number // 10]
    assert chip.smem_per_block <= min(facts.smem_per_block for facts in family if facts.number < number)
    smallest = {8: 86, 10: 100, 12: 121}[number // 10]
    assert (chip.sms, chip.smem_per_block) == (CHIPS[smallest].sms, CHIPS[smallest].smem_per_block)


def test_a_new_major_version_gets_what_the_compiler_calls_it(monkeypatch):
    monkeypatch.setattr(device, "_dsl_targets", lambda: frozenset({"sm_100", "sm_130"}))
    assert target_for.__wrapped__(130) == "sm_130"
    with pytest.raises(NoTarget, match="compiles nothing that runs on sm_140"):
        target_for.__wrapped__(140)


def test_thor_needs_the_build_for_cuda_13(monkeypatch):
    """The build for CUDA 12 calls it sm_101 in the code."""
    monkeypatch.setattr(toolchain, "toolkit", lambda: 12)
    with pytest.raises(NoTarget, match=r"for sm_110 CuTe DSL must be built for CUDA 13: .*'fa4-kernels\[cu13\]'"):
        target_for.__wrapped__(110)
    monkeypatch.setattr(toolchain, "toolkit", lambda: 13)
    assert target_for.__wrapped__(110) == "sm_110a" and target_for.__wrapped__(112) == "sm_110"
    monkeypatch.setattr(toolchain, "toolkit", lambda: 0)  # nobody else asks
    assert target_for.__wrapped__(100) == "sm_100a" and target_for.__wrapped__(88) == "sm_80"


def test_what_compiles_for_a_chip_is_code_of_that_chip():
    """The whole table, and the portable targets, through the installed compiler: what the code says it is for."""
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    from tests.compiled_for import chip_in_code

    for number in (*CHIPS, *UNKNOWN):
        chip = chip_by_number(number)
        if chip.compiles:
            assert chip_in_code(chip) == int("".join(filter(str.isdigit, chip.target)))
        else:
            assert number == 110 and "CUDA 13" in chip.no_target


def test_facts_of_chips_are_plausible():
    """Sizes are in bytes, not in KiB."""
    for number, facts in CHIPS.items():
        assert facts.number == number
        assert 99 << 10 <= facts.smem_per_block < facts.smem_per_sm <= 228 << 10
        assert facts.l2 >= 1 << 20
        assert facts.target.startswith(f"sm_{number}")
    a100, b200 = CHIPS[80], CHIPS[100]
    assert (a100.toolkit, a100.l2, b200.l2) == (12, 40 << 20, 126 << 20)


def test_a_dry_run_ends_with_its_context():
    with device.dry_run("recorder"):
        assert chip_of(torch.device("cpu")) == replace(CPU, dry_run="recorder")
    assert chip_of(torch.device("cpu")) == CPU


def test_variables_of_the_environment_have_defaults(monkeypatch):
    expected = {"FA4_CACHE": "1", "FA4_CACHE_DIR": "", "FA4_CACHE_DAYS": "30", "FA4_CACHE_GB": "4"}
    expected |= {"FA4_BACKGROUND": "1", "FA4_CHECK_LENGTHS": "0", "FA4_RECORD": ""}
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == expected.pop(variable.name)
        monkeypatch.setenv(variable.name, "given")
        assert variable.get() == "given"
        monkeypatch.setenv(variable.name, "")
        assert variable.get() == variable.default
    assert not expected


def test_the_tiled_path_on_an_accelerator_is_told_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", False)
    gpu = Chip("cuda", 75, name="T4")
    with pytest.warns(UserWarning, match=r"plain torch.*: sm100 needs.*sm80 needs.*pass backend='torch'"):
        dispatch.warn_of_tiled_torch(spec(), gpu, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.warn_of_tiled_torch(spec(), gpu, "auto")
        monkeypatch.setattr(dispatch, "_warned", False)
        dispatch.warn_of_tiled_torch(spec(), gpu, "torch")
        dispatch.warn_of_tiled_torch(spec(), CPU, "auto")
        dispatch.warn_of_tiled_torch(spec(), chip_by_number(80), "auto")


def test_another_package_called_cutlass_is_not_the_dsl(monkeypatch, tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.split(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not dispatch.is_installed.__wrapped__("cutlass.cute")
    assert not dispatch.is_installed.__wrapped__("no_such_package.part")


def test_what_several_rows_of_a_backend_lack_is_told_once():
    """Hopper's backend has four rows, all of which a CPU refuses for one reason."""
    lines = str(fa4.explain(*(torch.empty(1, 8, 1, 16, dtype=torch.float16) for _ in range(3)))).splitlines()
    assert "not sm90: needs sm_90 (this is cpu)" in lines
    assert len(lines) == len(set(lines))
