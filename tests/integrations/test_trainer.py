"""transformers' Trainer on a small Llama: the curve of its losses with fa4 is the formula's."""

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer is built on it")
transformers = pytest.importorskip("transformers", reason="hooks into it")

from tests.integrations.models import model_of, register  # noqa: E402

STEPS, BATCH, LENGTH = 4, 2, 24


def padded_sequences(seed, count):
    """Tokens with a regularity to be learned, of different lengths, padded on the right."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        first, step, length = (
            int(torch.randint(low, high, (), generator=draw)) for low, high in ((3, 64), (1, 5), (6, 25))
        )
        tokens = (first + step * torch.arange(LENGTH)) % 61 + 3
        there = torch.arange(LENGTH) < length
        labels = tokens.masked_fill(~there, -100)
        yield dict(input_ids=tokens * there, attention_mask=there.long(), labels=labels)


def losses(implementation, seed, folder):
    """Of each step: AdamW, two batches accumulated, layers computed anew in the backward."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / implementation),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
        use_cpu=True,
    )
    model = model_of("llama", seed, implementation, torch.float64)
    model.gradient_checkpointing_enable()
    data = list(padded_sequences(seed, 2 * BATCH * STEPS))
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model


@pytest.mark.soak
@pytest.mark.parametrize(
    ("other", "allowed"),
    [
        pytest.param("eager", 1e-4, id="eager"),  # rounds its softmax to float32
        pytest.param("exact", 1e-6, id="formula"),  # the Trainer's own sums are float32
    ],
)
def test_losses_of_the_trainer(other, allowed, seed, tmp_path):
    """In float64, where only a mistake makes a difference that lasts."""
    register()
    (ours, model), (theirs, expected) = (losses(name, seed, tmp_path) for name in ("fa4", other))
    assert len(ours) == STEPS and len(set(ours)) > 1
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < allowed, (ours, theirs)
    if other == "exact":
        for a, b in zip(model.parameters(), expected.parameters()):
            assert (a - b).abs().max() < 1e-6
