"""Calls with arguments drawn wrong, of the functions on caches, between processes and by flash-attn's names.

Each is refused by an error that fa4 raises and that names an argument, with nothing written, or gives what a loop over
sequences in float64 gives. `--times 100` draws more.
"""

import inspect
import itertools
import random
import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fa4
import fa4.distributed as cp
from fa4.compat import flash_attn

DRAWS = 30
PACKAGE = str(Path(fa4.__file__).parent)
JUNK = (None, 3, 0, -1, 1.5, float("nan"), "x", "", [1], (2, 3), (-1, -1), True, False, 1 << 40, object())


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def wrong(draw, x):
    """Another value in the place of x; it may be right by chance."""
    if not isinstance(x, torch.Tensor) or draw.random() < 0.3:
        return draw.choice(JUNK)
    y = x.clone()
    changes = [
        lambda: y.half(), lambda: y.long(), lambda: y.to(torch.int8), lambda: y.bool(), lambda: y.to("meta"),
        lambda: y.unsqueeze(0), lambda: y[..., :-1], lambda: y[:1], lambda: y[1:], lambda: y[:0], lambda: -y,
        lambda: y + 1, lambda: y + 1000, lambda: y * 0, lambda: y.flip(0), lambda: y.to_sparse(), lambda: y.numpy(),
        lambda: y.repeat_interleave(2, -1)[..., ::2], lambda: y[:1].expand(y.shape) if y.ndim else y,
        lambda: y.tolist(), lambda: y.flatten(), lambda: y.unsqueeze(-1), lambda: y.to(torch.float64),
    ]  # fmt: skip
    if y.ndim:
        changes += [
            lambda: y[0],
            lambda: torch.nested.nested_tensor(list(y)),
            lambda: torch.nested.nested_tensor(list(y), layout=torch.jagged),
        ]
    if y.is_floating_point():
        changes += [lambda: y.requires_grad_(), lambda: y * float("nan"), lambda: y.float()]
    while True:
        try:
            return draw.choice(changes)()
        except (RuntimeError, TypeError):  # there is no such change of a tensor of this kind
            continue


def attend(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sink=None):
    """(rows, heads_q, head_dim_v) and lse (heads_q, rows) of one sequence in float64, by definition."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, scores.shape[1], 1)), 2)
    lse = scores.logsumexp(2)
    weights = torch.exp(scores - lse[..., None]).masked_fill((lse == -torch.inf)[..., None], 0.0)
    return (weights[..., : v.shape[1]] @ v).transpose(0, 1), lse


def judge(function, given, changed, expected, written=()):
    """Call with the arguments, queries or what is cut first, and hold the result, or the refusal, to what this page
    says."""
    before = {name: given[name].clone() for name in written if isinstance(given[name], torch.Tensor)}
    shown = f"{function.__name__}: changed " + ", ".join(f"{name}={given[name]!r}" for name in changed)
    try:
        out, lse = function(**given)[:2]
    except (TypeError, ValueError, NotImplementedError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        assert place.filename.startswith(PACKAGE), f"{shown}: {error!r} is not fa4's own ({place})"
        names = "|".join(map(re.escape, given))
        assert re.search(rf"(?<![\w.])({names})(?!\w)", str(error)), f"{shown}: {error!r} names no argument"
        for name, x in before.items():
            if x.layout is torch.strided and not (x.is_meta or x.is_nested):
                assert torch.equal(x.nan_to_num(), given[name].nan_to_num()), f"{shown}: {name} was written"
        return False
    if next(iter(given.values())).is_meta:  # all tensors in one, which has no values
        assert out.is_meta and lse.is_meta, shown
        return False
    with torch.no_grad():
        rows, of_rows = expected(given | before)
    narrow = next(iter(given.values())).dtype in (torch.float16, torch.float32)
    allowed = dict(rtol=1e-2, atol=1e-2) if narrow else dict(rtol=1e-5, atol=1e-5)
    for got, exact in ((out, rows), (lse, of_rows)):
        assert got.shape == exact.shape, f"{shown}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
        torch.testing.assert_close(got.double(), exact, equal_nan=True, msg=lambda m: f"{shown}: {m}", **allowed)
    return True


def packed(of_sequences, bounds, q, v):
    """Results of sequences as rows of a packed tensor, of which some are none's."""
    rows = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    for (out, own), (first, stop) in zip(of_sequences, itertools.pairwise(bounds)):
        rows[first:stop], lse[:, first:stop] = out, own
    return rows, lse


# Caches ---------------------------------------------------------------------------------------------------------------


def a_cache(draw, normal):
    """A right call of `fa4.flash_attn_with_kvcache`; every feature by chance."""
    batch, heads_kv, dim, size = 2, 2, 8, 4
    width = 6 * size
    new, queries = draw.choice((0, 2)), draw.choice((1, 3))
    given = dict(
        q=normal(batch, queries, 4, dim), k_cache=normal(batch, width, heads_kv, dim), cache_seqlens=i32(5, 17),
        softmax_scale=None, causal=draw.random() < 0.5, window_size=draw.choice(((None, None), (4, 0), (-1, 2))),
        softcap=draw.choice((0.0, 3.0)), learnable_sink=draw.choice((None, normal(4))), num_splits=0,
        batch_invariant=False, rotary_interleaved=True, return_lse=True, backend="auto", max_seqlen_q=None,
        max_seqlen_k=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, block_table=None, k=None, v=None,
        rotary_cos=None, rotary_sin=None, rotary_seqlens=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        k_descale=None, v_descale=None,
    )  # fmt: skip
    kind = draw.choice(("plain", "batch_idx", "pages", "block_table", "int8", "one length"))
    if kind == "batch_idx":
        given |= dict(k_cache=normal(3, width, heads_kv, dim), cache_batch_idx=i32(2, 0))
    elif kind in ("pages", "block_table"):
        table = torch.randperm(13, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))).int()[:12]
        name = "page_table" if kind == "pages" else "block_table"
        given |= {"k_cache": normal(13, size, heads_kv, dim), name: table.view(batch, 6)}
    elif kind == "one length":
        given |= dict(cache_seqlens=draw.choice((3, None)))
        new = 0 if given["cache_seqlens"] is None else new
    given["v_cache"] = torch.randn_like(given["k_cache"])
    if kind == "int8":
        new = 0
        given |= {name: (20 * given[name]).to(torch.int8) for name in ("k_cache", "v_cache")}
        given |= dict(k_descale=torch.rand(2), v_descale=torch.rand(batch, 2))
    if draw.random() < 0.3:
        given |= dict(cache_leftpad=i32(2, 0))
    if draw.random() < 0.4:
        given |= dict(q=normal(7, 4, dim), cu_seqlens_q=i32(0, 2, 6), max_seqlen_q=draw.choice((None, 4, 9)))
    if new:
        given |= dict(k=normal(batch, new, heads_kv, dim), v=normal(batch, new, heads_kv, dim))
        if draw.random() < 0.3:
            given |= dict(k=normal(4, heads_kv, dim), v=normal(4, heads_kv, dim), cu_seqlens_k_new=i32(0, 3, 4))
        if draw.random() < 0.5:
            angle = normal(30, 3).float()
            given |= dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=draw.random() < 0.5)
            given |= dict(rotary_seqlens=draw.choice((None, i32(0, 9))))
    return given


def rotated(x, first, step, given):
    """Rows of a sequence (rows, heads, dim) by complex numbers."""
    cos, sin = (given[name].double() for name in ("rotary_cos", "rotary_sin"))
    place = first + step * torch.arange(x.shape[0])
    turn = torch.complex(cos[place], sin[place])[:, None]
    n, y = cos.shape[1], x.double().clone()
    if given["rotary_interleaved"]:
        a, b = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
    else:
        a, b = slice(0, n), slice(n, 2 * n)
    z = torch.complex(y[..., a], y[..., b]) * turn
    y[..., a], y[..., b] = z.real, z.imag
    return y


def by_rows_of_the_cache(given):
    """What a call must give, sequence by sequence."""
    g = given
    table = g["page_table"] if g["block_table"] is None else g["block_table"]
    bounds = None if g["cu_seqlens_q"] is None else g["cu_seqlens_q"].tolist()
    batch = g["q"].shape[0] if bounds is None else len(bounds) - 1
    bounds_new = None if g["cu_seqlens_k_new"] is None else g["cu_seqlens_k_new"].tolist()
    moves = g["causal"] or any(side not in (None, -1) for side in g["window_size"])
    results = []
    for b in range(batch):
        cache = []
        for name, new, descale in (("k_cache", "k", "k_descale"), ("v_cache", "v", "v_descale")):
            whole = g[name]
            if table is not None:
                entries = table[b].clamp(0, whole.shape[0] - 1).long()
                rows = whole[entries].flatten(0, 1)
            else:
                rows = whole[b if g["cache_batch_idx"] is None else int(g["cache_batch_idx"][b])]
            n = g["cache_seqlens"]
            n = rows.shape[0] if n is None else int(n[b]) if isinstance(n, torch.Tensor) else n
            rows = rows[:n].double()
            if g[descale] is not None:
                rows = rows * g[descale].double().expand(batch, rows.shape[1])[b][:, None]
            if g[new] is not None:
                fresh = g[new][b] if bounds_new is None else g[new][bounds_new[b] : bounds_new[b + 1]]
                first = n if g["rotary_seqlens"] is None else int(g["rotary_seqlens"][b])
                if new == "k" and g["rotary_cos"] is not None:
                    fresh = rotated(fresh, first, 1, g)
                rows = torch.cat((rows, fresh.double()))
            cache.append(rows if g["cache_leftpad"] is None else rows[int(g["cache_leftpad"][b]) :])
        q = g["q"][b] if bounds is None else g["q"][bounds[b] : bounds[b + 1]]
        if g["k"] is not None and g["rotary_cos"] is not None:
            q = rotated(q, first, int(moves), g)
        options = dict(scale=g["softmax_scale"], causal=g["causal"], window=g["window_size"], softcap=g["softcap"])
        results.append(attend(q, *cache, **options, sink=g["learnable_sink"]))
    if bounds is not None:
        return packed(results, bounds, g["q"], g["v_cache"])
    return tuple(torch.stack(x) for x in zip(*results))


def changed_by_chance(draw, given):
    names = draw.sample(sorted(given), draw.choice((1, 1, 2)))
    return names, given | {name: wrong(draw, given[name]) for name in names}


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return random.Random(seed), lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def test_calls_on_a_cache(seed):
    draw, normal = drawn(seed)
    right = 0
    for i in range(DRAWS):
        given = a_cache(draw, normal)
        names, given = ([], given) if i % 8 == 0 else changed_by_chance(draw, given)
        if given["return_lse"] is False:
            given["return_lse"] = True
        right += judge(fa4.flash_attn_with_kvcache, given, names, by_rows_of_the_cache, ("k_cache", "v_cache"))
    assert right >= DRAWS // 8


# flash-attn's names ---------------------------------------------------------------------------------------------------


def sequences_of(g, rows_q, rows_k, q, k, v):
    """(out, lse) of each sequence of a call by flash-attn's names."""
    slopes = g["alibi_slopes"]
    options = dict(scale=g["softmax_scale"], causal=g["causal"], window=g["window_size"], softcap=g["softcap"])
    of_each = itertools.repeat(slopes) if slopes is None or slopes.ndim == 1 else slopes
    return [attend(q[a], k[b], v[b], **options, slopes=own) for a, b, own in zip(rows_q, rows_k, of_each)]


def dense(g):
    if "q" not in g:
        q, k, v = g["qkv"].unbind(2)
    else:
        q, (k, v) = g["q"], g["kv"].unbind(2) if "kv" in g else (g["k"], g["v"])
    every = range(q.shape[0])
    if not every:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(0, q.shape[2], q.shape[1])
    return tuple(torch.stack(x) for x in zip(*sequences_of(g, every, every, q, k, v)))


def varlen(g):
    if "q" not in g:
        q, k, v = g["qkv"].unbind(1)
        of_q = of_k = g["cu_seqlens"].tolist()
    else:
        q, (k, v) = g["q"], g["kv"].unbind(1) if "kv" in g else (g["k"], g["v"])
        of_q, of_k = g["cu_seqlens_q"].tolist(), g["cu_seqlens_k"].tolist()
    rows_q, rows_k = ([slice(*x) for x in itertools.pairwise(bounds)] for bounds in (of_q, of_k))
    return packed(sequences_of(g, rows_q, rows_k, q, k, v), of_q, q, v)


def on_a_cache(g):
    """By the oracle of `fa4.flash_attn_with_kvcache`, without slopes, or by keys in their order."""
    names = dict(page_table=None, learnable_sink=None, cu_seqlens_q=None, cu_seqlens_k_new=None, rotary_seqlens=None)
    return by_rows_of_the_cache(g | names | dict(k_descale=None, v_descale=None))


def by_flash_attns_names(draw, normal):
    """(function, right arguments, oracle, the flag for lse)"""
    name = draw.choice(flash_attn.__all__)
    function = getattr(flash_attn, name)
    options = dict(
        softmax_scale=draw.choice((None, 0.3)), causal=draw.random() < 0.5, softcap=draw.choice((0.0, 3.0)),
        window_size=draw.choice(((-1, -1), (4, 0), (-1, 2))), alibi_slopes=draw.choice((None, normal(4), normal(2, 4))),
    )  # fmt: skip
    if name == "flash_attn_with_kvcache":
        given = a_cache(draw, normal)
        while (
            given["cu_seqlens_q"] is not None or given["cu_seqlens_k_new"] is not None or given["k_descale"] is not None
        ):
            given = a_cache(draw, normal)
        given |= options | dict(alibi_slopes=None, rotary_seqlens=None)
        if given["block_table"] is None:
            given["block_table"] = given["page_table"]
        names = inspect.signature(function).parameters
        given = {name: given.get(name) for name in names} | dict(num_splits=0, return_softmax_lse=True)
        return function, given, on_a_cache, "return_softmax_lse"
    flag = "return_attn_probs"
    options |= {"dropout_p": 0.0, "deterministic": draw.random() < 0.5, flag: True}
    heads = draw.choice((2, 4))
    if "varlen" in name:
        lengths = dict(cu_seqlens_q=i32(0, 3, 9), cu_seqlens_k=i32(0, 5, 11), max_seqlen_q=6, max_seqlen_k=7)
        if "qkvpacked" in name:
            return (
                function,
                dict(qkv=normal(11, 3, 4, 8), cu_seqlens=i32(0, 5, 11), max_seqlen=6) | options,
                varlen,
                flag,
            )
        own = dict(kv=normal(11, 2, heads, 8)) if "kvpacked" in name else dict(k=normal(11, heads, 8))
        if "k" in own:
            own |= dict(v=normal(11, heads, 16), block_table=None)
        return function, dict(q=normal(9, 4, 8)) | own | lengths | options, varlen, flag
    if "qkvpacked" in name:
        return function, dict(qkv=normal(2, 6, 3, 4, 8)) | options, dense, flag
    own = dict(kv=normal(2, 6, 2, heads, 8)) if "kvpacked" in name else dict(k=normal(2, 6, heads, 8))
    if "k" in own:
        own |= dict(v=normal(2, 6, heads, 16))
    return function, dict(q=normal(2, 3, 4, 8)) | own | options, dense, flag


def test_calls_by_flash_attns_names(seed):
    draw, normal = drawn(seed)
    right = 0
    for i in range(DRAWS):
        function, given, expected, flag = by_flash_attns_names(draw, normal)
        names, given = ([], given) if i % 8 == 0 else changed_by_chance(draw, given)
        if given[flag] is False:
            given[flag] = True
        written = ("k_cache", "v_cache") if "k_cache" in given else ()
        right += judge(function, given, names, expected, written)
    assert right >= DRAWS // 8


# Between processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(g):
    options = dict(scale=g["softmax_scale"], causal=g["causal"], window=g["window_size"], softcap=g["softcap"])
    if g["q"].ndim == 4:
        made = [attend(*x, **options, sink=g["learnable_sink"]) for x in zip(g["q"], g["k"], g["v"])]
        return tuple(torch.stack(x) for x in zip(*made))
    bounds = g["cu_seqlens"].tolist()
    rows = [slice(*x) for x in itertools.pairwise(bounds)]
    made = [attend(g["q"][r], g["k"][r], g["v"][r], **options, sink=g["learnable_sink"]) for r in rows]
    return packed(made, bounds, g["q"], g["v"])


def test_calls_between_processes(alone, seed):
    draw, normal = drawn(seed)
    right = 0
    for i in range(DRAWS):
        shape = (2, 6) if draw.random() < 0.5 else (10,)
        given = dict(
            q=normal(*shape, 4, 8), k=normal(*shape, 2, 8), v=normal(*shape, 2, 8), group=None,
            method=draw.choice(cp.METHODS), cu_seqlens=i32(0, 4, 10) if len(shape) == 1 else None,
            max_seqlen=draw.choice((None, 6, 10)) if len(shape) == 1 else None, softmax_scale=draw.choice((None, 0.3)),
            causal=draw.random() < 0.5, window_size=(None, None), softcap=draw.choice((0.0, 3.0)),
            learnable_sink=draw.choice((None, normal(4))), deterministic=None, return_lse=True, backend="auto",
        )  # fmt: skip
        if given["causal"] and given["method"] == "all-gather":
            given["window_size"] = draw.choice(((None, None), (3, None)))
        names, given = ([], given) if i % 8 == 0 else changed_by_chance(draw, given)
        if given["return_lse"] is False:
            given["return_lse"] = True
        right += judge(cp.context_parallel_attention, given, names, whole)
    assert right >= DRAWS // 8


@pytest.mark.parametrize("cut", [cp.shard, cp.unshard])
def test_cuts_between_processes(cut, alone, seed):
    """Of one process the part is the whole."""
    draw, normal = drawn(seed)

    def twice(**given):
        part = cut(**given)
        return part, part

    twice.__name__ = cut.__name__
    for i in range(DRAWS):
        given = dict(x=normal(2, 8, 3), dim=draw.choice((1, -2)), group=None)
        given["cu_seqlens"] = draw.choice((None, i32(0, 2, 8)))
        names, given = ([], given) if i % 8 == 0 else changed_by_chance(draw, given)
        judge(twice, given, names, lambda g: (g["x"].double(), g["x"].double()))
