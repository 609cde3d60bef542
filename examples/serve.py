"""Serve text: continuous batching on a cache of pages, with shared prefixes.

    python examples/serve.py    # trains a small model on the text of fa4's demo, then answers prompts

Each step makes one batch: a token of every request that generates, and parts of new prompts. In each layer one call of
`fa4.flash_attn_with_kvcache` rotates and appends the new rows and attends. Steps with one token a request replay a CUDA
graph on a GPU.
"""

import sys
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from itertools import accumulate

import torch

import fa4
from fa4.cli.demo import ModelConfig, TrainConfig, train


class Pages:
    """Pages of the cache. Pages full of a prompt's tokens are found again by all tokens up to their end, also after the
    request has ended, until their memory is needed. Page 0 takes the rows of padding."""

    def __init__(self, count, size):
        self.size, self.unused, self.users = size, deque(range(1, count)), [0] * count
        self.of_prefix, self.prefix_of = {}, {}
        self.idle = OrderedDict()  # pages without users that hold a prefix, least recently used first

    def take(self):
        if not self.unused:
            page, _ = self.idle.popitem(last=False)
            del self.of_prefix[self.prefix_of.pop(page)]
            self.unused.append(page)
        self.users[self.unused[0]] = 1
        return self.unused.popleft()

    def share(self, tokens):
        """Return the pages that hold the first of these tokens; at least the last token is left to compute."""
        found = []
        for end in range(self.size, len(tokens), self.size):
            page = self.of_prefix.get(tuple(tokens[:end]))
            if page is None:
                break
            self.users[page] += 1
            self.idle.pop(page, None)
            found.append(page)
        return found

    def publish(self, tokens, pages):
        for page, end in zip(pages, range(self.size, len(tokens) + 1, self.size)):
            if page not in self.prefix_of and self.of_prefix.setdefault(tuple(tokens[:end]), page) == page:
                self.prefix_of[page] = tuple(tokens[:end])

    def release(self, pages):
        for page in reversed(pages):  # so that the end of a prefix is given up before its beginning
            self.users[page] -= 1
            if not self.users[page]:
                self.idle.update({page: None}) if page in self.prefix_of else self.unused.append(page)


@dataclass(eq=False)
class Request:
    """tokens: of the prompt, then generated. used: tokens whose keys and values are in the cache."""

    tokens: list[int]
    prompt: int
    new: int
    pages: list[int] = field(default_factory=list)
    used: int = 0
    shared: int = 0  # tokens found in the cache


# Tokens starts[b] to starts[b + 1] come after `used` ones of sequence b: at most `longest`, and `keys` in all.
Batch = namedtuple("Batch", "tokens starts used table longest keys")


class Fa4Attention:
    """Cache of all layers, and attention on it."""

    def __init__(self, config, pages, size, positions, device):
        shape = 2, config.layers, pages, size, config.heads_kv, config.head_dim
        self.k, self.v = torch.zeros(shape, dtype=config.dtype, device=device)
        half = config.head_dim // 2
        angle = torch.arange(positions, device=device)[:, None] * 10_000 ** (-torch.arange(half, device=device) / half)
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self, layer, q, k, v, batch):
        return fa4.flash_attn_with_kvcache(
            q, self.k[layer], self.v[layer], k, v, rotary_cos=self.cos, rotary_sin=self.sin, rotary_interleaved=False,
            page_table=batch.table, cache_seqlens=batch.used, cu_seqlens_q=batch.starts, cu_seqlens_k_new=batch.starts,
            max_seqlen_q=batch.longest, max_seqlen_k=batch.keys, causal=True,
        )  # fmt: skip


class Server:
    """Batches of at most `requests` requests and `rows` new tokens."""

    def __init__(self, model, config, *, pages=256, size=16, requests=8, rows=64, longest=512, attention=Fa4Attention):
        self.model, self.device = model, model.embed.weight.device
        self.pages, self.requests, self.rows = Pages(pages, size), requests, rows
        self.longest = min(longest, (pages - 1) * size)
        self.dtype, self.attend = config.dtype, attention(config, pages, size, longest, self.device)
        self.waiting, self.running = deque(), []
        self.replays, self.graph = self.device.type == "cuda", None

    def submit(self, prompt, new):
        """Queue a request for `new` tokens after the prompt, of type bytes."""
        if not prompt or new < 1 or len(prompt) + new > self.longest:
            raise ValueError(f"{len(prompt)} and {new} tokens, expected at least 1 each, and {self.longest} at most")
        self.waiting.append(Request(list(prompt), len(prompt), new))
        return self.waiting[-1]

    def admit(self):
        """Start requests in order, while all pages that they may need are there."""
        while self.waiting and len(self.running) < self.requests:
            request = self.waiting[0]
            pages = self.pages.share(request.tokens)
            missing = -(-(request.prompt + request.new) // self.pages.size) - len(pages)
            if missing > len(self.pages.unused) + len(self.pages.idle):
                self.pages.release(pages)
                return
            request.pages = pages + [self.pages.take() for _ in range(missing)]
            request.used = request.shared = len(pages) * self.pages.size
            self.running.append(self.waiting.popleft())

    @torch.no_grad()
    def step(self):
        """Compute one batch; return the requests that it ends."""
        self.admit()
        left, parts = self.rows, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.used):  # generating requests first
            count = min(len(request.tokens) - request.used, left)
            parts, left = parts + [(request, count)] * (count > 0), left - count
        for (request, count), token in zip(parts, self.next_tokens(parts)):
            request.used += count
            if request.used <= request.prompt:
                self.pages.publish(request.tokens[: request.used], request.pages)
            if request.used == len(request.tokens):  # else the rest of the prompt is still to come
                request.tokens.append(token)
        ended = [r for r in self.running if len(r.tokens) == r.prompt + r.new]
        self.running = [r for r in self.running if r not in ended]
        for request in ended:
            self.pages.release(request.pages)
        return ended

    def next_tokens(self, parts):
        """The token after each part: parts are requests, and how many of their tokens to compute."""
        counts, bounds = [n for _, n in parts], (max(n for _, n in parts), max(r.used + n for r, n in parts))
        replays = self.replays and bounds[0] == 1
        if replays:  # a graph has all rows: those of padding write to page 0
            counts, bounds = [1] * self.requests, (1, self.longest)
        padding, width = len(counts) - len(parts), -(-self.longest // self.pages.size)
        arrays = (
            [token for r, n in parts for token in r.tokens[r.used : r.used + n]] + [0] * padding,
            [0, *accumulate(counts)],
            [r.used for r, _ in parts] + [0] * padding,
            [r.pages + [0] * (width - len(r.pages)) for r, _ in parts] + [[0] * width] * padding,
        )
        batch = Batch(*(torch.tensor(x, dtype=torch.int32).to(self.device) for x in arrays), *bounds)
        return (self.replayed(batch) if replays else self.forward(batch))[: len(parts)].tolist()

    def replayed(self, batch):
        """Result of a graph, which is captured at the first call."""
        if self.graph is None:
            self.forward(batch)  # compiles; the replay writes the same rows again
            self.batch, self.graph = batch, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.forward(batch)
        for mine, new in zip(self.batch[:4], batch[:4]):
            mine.copy_(new)
        self.graph.replay()
        return self.result

    def forward(self, batch):
        """The likeliest token after the last row of each sequence."""
        x = self.model.embed(batch.tokens)
        for i, block in enumerate(self.model.blocks):
            q, k, v = (part.to(self.dtype) for part in block.heads(x))
            x = block.add(x, self.attend(i, q, k, v, batch))
        return (self.model.norm(x[batch.starts[1:] - 1]) @ self.model.embed.weight.T).argmax(-1)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    model = train(config, TrainConfig(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 200), device).model
    server, front = Server(model, config), b"The following table summarizes the "
    endings = deque([b"operator precedence", b"comparison operations", b"string methods", b"types"])
    while server.running or server.waiting or endings:
        if endings:  # a request comes at each of the first steps
            server.submit(front + endings.popleft(), 8 * len(endings) + 16)
        for request in server.step():
            text = bytes(request.tokens).decode(errors="replace")
            print(f"{len(server.running)} others run; {request.shared} tokens shared: {text!r}")


if __name__ == "__main__":
    main()
