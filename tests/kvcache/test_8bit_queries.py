"""Queries of e4m3 with an 8-bit cache: the call equals a call in bfloat16 whose q is multiplied by the factor."""

import contextlib

import pytest
import torch

import fa4
from fa4.emulator import emulate
from fa4.runtime.device import chip_by_number, emulating

E4M3 = torch.float8_e4m3fn
HEADS, COLUMNS, ROWS = 2, 64, 150


def call(seed, dtype=E4M3, pages=False, new=0, packed=False):
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=draw)

    caches = [(20 * numbers(2, ROWS, HEADS, COLUMNS)).to(dtype) for _ in range(2)]
    given = dict(zip(("k_cache", "v_cache"), caches), cache_seqlens=torch.tensor([90, 140], dtype=torch.int32))
    given |= dict(k_descale=torch.rand(2, HEADS, generator=draw) + 0.5, v_descale=torch.rand((), generator=draw))
    if pages:
        table = torch.randperm(2 * ROWS // 10, generator=draw).to(torch.int32).view(2, -1)
        given |= {name: given[name].reshape(-1, 10, HEADS, COLUMNS) for name in ("k_cache", "v_cache")}
        given["page_table"] = table
    if new:
        rows = [numbers(2, new, HEADS, COLUMNS).bfloat16() for _ in range(2)]
        angles = numbers(ROWS, COLUMNS // 2)
        given |= dict(k=rows[0], v=rows[1], rotary_cos=angles.cos().bfloat16(), rotary_sin=angles.sin().bfloat16())
    q = (5 * numbers(2, 7, 3 * HEADS, COLUMNS)).to(E4M3)
    if packed:
        given |= dict(cu_seqlens_q=torch.tensor([0, 5, 14], dtype=torch.int32))
        q = q.view(14, 3 * HEADS, COLUMNS)
    return given | dict(q=q)


CALLS = {
    "plain": (dict(), dict(return_lse=True)),
    "int8": (dict(dtype=torch.int8), dict(causal=True)),
    "pages": (dict(pages=True), dict(causal=True, num_splits=3)),
    "append": (dict(new=7), dict(causal=True, window_size=(60, None))),
    "packed": (dict(packed=True), dict(softcap=3.0, learnable_sink=torch.ones(3 * HEADS, dtype=torch.bfloat16))),
    "score_mod": (dict(pages=True), dict(score_mod=lambda s, b, h, i, j: s + 0.01 * (j - i), return_lse=True)),
    "mask_mod": (dict(new=7, pages=True), dict(mask_mod=lambda b, h, i, j: (i + j) % 3 > 0, batch_invariant=True)),
}
DESCALES = {
    "none": None,
    "one": torch.tensor(0.25),
    "heads": torch.tensor([0.25, 0.0625]),
    "all": torch.tensor([[0.5, 0.0625], [0.125, 0.25]]),
}


@pytest.mark.rotates(6)
@pytest.mark.parametrize("chip", [None, "sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CALLS)
def test_it_equals_a_call_in_16_bits(name, chip, seed):
    """Bit for bit: factors are powers of two."""
    made, options = CALLS[name]
    names = [n for n in DESCALES if n != "all" or not made.get("packed")]
    q_descale = DESCALES[names[seed % len(names)]]
    given, widened = call(seed, **made), call(seed, **made)
    factors = torch.ones(()) if q_descale is None else q_descale
    factors = factors.expand(2, HEADS).repeat_interleave(3, 1)
    factors = factors[0] if made.get("packed") else factors[:, None]
    widened["q"] = (given["q"].float() * factors[..., None]).bfloat16()
    results = []
    with contextlib.nullcontext() if chip is None else emulate(chip, sms=2, seed=seed):
        for arguments in (given | dict(q_descale=q_descale), widened):
            found = fa4.flash_attn_with_kvcache(**arguments, **options)
            results.append([*(found if options.get("return_lse") else [found]), arguments["k_cache"].float()])
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_it_compiles(seed):
    given = call(seed, new=7) | dict(q_descale=torch.tensor(0.25))
    eager = fa4.flash_attn_with_kvcache(**given)
    again = call(seed, new=7) | dict(q_descale=torch.tensor(0.25))
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**again), eager, rtol=0, atol=0)


ERRORS = {
    "cache_of_16_bits": (
        TypeError,
        r"q has dtype torch.float8_e4m3fn with a k_cache of dtype torch.bfloat16, expected torch.float8",
        lambda given: (
            {name: given[name].bfloat16() for name in ("k_cache", "v_cache")} | dict(k_descale=None, v_descale=None)
        ),
    ),
    "q_of_16_bits": (
        TypeError,
        "q_descale is given with q of dtype torch.bfloat16, expected torch.float8_e4m3fn",
        lambda given: dict(q=given["q"].bfloat16(), q_descale=torch.ones(())),
    ),
    "shape": (
        ValueError,
        r"q_descale has shape \(3\), expected \(\), \(2,\) or \(2, 2\)",
        lambda given: dict(q_descale=torch.ones(3)),
    ),
    "value": (ValueError, "q_descale has -1.0", lambda given: dict(q_descale=torch.tensor(-1.0))),
    "new_rows": (
        TypeError,
        "k has dtype torch.float8_e4m3fn, expected torch.bfloat16",
        lambda given: {name: given["q"][:, :, :HEADS] for name in "kv"},
    ),
}


def test_explain_is_about_the_cache(seed):
    given = call(seed, pages=True)
    arguments = dict(q=given["q"], k=given["k_cache"], v=given["v_cache"], page_table=given["page_table"])
    arguments |= dict(cache_seqlens=given["cache_seqlens"])
    with emulating(chip_by_number(90)):
        assert fa4.explain(**arguments, q_descale=torch.ones(HEADS)).spec.cache.dtype == E4M3
        with pytest.raises(ValueError, match=r"q_descale has shape \(7\)"):
            fa4.explain(**arguments, q_descale=torch.ones(7))


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_argument(name, seed):
    error, message, changes = ERRORS[name]
    given = call(seed)
    with pytest.raises(error, match=message):
        fa4.flash_attn_with_kvcache(**given | changes(given))
