"""Models of transformers, with random weights, on fa4 beside their own eager attention."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import fa4
from fa4.oracle import cases
from fa4.oracle.cases import DRAWS, assert_right, judge_by_draws
from tests.integrations.models import (
    BATCH,
    LENGTH,
    MODELS,
    SIZES,
    exact_attention,
    model_of,
    register,
    tokens_of,
    transformers,
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def run(model: Any, tokens: Tensor, kept: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of positions that are kept, and all gradients of their mean loss, each over its own largest value."""
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    torch.nn.functional.cross_entropy(logits[kept], tokens[kept]).backward()
    return logits[kept].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_as_eager(
    name: str, seed: int, tokens: Tensor, kept: Tensor, dtype: torch.dtype = torch.float32, **inputs: Any
) -> None:
    """By the oracle's rule: at most twice the error of eager attention in `dtype`, against its formula in float64."""

    def outcome(implementation: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = model_of(name, seed, implementation, dtype).to(tokens.device)
        return run(model, tokens, kept, **inputs)

    exact_of = functools.cache(lambda seed: outcome("exact", torch.float64, seed))

    def results(of: tuple[Tensor, dict[str, Tensor]], seed: int) -> tuple[Tensor, Tensor]:
        """Logits, and gradients over what is the largest in each by the formula."""
        assert of[1].keys() == exact_of(seed)[1].keys()
        peaks = {n: g.abs().max().clamp(min=1e-30) for n, g in exact_of(seed)[1].items()}
        return of[0], torch.cat([(g / peaks[n].to(g.dtype)).flatten() for n, g in of[1].items()])

    def references(seed: int, precise: bool) -> tuple[Tensor, Tensor]:
        return results(exact_of(seed) if precise else outcome("eager", dtype, seed), seed)

    got = dict(zip(("logits", "gradients"), results(outcome("fa4", dtype, seed), seed)))
    assert_right(judge_by_draws(got, references, seed, range(seed + 1, seed + DRAWS)), name)


def padded() -> Tensor:
    """(batch, length) bool: one whole row, one padded on the left, one on the right."""
    positions = torch.arange(LENGTH)
    return torch.stack((positions >= 0, positions >= 6, positions < 11))


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name, seed):
    there = padded()
    positions = (there.cumsum(1) - 1).clamp(min=0)
    assert_as_eager(name, seed, tokens_of(seed), there, attention_mask=there.long(), position_ids=positions)


def test_whole_sequences_without_a_mask(seed):
    tokens = tokens_of(seed)
    assert_as_eager("llama", seed, tokens, torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_after_padded_prompts(name, cache, seed):
    """Greedily, in float64: token for token what eager attention generates, past the windows of sliding layers."""
    there = torch.stack((torch.arange(9) >= 0, torch.arange(9) >= 5)).long()
    prompt = tokens_of(seed, 2)[:, :9]

    def generated(implementation: str) -> Tensor:
        model = model_of(name, seed, implementation, torch.float64).eval()
        settings = dict(
            max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation=cache, disable_compile=True
        )
        return model.generate(prompt, attention_mask=there, **settings)

    assert torch.equal(generated("fa4"), generated("exact"))


def test_holes_in_a_mask_and_masks_of_callers(seed):
    """Padding amidst a row, and masks for every pair, bool and added: none is a run of keys, and all are served."""
    tokens = tokens_of(seed)
    holes = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.7
    holes[:, 0] = True
    assert_as_eager("gemma2", seed, tokens, holes, attention_mask=holes.long())
    pairs = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & holes[:, None, None, :]
    added = torch.zeros(pairs.shape, dtype=torch.float64).masked_fill(~pairs, -1e30)
    exact = run(model_of("llama", seed, "exact", torch.float64), tokens, holes, attention_mask=added)
    for given in (pairs, added):
        got = run(model_of("llama", seed, "fa4", torch.float64), tokens, holes, attention_mask=given)
        assert (got[0] - exact[0]).abs().max() < 1e-12 * exact[0].abs().max()


def test_other_mask_functions_become_block_masks(seed):
    """Blocks that see themselves whole, as images do in some models: what lengths cannot say."""
    from transformers.masking_utils import create_causal_mask

    config = model_of("llama", seed, "fa4").config
    embeddings = torch.zeros(2, LENGTH, 8)
    blocks = torch.full((2, LENGTH), -1)
    blocks[0, 3:9], blocks[1, 10:12] = 0, 1
    arguments = dict(inputs_embeds=embeddings, attention_mask=None, past_key_values=None, block_sequence_ids=blocks)
    made = create_causal_mask(config, **arguments)
    assert type(made).__name__ == "BlockMask"
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, heads, LENGTH, 8, generator=generator, dtype=torch.float64) for heads in (4, 2))
    got, _ = fa4.integrations.transformers.attention(None, q, k, k, made)
    config._attn_implementation = "exact"
    exact, _ = exact_attention(None, q, k, k, create_causal_mask(config, **arguments))
    assert (got - exact).abs().max() < 1e-6


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_padding_mask_that_no_model_has_prepared(is_causal, sliding_window, seed):
    """(batch, keys), straight into the attention function, with runs of keys and with holes."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(BATCH, heads, LENGTH, 8, generator=generator, dtype=torch.float64) for heads in (4, 2))
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (j <= i) | torch.tensor(not is_causal)
    if sliding_window is not None:
        seen &= (i - j).abs() < sliding_window
    for there in (padded(), padded() & (j % 5 != 2)):
        options = dict(is_causal=is_causal, sliding_window=sliding_window)
        got, _ = fa4.integrations.transformers.attention(torch.nn.Module(), q, k, k, there, **options)
        added = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~(seen & there[:, None, None, :]), -1e30)
        exact, _ = exact_attention(None, q, k, k, added.double())
        assert (got - exact)[there].abs().max() < 1e-6


def test_lengths_of_a_collator(seed):
    """cu_seq_lens as DataCollatorWithFlattening gives them, without a mask."""
    problem = cases.make(cases.Case("packed", lengths=((7, 7), (12, 12)), heads_q=4, causal=True), seed)
    i = problem.inputs
    q, k, v = (x[None].transpose(1, 2) for x in i[:3])
    lengths = dict(cu_seq_lens_q=i.cu_seqlens_q, cu_seq_lens_k=i.cu_seqlens_k, max_length_q=12, max_length_k=12)
    out, _ = fa4.integrations.transformers.attention(torch.nn.Module(), q, k, v, None, **lengths)
    assert torch.equal(out[0], problem.call()[0])


def test_attention_dropout_is_for_training_alone():
    """In training logits differ from call to call unless the seed is the same; gradients are those of that seed."""
    model = MODELS["llama"]
    extra = SIZES | model.extra | dict(attention_dropout=0.5, attn_implementation="fa4")
    llama = transformers.LlamaForCausalLM(getattr(transformers, model.config)(**extra))
    tokens = torch.arange(LENGTH)[None]

    def logits(seed):
        torch.manual_seed(seed)
        return llama(tokens).logits

    assert torch.equal(llama.train() and logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    logits(1).square().sum().backward()
    assert torch.equal(llama.eval() and logits(1), logits(2))


def test_what_fa4_lacks_is_refused():
    x = torch.zeros(1, 1, 4, 8)
    attention = fa4.integrations.transformers.attention
    for name in ("position_bias", "cache"):
        with pytest.raises(NotImplementedError, match=name):
            attention(torch.nn.Module(), x, x, x, None, **{name: x})


def test_without_transformers_the_import_error_says_what_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers, from 5\.4"):
        fa4.register_transformers()


def test_training_takes_the_same_course_as_with_eager_attention(seed):
    """Five steps of a hooked Llama with padding: the same losses."""
    there, tokens = padded(), tokens_of(seed)
    courses = []
    for implementation in ("exact", "fa4"):
        model = model_of("llama", seed, implementation, torch.float64)
        losses = []
        for _ in range(5):
            model.zero_grad()
            logits = model(input_ids=tokens, attention_mask=there.long(), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[there], tokens[there])
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
            losses.append(loss.item())
        courses.append(losses)
    assert courses[0][-1] != courses[0][0]  # the steps do something
    assert courses[1] == pytest.approx(courses[0], rel=1e-9)
