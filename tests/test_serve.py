"""The server of `examples/serve.py`: the text of a request is that of the model without a cache, whatever else runs."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from fa4.cli.demo import ModelConfig, Transformer

PATH = Path(__file__).parents[1] / "examples" / "serve.py"
CONFIG = ModelConfig(layers=2, heads_q=4, heads_kv=2, head_dim=16)


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(seed):
    torch.manual_seed(seed)
    model = Transformer(CONFIG)
    torch.nn.init.normal_(model.embed.weight, std=0.5)  # else one byte is always the likeliest
    return model


def run(server):
    """Step until nothing is left; return how many requests ran in each step."""
    counts = []
    while server.running or server.waiting:
        server.step()
        counts.append(len(server.running))
        assert len(counts) < 1000
    return counts


@torch.no_grad()
def assert_greedy(model, request, tolerance=1e-4):
    """Each new token is the likeliest one after those before it, up to rounding."""
    device = model.embed.weight.device
    logits = model(torch.tensor(request.tokens, device=device)[None, :-1])[0, request.prompt - 1 :].cpu()
    chosen = logits.gather(1, torch.tensor(request.tokens[request.prompt :])[:, None])[:, 0]
    assert len(request.tokens) == request.prompt + request.new
    assert (logits.amax(1) - chosen).max() < tolerance * logits.abs().max()


def prompts(seed, lengths, front=0):
    draw = torch.Generator().manual_seed(seed + 1)
    shared = torch.randint(256, (front,), generator=draw).tolist()
    return [bytes(shared + torch.randint(256, (n,), generator=draw).tolist()) for n in lengths]


def test_requests_of_other_lengths_share_batches(serve, model, seed):
    server = serve.Server(model, CONFIG, pages=40, size=8, requests=3, rows=20, longest=100)
    requests = [server.submit(p, new) for p, new in zip(prompts(seed, (37, 1, 50, 8, 16)), (5, 30, 2, 9, 1))]
    counts = run(server)
    assert max(counts) == 3 and len(set(counts)) > 1
    for request in requests:
        assert_greedy(model, request)
    assert len(server.pages.unused) + len(server.pages.idle) == 39 and not any(server.pages.users)


def test_a_prefix_is_computed_once(serve, model, seed):
    first, second, other = prompts(seed, (5, 9, 3), front=32)
    other = bytes([other[0] ^ 1]) + other[1:]
    server = serve.Server(model, CONFIG, pages=40, size=8)
    requests = [server.submit(first, 4)]
    server.step()
    requests += [server.submit(prompt, 4) for prompt in (second, first, other)]
    server.step()
    assert [r.shared for r in requests] == [0, 32, 32, 0]  # the whole pages of what they have in common
    assert requests[1].pages[:4] == requests[0].pages[:4] and requests[1].pages[4] != requests[0].pages[4]
    run(server)
    late = server.submit(second, 3)  # the requests that computed the prefix have ended
    run(server)
    assert late.shared == 40
    for request in (*requests, late):
        assert_greedy(model, request)


def test_requests_wait_for_pages_and_old_prefixes_make_room(serve, model, seed):
    server = serve.Server(model, CONFIG, pages=8, size=8, longest=56)
    requests = [server.submit(p, 8) for p in prompts(seed, (24, 24, 40, 17))]
    server.step()
    assert len(server.running) == 1 and len(server.waiting) == 3  # two need 8 pages, and there are 7
    run(server)
    for request in requests:
        assert_greedy(model, request)
    assert len(server.pages.unused) + len(server.pages.idle) == 7
    assert set(server.pages.of_prefix.values()) == set(server.pages.prefix_of) == set(server.pages.idle)


def test_a_prompt_in_parts_does_not_hold_up_tokens(serve, model, seed):
    """While a long prompt is computed 10 rows at a time, another request gets a token in every step."""
    server = serve.Server(model, CONFIG, pages=40, size=8, rows=10, longest=120)
    short, long = (server.submit(p, new) for p, new in zip(prompts(seed, (4, 60)), (12, 2)))
    for step in range(6):
        server.step()
        assert len(short.tokens) == short.prompt + step + 1
    assert 0 < long.used < long.prompt
    run(server)
    assert_greedy(model, short)
    assert_greedy(model, long)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_give_the_text_on_a_gpu(serve, model, seed):
    """Replays, with fewer requests than the graph has rows, and calls without a graph. Attention has 16 bits here."""
    config, model = dataclasses.replace(CONFIG, dtype=torch.bfloat16), model.to("cuda")
    for replays in (True, False):
        server = serve.Server(model, config, pages=40, size=16, requests=4, rows=48, longest=160)
        server.replays = replays
        requests = [server.submit(p, new) for p, new in zip(prompts(seed, (37, 1, 50, 8, 16)), (5, 60, 20, 9, 1))]
        run(server)
        assert (server.graph is not None) == replays
        for request in requests:
            assert_greedy(model, request, 0.03)


def test_requests_that_do_not_fit_are_refused(serve, model):
    server = serve.Server(model, CONFIG, pages=4, size=8, longest=100)
    for prompt, new in ((b"", 1), (b"x", 0), (b"x" * 20, 5)):
        with pytest.raises(ValueError, match="expected at least 1 each, and 24 at most"):
            server.submit(prompt, new)
