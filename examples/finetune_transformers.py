"""Train a model of transformers on a padded batch with attn_implementation="fa4", beside its eager attention.

    python examples/finetune_transformers.py

Random weights from a configuration, so that nothing is downloaded: for a model of yours,
`AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa4")`.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fa4

STEPS = 3


def train(implementation):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    tokens = torch.randint(96, (4, 32))
    there = torch.arange(32) < torch.tensor([32, 20, 27, 9])[:, None]  # sequences of four lengths, padded on the right
    labels = tokens.masked_fill(~there, -100)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, attention_mask=there.long(), labels=labels).loss
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        losses.append(loss.item())
    return losses


def main():
    fa4.register_transformers()
    eager, ours = train("eager"), train("fa4")
    for step, (a, b) in enumerate(zip(eager, ours)):
        print(f"step {step}  loss {a:.6f} with eager attention, {b:.6f} with fa4")
    assert all(abs(a - b) < 1e-4 for a, b in zip(eager, ours))


if __name__ == "__main__":
    main()
