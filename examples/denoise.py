"""Train a small diffusion transformer: images of stripes from noise, guided by a short text.

    python examples/denoise.py --steps 300

Each block attends among the 81 tokens of an image and to the few of its text; heads have 72 columns, as in PixArt.
Texts of a batch have other lengths, so attention to them is packed. The model learns the velocity from noise to image
(flow matching, Lipman et al., arXiv 2210.02747), and paints by following it.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import fa4

SIDE, PATCH, HEADS, HEAD_DIM, TEXT, BLOCKS = 18, 2, 2, 72, 6, 2
WIDTH, TOKENS = HEADS * HEAD_DIM, (SIDE // PATCH) ** 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.q, self.kv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.out_text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, text, lengths, dtype):
        """x: (batch, TOKENS, WIDTH). text: the texts' tokens, packed; lengths: cumulative, of images and of texts."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HEAD_DIM)).to(dtype).unbind(2)
        x = x + self.out(fa4.flash_attn_func(q, k, v).flatten(2).to(x.dtype))
        q = self.q(self.norms[1](x)).view(-1, HEADS, HEAD_DIM).to(dtype)
        k, v = self.kv(text).unflatten(-1, (2, HEADS, HEAD_DIM)).to(dtype).unbind(1)
        bounds = dict(max_seqlen_q=TOKENS, max_seqlen_k=TEXT)
        seen = fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], **bounds)
        x = x + self.out_text(seen.view(x.shape).to(x.dtype))
        return x + self.mlp(self.norms[2](x))


class Denoiser(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.words = dtype, nn.Embedding(16, WIDTH)
        self.embed, self.time = nn.Linear(PATCH * PATCH, WIDTH), nn.Linear(1, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, PATCH * PATCH)

    def forward(self, images, time, text, lengths):
        patches = F.pixel_unshuffle(images[:, None], PATCH).flatten(2).transpose(1, 2)
        x = self.embed(patches) + self.place + self.time(time[:, None, None])
        for block in self.blocks:
            x = block(x, self.words(text), lengths, self.dtype)
        rows = self.head(x).transpose(1, 2).unflatten(2, (SIDE // PATCH, SIDE // PATCH))
        return F.pixel_shuffle(rows, PATCH)[:, 0]


def examples(batch, device):
    """Images of stripes, and what their texts say: direction, then width, in one to TEXT tokens."""
    direction, width = torch.randint(4, (batch,)), torch.randint(3, (batch,))
    angle, period = direction * math.pi / 4, 4.0 + 3 * width
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    images = torch.sin(2 * math.pi * phase / period[:, None, None])
    counts = torch.randint(2, TEXT + 1, (batch,))
    text = [[int(d), 4 + int(w)] + [8] * (int(n) - 2) for d, w, n in zip(direction, width, counts)]
    packed = torch.tensor([word for words in text for word in words])
    lengths = [F.pad(x.cumsum(0), (1, 0)).int() for x in (torch.full((batch,), TOKENS), counts)]
    return images.to(device), packed.to(device), [x.to(device) for x in lengths]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = Denoiser(dtype).to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps):
        images, text, lengths = examples(8, device)
        noise, time = torch.randn_like(images), torch.rand(len(images), device=device)
        mixed = torch.lerp(noise, images, time[:, None, None])
        loss = F.mse_loss(model(mixed, time, text, lengths), images - noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 10, 1) == 0 or step == steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    with torch.no_grad():
        images, text, lengths = examples(8, device)
        painted = torch.randn_like(images)
        for i in range(20):
            painted += model(painted, torch.full((8,), i / 20, device=device), text, lengths) / 20
    likeness = F.cosine_similarity(painted.flatten(1), images.flatten(1)).mean()
    print(f"painted images are like those that their texts mean: cosine {float(likeness):.2f}")
    assert losses[-1] < losses[0] and math.isfinite(likeness)


if __name__ == "__main__":
    main()
