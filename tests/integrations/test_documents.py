"""Documents packed into rows, told by position_ids that restart: each as if it were alone."""

import contextlib
import itertools

import pytest
import torch

import fa4
from fa4.integrations import documents as lengths_of
from fa4.integrations import transformers as ours
from tests.integrations.models import exact_attention, model_of, register, tokens_of, transformers

DOCUMENTS = ["llama", "gemma3", "qwen3", "gpt_oss"]
LENGTHS = (9, 1, 10, 3)  # of documents: one longer than the windows, and one of a single token


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def features(seed):
    tokens = tokens_of(seed, 2).flatten()[: sum(LENGTHS)]
    return [{"input_ids": x.tolist()} for x in tokens.split(LENGTHS)]


def alone(model, documents):
    """The logits of documents run one by one, and the gradients of the sum of their losses."""
    logits = []
    for document in documents:
        tokens = torch.tensor([document["input_ids"]])
        logits.append(model(input_ids=tokens, use_cache=False).logits[0])
    logits = torch.cat(logits)
    tokens = torch.tensor([token for x in documents for token in x["input_ids"]])
    loss = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
    return tokens, logits.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def assert_same(got, expected):
    """To float32, in which the models compute angles and norms whatever their dtype."""
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1.0)


def assert_as_alone(model, exact, documents, **inputs):
    tokens, logits, gradients = alone(exact, documents)
    got = model(**inputs).logits
    assert got.shape[0] == 1
    assert_same(got[0].detach(), logits)
    loss = torch.nn.functional.cross_entropy(got[0], tokens, reduction="sum")
    for ours_, exacts in zip(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), gradients):
        assert (ours_ is None) == (exacts is None)
        if ours_ is not None:
            assert_same(ours_, exacts)


def packed(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("settings", [{}, {"position_ids_start": 2}, {"return_flash_attn_kwargs": True}], ids=str)
def test_a_flattening_collator(name, use_cache, settings, seed):
    """In float64: logits and gradients of documents one by one, by eager attention's formula."""
    documents = features(seed)
    batch = transformers.DataCollatorWithFlattening(return_tensors="pt", **settings)(documents)
    batch.pop("labels")
    model, exact = (model_of(name, seed, of, torch.float64) for of in ("fa4", "exact"))
    assert_as_alone(model, exact, documents, use_cache=use_cache, **batch)


@contextlib.contextmanager
def recorded(monkeypatch):
    """Arguments of the varlen calls that the layers make."""
    calls, call = [], ours.flash_attn_varlen_func
    with monkeypatch.context() as patch:
        patch.setattr(ours, "flash_attn_varlen_func", lambda *a, **k: calls.append(k) or call(*a, **k))
        yield calls


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_longest_document_bounds_the_launch(use_cache, monkeypatch, seed):
    model = model_of("llama", seed, "fa4", torch.float64)
    with recorded(monkeypatch) as calls:
        model(input_ids=tokens_of(seed, 1), position_ids=packed((9, 1, 10))[None], use_cache=use_cache)
    assert [(x["max_seqlen_q"], x["max_seqlen_k"]) for x in calls] == [(10, 10)] * 2
    assert all(x["cu_seqlens_q"].tolist() == [0, 9, 10, 20] for x in calls)


# Of two rows: lengths of documents, 0 for a token of padding.
ROWS = {
    "no_mask": ((9, 3, 8), (1, 19)),
    "ones": ((9, 3, 8), (1, 19)),
    "padding": ((9, 3, 5, 0, 0, 0), (0, 0, 0, 0, 1, 15)),
    "padding_amidst": ((9, 0, 3, 0, 0, 5), (0, 2, 10, 0, 6)),
}


def rows_of(kind, padding_position=1):
    """attention_mask, position_ids, and which document a token belongs to, from 1; 0 is padding. All (2, 20)."""
    positions, documents = [], []
    for row in ROWS[kind]:
        positions.append(torch.cat([torch.arange(n) if n else torch.tensor([padding_position]) for n in row]))
        documents.append(torch.cat([torch.full((n or 1,), i if n else 0) for i, n in enumerate(row, 1)]))
    positions, documents = torch.stack(positions), torch.stack(documents)
    return None if kind == "no_mask" else (documents > 0).long(), positions, documents


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name, kind", [("gpt_oss", kind) for kind in ROWS] + [("llama", "padding")])
def test_every_row_of_a_batch_has_documents_of_its_own(name, kind, use_cache, seed):
    """With padding too: logits, and gradients of the sum of all losses."""
    tokens, (mask, positions, which) = tokens_of(seed, 2), rows_of(kind)
    model, exact = (model_of(name, seed, of, torch.float64) for of in ("fa4", "exact"))
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=use_cache).logits
    by_row = [(row, which[row] == n) for row in range(2) for n in which[row].unique() if n]
    documents = [{"input_ids": tokens[row][part].tolist()} for row, part in by_row]
    labels, expected, gradients = alone(exact, documents)
    got = torch.cat([logits[row][part] for row, part in by_row])
    assert_same(got.detach(), expected)
    loss = torch.nn.functional.cross_entropy(got, labels, reduction="sum")
    for ours_, exacts in zip(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), gradients):
        if exacts is not None:
            assert_same(ours_, exacts)


def pairs(which, is_causal, sliding_window):
    """(2, 1, 20, 20): the pairs that are seen, -1e30 for others."""
    i, j = torch.arange(20)[:, None], torch.arange(20)
    seen = ((j <= i) | torch.tensor(not is_causal)) & (which[:, :, None] == which[:, None]) & (which[:, None] > 0)
    if sliding_window is not None:
        seen &= (i - j).abs() < sliding_window
    return torch.zeros(2, 20, 20, dtype=torch.float64).masked_fill(~seen, -1e30)[:, None]


@pytest.mark.parametrize("kind", list(ROWS)[1:])
@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padding_position", [0, 1, 7])
def test_padding_and_documents_that_no_model_has_prepared(padding_position, is_causal, sliding_window, kind, seed):
    """(batch, keys), straight into the attention function. Positions of padding say nothing."""
    mask, positions, which = rows_of(kind, padding_position)
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, heads, 20, 8, generator=generator, dtype=torch.float64) for heads in (4, 2))
    options = dict(is_causal=is_causal, sliding_window=sliding_window, position_ids=positions)
    got, _ = ours.attention(torch.nn.Module(), q, k, k, mask, **options)
    exact, _ = exact_attention(None, q, k, k, pairs(which, is_causal, sliding_window))
    assert (got - exact)[mask.bool()].abs().max() < 1e-6


def test_images_in_documents(seed):
    """A block mask of another kind, behind whose making transformers has not seen the documents."""
    mask, positions, which = rows_of("ones")
    config = model_of("llama", seed, "fa4").config
    blocks = torch.full((2, 20), -1)
    blocks[0, 3:6], blocks[1, 10:12] = 0, 1
    made = transformers.masking_utils.create_causal_mask(
        config, torch.zeros(2, 20, 8), mask, None, position_ids=positions, block_sequence_ids=blocks
    )
    assert type(made).__name__ == "BlockMask"
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, heads, 20, 8, generator=generator, dtype=torch.float64) for heads in (4, 2))
    got, _ = ours.attention(torch.nn.Module(), q, k, k, made, position_ids=positions)
    image = (blocks[:, :, None] == blocks[:, None]) & (blocks[:, None] >= 0)
    added = pairs(which, True, None).masked_fill(image[:, None], 0.0)
    assert (got - exact_attention(None, q, k, k, added)[0]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "positions, lengths",
    [
        ([0, 1, 2, 3, 4, 5], None),
        ([7, 8, 9, 10, 11, 12], None),  # behind a cache, or a later part of a document
        ([0, 1, 5, 5, 5, 6], None),  # an image that has one position, tokens that were left out
        ([0, 1, 2, 0, 1, 0], (3, 2, 1)),
        ([0, 0, 0, 1, 2, 3], (1, 1, 4)),
        ([2, 3, 2, 3, 4, 2], (2, 3, 1)),
        ([57, 58, 0, 1, 2, 3], (2, 4)),  # the rest of a document first
        ([0, 1, 9, 7, 8, 0], (3, 2, 1)),
    ],
)
@pytest.mark.parametrize("can_look", [True, False])
def test_where_documents_begin(positions, lengths, can_look, monkeypatch):
    if not can_look:
        monkeypatch.setattr(ours, "_can_read", lambda x: False)
    found = ours._in_documents(torch.tensor([positions]), None, 1, 6, 6, True, torch.device("cpu"))
    if found is None:
        assert can_look and lengths is None
        return
    found = found if can_look else lengths_of.unpack(found, 6, 6)
    bounds = found.cu_seqlens_q.tolist()
    assert tuple(n for n in (b - a for a, b in itertools.pairwise(bounds)) if n) == (lengths or (6,))
    assert found.cu_seqlens_k.tolist() == bounds and found.max_seqlen_q == (max(lengths) if can_look else 6)


def test_positions_are_looked_at_once_and_again_when_they_change(monkeypatch):
    made = []
    monkeypatch.setattr(lengths_of, "cut", lambda *a: made.append(a) or len(made))
    positions, tables = packed((3, 3))[None], [torch.zeros(1, 1, 4, 3, dtype=torch.int32) for _ in range(2)]

    def look(positions, table=None, batch=1):
        return ours._in_documents(positions, table, batch, 6, 6, True, torch.device("cpu"))

    assert [look(positions) for _ in range(3)] == [1, 1, 1]
    assert [look(positions, tables[i % 2]) for i in range(5)] == [2, 3, 2, 3, 2]  # kinds of layers take turns
    positions[0, 1] = 0
    assert look(positions) == look(positions) == 4
    tables[0] += 1
    assert look(positions, tables[0]) == 5
    assert look(positions, batch=2) == 6
    assert look(positions.clone()) == 7
    with torch.inference_mode():
        positions = packed((3, 3))[None]
        assert [look(positions) for _ in range(2)] == [8, 9]


@pytest.mark.parametrize("gives_positions", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_decoding_behind_a_cache_is_one_document(name, cache, gives_positions, seed):
    """One by one and several at a time: positions of new tokens, where the keys are more than the queries."""
    tokens = tokens_of(seed, 1)
    model = model_of(name, seed, "fa4", torch.float64)
    whole = model(input_ids=tokens).logits.detach()
    cache, got = cache_of(cache, model), []
    for part, positions in zip(tokens.split((7, 1, 5, 7), dim=1), torch.arange(20)[None].split((7, 1, 5, 7), dim=1)):
        inputs = {"position_ids": positions} if gives_positions else {}
        got.append(model(input_ids=part, past_key_values=cache, **inputs).logits.detach())
    assert_same(torch.cat(got, 1), whole)


def cache_of(kind, model, length=24):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=length)


REFUSED = r"position_ids restart in row 0 at token 4, on the keys of a cache .*, expected rising positions"


@pytest.mark.parametrize("mask", [None, "ones"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_documents_on_other_keys_than_their_own_are_refused(name, cache, mask, seed):
    """Behind a filled cache, and on a static one that is longer than the row."""
    tokens, model = tokens_of(seed, 1), model_of(name, seed, "fa4", torch.float64)
    past = cache_of(cache, model)
    if cache == "dynamic":
        model(input_ids=tokens[:, :9], past_key_values=past)
    given = None if mask is None else torch.ones(1, past.get_seq_length() + 11, dtype=torch.long)
    with pytest.raises(ValueError, match=REFUSED):
        positions = packed((4, 7))[None] + past.get_seq_length()
        model(input_ids=tokens[:, 9:], position_ids=positions, past_key_values=past, attention_mask=given)


def test_documents_on_a_static_cache_of_their_length(seed):
    tokens, documents = tokens_of(seed, 1), (9, 1, 10)
    model, exact = (model_of("llama", seed, of, torch.float64) for of in ("fa4", "exact"))
    got = model(input_ids=tokens, position_ids=packed(documents)[None], past_key_values=cache_of("static", model, 20))
    expected = alone(exact, [{"input_ids": x.tolist()} for x in tokens[0].split(documents)])[1]
    assert_same(got.logits[0].detach(), expected)


# Compiled code --------------------------------------------------------------------------------------------------------


def inputs_of(kind):
    mask, positions, _ = rows_of(kind)
    return dict(attention_mask=mask, position_ids=positions)


INPUTS = {
    "no_mask": dict,
    "ones": lambda: dict(attention_mask=torch.ones(2, 20, dtype=torch.long)),
    "padding": lambda: dict(attention_mask=(torch.arange(20) >= torch.tensor([[0], [6]])).long()),
    "plain_positions": lambda: dict(position_ids=torch.arange(20)[None]),
    "packing": lambda: inputs_of("no_mask"),
    "packing_with_ones": lambda: inputs_of("ones"),
    "packing_and_padding": lambda: inputs_of("padding"),
    "lengths": lambda: dict(
        position_ids=inputs_of("no_mask")["position_ids"],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 9, 12, 20, 21, 40], dtype=torch.int32)),
        **dict.fromkeys(("max_length_q", "max_length_k"), 19),
    ),
}
# Sequences of a call, None for a dense one, and the longest: no more than documents, and of padded rows the padding.
SEQUENCES = {
    "no_mask": (None, 20), "ones": (4, 20), "padding": (4, 20), "plain_positions": (2, 20), "packing": (5, 19),
    "packing_with_ones": (7, 19), "packing_and_padding": (7, 15), "lengths": (5, 19),
}  # fmt: skip
COMPILED = [
    *(("llama", kind, False) for kind in INPUTS),
    *(("llama", kind, True) for kind in ("no_mask", "packing")),
    ("gemma3", "packing", False),
    ("gpt_oss", "packing_with_ones", True),
]


@pytest.fixture
def called(monkeypatch):
    """(sequences, longest query, longest key) of each forward that an operator of compiled code runs."""
    calls, route = [], fa4.torch_ops.ops.route

    def recorded(inputs, *others):
        calls.append((inputs.batch if inputs.varlen else None, *inputs.max_seqlens))
        return route(inputs, *others)

    monkeypatch.setattr(fa4.torch_ops.ops, "route", recorded)
    return calls


@pytest.fixture
def waits(monkeypatch):
    """Grows each time that the host waits for values of position_ids."""
    calls, cut = [], lengths_of.cut
    monkeypatch.setattr(lengths_of, "cut", lambda *a, **k: calls.append(a) or cut(*a, **k))
    return calls


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name, kind, use_cache", COMPILED)
def test_a_model_is_compiled_whole(name, kind, use_cache, called, waits, seed):
    """Forward and backward in one graph: logits and gradients of the model that is not compiled, by a call of as many
    sequences as there are documents."""
    torch.compiler.reset()
    tokens, inputs = tokens_of(seed, 2), INPUTS[kind]() | {"use_cache": use_cache}
    kept = inputs.get("attention_mask")
    kept = torch.ones_like(tokens).bool() if kept is None else kept.bool()
    layers = 1 if name == "llama" else 2  # of two kinds
    model = model_of(name, seed, "fa4", torch.float64, layers)
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # "eager" reads on the host which experts are chosen

    def outcome(run):
        model.zero_grad()
        logits = run(input_ids=tokens, **inputs).logits
        torch.nn.functional.cross_entropy(logits[kept], tokens[kept]).backward()
        return [logits.detach()[kept], *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = [x.clone() for x in outcome(model)]
    called.clear()
    waits.clear()
    got = outcome(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert len(got) == len(expected) > 5
    for x, y in zip(got, expected):
        assert_same(x, y)
    sequences, longest = SEQUENCES[kind]
    assert called == [(sequences, longest, longest)] * 2 * layers  # forward and backward
    assert bool(waits) == (kind not in ("no_mask", "ones", "padding"))


def _written_to():
    positions = torch.arange(20)
    positions[9:] -= 9
    return positions.unsqueeze(0)


MADE = {
    "arange": (lambda: torch.arange(20).unsqueeze(0), True),
    "behind": (lambda: (torch.arange(20) + 7).unsqueeze(0).expand(2, -1), True),
    "behind_a_static_cache": (lambda: (torch.arange(20) + torch.tensor(7)).unsqueeze(0).to("cpu"), True),
    "repeated": (lambda: torch.arange(10).unsqueeze(0).expand(2, 10).reshape(1, 20), False),
    "modulo": (lambda: (torch.arange(20) % 9).unsqueeze(0), False),
    "falling": (lambda: torch.arange(20, 0, -1).unsqueeze(0), False),
    "sum": (lambda: (torch.arange(20) - torch.tensor([0] * 9 + [9] * 11)).unsqueeze(0), False),
    "column": (lambda: torch.arange(20).unsqueeze(1).expand(20, 20), False),
    "written_to": (_written_to, False),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_positions_that_compiled_code_counts_up(made, is_inference):
    """Those of a model that is given none, in the function that asks and in its caller."""
    make, expected = MADE[made]
    torch.compiler.reset()
    torch.compiler.assume_constant_result(lengths_of.found_to_count_up)

    def inner():
        return ours._positions_count_up()

    def here(x, position_ids=None):
        position_ids = make() if position_ids is None else position_ids
        return x + position_ids.sum(), ours._positions_count_up(), inner()

    with torch.inference_mode(is_inference):
        compiled = torch.compile(here, fullgraph=True, backend="eager")
        for _ in range(2):
            assert compiled(torch.zeros(()))[1:] == (expected, expected)
            assert compiled(torch.zeros(()), torch.arange(20)[None])[1:] == (False, False)
    assert not ours._positions_count_up()


@pytest.mark.parametrize("mask", [None, torch.ones(1, 20, dtype=torch.long)], ids=["no_mask", "ones"])
def test_compiled_code_refuses_documents_behind_a_cache(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, heads, n, 8, generator=generator, dtype=torch.float64) for heads, n in ((4, 11), (2, 20)))

    def layer(q, k, position_ids):
        return ours.attention(None, q, k, k, mask, is_causal=True, position_ids=position_ids)[0]

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, k, torch.arange(9, 20)[None]), ours.attention(None, q, k, k, None, is_causal=True)[0])
    with pytest.raises(ValueError, match=REFUSED):
        compiled(q, k, packed((4, 7))[None])


@pytest.mark.parametrize(
    "mask", [None, torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])], ids=["no_mask", "mask"]
)
def test_the_operators_are_whole(mask):
    table = None if mask is None else lengths_of.table_of_runs(mask.bool(), 6, 0, True)
    positions = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 1, 2, 3, 0, 1]])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fa4.documents.default, (positions, table, 2, True), test_utils=checks)
    if table is not None:
        torch.library.opcheck(torch.ops.fa4.one_document.default, (torch.arange(6)[None], table, 6), test_utils=checks)
