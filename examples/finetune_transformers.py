"""Train a model of transformers on padded batches with attn_implementation="fa4", beside its own attentions.

    python examples/finetune_transformers.py
    python examples/finetune_transformers.py --device cuda --steps 100 --width 512 --batch 16 --seqlen 512 --lr 3e-4

Random weights from a configuration, so that nothing is downloaded: for a model of yours,
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4")`. All runs start from the same weights and see
the same batches, so their losses differ by rounding alone.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fa4


def batches(options):
    """Sequences that count up by steps of their own, of different lengths, padded on the right."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(options.steps):
        first, step, length = (
            torch.randint(low, high, (options.batch, 1), generator=draw)
            for low, high in ((0, 64), (1, 5), (options.seqlen // 4, options.seqlen + 1))
        )
        position = torch.arange(options.seqlen)
        tokens, there = (first + step * position) % 96, position < length
        yield tokens, there.long(), tokens.masked_fill(~there, -100)


def train(implementation, options):
    torch.manual_seed(0)
    width = options.width
    config = LlamaConfig(
        vocab_size=96, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=options.layers,
        num_attention_heads=width // 16 if width < 256 else width // 64, num_key_value_heads=2,
        max_position_embeddings=options.seqlen,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for batch in batches(options):
        tokens, there, labels = (x.to(options.device) for x in batch)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(input_ids=tokens, attention_mask=there, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(x) for x in losses]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--implementations", default="eager,fa4", help="the first is what others are compared with")
    for name, default in (("steps", 4), ("width", 64), ("layers", 2), ("batch", 4), ("seqlen", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    fa4.register_transformers()
    curves = {}
    for name in options.implementations.split(","):
        started = time.perf_counter()
        curves[name] = train(name, options)
        print(f"{name:6} {time.perf_counter() - started:6.1f} s, the first call's compilation included")
    expected, *_ = curves.values()
    print("step  " + "  ".join(f"{name:>8}" for name in curves))
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{step:4}  " + "  ".join(f"{curve[step]:8.5f}" for curve in curves.values()))
    for name, curve in curves.items():
        furthest = max(abs(a - b) for a, b in zip(curve, expected))
        print(f"{name:6} ends at {curve[-1]:.5f}, and differs by {furthest:.2g} at most")
        assert furthest < 1e-4 or options.device == "cuda"  # in 16 bits, rounding grows from step to step


if __name__ == "__main__":
    main()
