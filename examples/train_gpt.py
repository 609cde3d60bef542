"""Train a small GPT on a text that repeats, with fa4.flash_attn_func in every layer.

    python examples/train_gpt.py

On a GPU it takes bfloat16 and fa4's kernels, on a CPU float32 and tiled torch.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import fa4

HEADS, HEADS_KV, HEAD_DIM, LAYERS = 4, 2, 16, 2
HIDDEN = HEADS * HEAD_DIM
TEXT = b"attention is all you need, and all of it is softmax(QK^T)V. "


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * HEADS_KV) * HEAD_DIM)
        self.project = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))  # (batch, seqlen, heads, head_dim)
        q, k, v = heads.split([HEADS, HEADS_KV, HEADS_KV], dim=2)
        x = x + self.project(self.attend(q, k, v, x).flatten(2))
        return x + self.mlp(self.norms[1](x))

    def attend(self, q, k, v, x):
        return fa4.flash_attn_func(q, k, v, causal=True)


class GPT(nn.Module):
    def __init__(self, seqlen, block=Block):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(seqlen, HIDDEN)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(at)))


def train(block, steps, seqlen):
    """Train a GPT of such blocks; return the loss of each step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(seqlen, block).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    text = torch.tensor(list(TEXT * 20), device=device)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - seqlen - 1, (4,))
        rows = torch.stack([text[s : s + seqlen + 1] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad.clamp(-0.1, 0.1)
        losses.append(loss.item())
        if step % 10 == 0 or step + 1 == steps:
            print(f"step {step:3}  loss {losses[-1]:.3f}")
    assert losses[-1] < 0.8 * losses[0], "it does not learn"
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seqlen", type=int, default=64)
    options = parser.parse_args()
    train(Block, options.steps, options.seqlen)


if __name__ == "__main__":
    main()
