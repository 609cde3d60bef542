"""Training steps of bench.train on a CPU: models, turns, rows, energy."""

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from bench import energy, models, train


def invoke(*arguments, code=0):
    result = CliRunner().invoke(train.main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_training_takes_turns_and_all_providers_learn_the_same(tmp_path):
    shape = train.Shape(2, 4, 2, 16, batch=2, seqlen=40, dtype="float32", vocabulary=50)
    done = train.train(shape, ["fa4", "sdpa"], steps=2, device=torch.device("cpu"))
    assert done["fa4"].loss == pytest.approx(done["sdpa"].loss, rel=1e-4)
    assert all(of.timing.repeats == 2 and of.timing.q25_ms > 0 for of in done.values())
    options = "--layers 1 --heads 2 1 --head-dim 16 --batch 1 --seqlen 20 --steps 2 --dtype float32 --device cpu"
    file = tmp_path / "rows.jsonl"
    text = invoke("--providers", "fa4,cudnn", *options.split(), "--vocabulary", 20, "--output", file)
    assert "cudnn is skipped: needs a CUDA device" in text and "tokens/s" in text
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["suite"], row["provider"], row["seqlen"], row["repeats"]) == ("train", "fa4", 20, 2)
    assert row["tokens_per_second"] == pytest.approx(20_000 / row["median_ms"])


@pytest.mark.parametrize("kind", models.MODELS)
def test_models_have_the_attention_of_their_pattern(kind, monkeypatch):
    """Against a formula over all pairs, which takes another provider's place."""

    def formula(layer, shape):
        def attend(q, k, v, sink=None):
            k, v = (x.repeat_interleave(shape.heads_q // shape.heads_kv, 2) for x in (k, v))
            s = torch.einsum("bihd,bjhd->bhij", q, k) * shape.head_dim**-0.5
            s = s if not layer.softcap else layer.softcap * torch.tanh(s / layer.softcap)
            i, j = torch.arange(shape.seqlen)[:, None], torch.arange(shape.seqlen)
            s = s.masked_fill((j > i) | (i - j > (shape.seqlen if layer.window is None else layer.window)), -torch.inf)
            if sink is not None:
                s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
            return torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., : shape.seqlen], v)

        return attend

    monkeypatch.setitem(models._KINDS, "sdpa", formula)
    of = models.MODELS[kind]
    pattern = tuple(layer if layer.window is None else dataclasses.replace(layer, window=5) for layer in of.pattern)
    small = dict(heads_q=4, heads_kv=2, head_dim=16, seqlen=40, dtype="float32", vocabulary=50)
    shape = models.changed(of, **small, pattern=pattern)
    done = train.train(shape, ["fa4", "sdpa"], steps=3, device=torch.device("cpu"))
    assert done["fa4"].loss == pytest.approx(done["sdpa"].loss, rel=1e-5)
    assert done["fa4"].tokens_per_joule(shape) is None
    reasons = [train._not_offered("cudnn", of), train._not_offered("fa4", of)]
    assert reasons == ["" if kind == "gpt" else "has no softcap or sink", ""]


def test_tokens_a_joule(monkeypatch):
    """A GPU that takes 40 J a call of the counter."""
    calls = iter(range(100))
    monkeypatch.setattr(energy, "counter", lambda device: lambda: 40.0 * next(calls))
    monkeypatch.setattr(train, "_steps_for", lambda run, tokens, seconds, device: 8)
    shape = train.Shape(1, 2, 1, 16, batch=2, seqlen=20, dtype="float32", vocabulary=50)
    done = train.train(shape, ["fa4", "sdpa"], steps=2, device=torch.device("cpu"), seconds=1.0)
    assert [of.turns for of in done.values()] == [[(8, 40.0)] * 2] * 2
    assert done["fa4"].tokens_per_joule(shape) == 2 * 20 * 8 / 40


def test_energy_needs_a_counter():
    assert "needs a GPU, and the package nvidia-ml-py" in invoke("--device", "cpu", "--energy-seconds", 1, code=2)
