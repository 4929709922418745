"""The trainers that people have: Hugging Face's Trainer, accelerate and Lightning.

Each trains a tiny model that is made here, on the CPU, and has nothing to download.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tvm_qopt import optim

STEPS = 6
IGNORED = -100  # a label that is not counted: the first, which nothing predicts
TOKENS = torch.randint(0, 64, (STEPS * 4, 16), generator=torch.Generator().manual_seed(0))


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, resid_pdrop=0, attn_pdrop=0,
        embd_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def assert_trained(model: Any, *, parts: int = 1) -> None:
    """As the same steps by hand do, with gradients of a batch in a number of parts."""
    other = tiny_gpt2()
    optimizer = optim.AdamW8bit(other.parameters(), lr=1e-2, weight_decay=0.0)
    for tokens in TOKENS.split(4):
        for part in tokens.chunk(parts):
            (other(input_ids=part, labels=part).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def trainer_of(model: Any, folder: Path, **given: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=STEPS // 2,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    labels = TOKENS.clone()
    labels[:, 0] = IGNORED
    rows = [{"input_ids": row, "labels": label} for row, label in zip(TOKENS, labels, strict=True)]
    return transformers.Trainer(model, arguments, train_dataset=rows, **given)


@pytest.mark.parametrize("how", ["optimizers", "optimizer_cls_and_kwargs"])
def test_hugging_face_trainer(how: str, tmp_path: Path) -> None:
    """Trained; and resumed from its own checkpoint half way, with the same weights at the end."""
    options = {"lr": 1e-2, "weight_decay": 0.0}

    def made(model: Any) -> dict[str, Any]:
        if how == "optimizers":
            return {how: (optim.AdamW8bit(model.parameters(), **options), None)}
        return {how: (optim.AdamW8bit, options)}

    model = tiny_gpt2()
    trainer = trainer_of(model, tmp_path, **made(model))
    trainer.train()
    assert_trained(model)
    ours = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    assert "adamw-dynamic8" in str(ours.describe())
    other = tiny_gpt2()
    resumed = trainer_of(other, tmp_path / "other", **made(other))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_accelerate(tmp_path: Path) -> None:
    """Two micro-batches a step; saved and loaded half way."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_gpt2()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(TOKENS, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, tokens in enumerate(loader):
        if number == STEPS:
            accelerator.save_state(str(tmp_path))
            optimizer.optimizer.state.clear()
            accelerator.load_state(str(tmp_path))
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_trained(accelerator.unwrap_model(model), parts=2)


def test_lightning(tmp_path: Path) -> None:
    """Trained; and resumed from a checkpoint, with a schedule and clipping."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(80, 80)

        def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(x).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = optim.AdamW8bit(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    rows = torch.randn(24, 80, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)

    def fit(net: Net, epochs: int, checkpoint: str | None = None) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=0.5,
            enable_checkpointing=False,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how many workers load data
            trainer.fit(net, loader, ckpt_path=checkpoint)
        return trainer

    through, first, second = Net(), Net(), Net()
    before = through.layer.weight.detach().clone()
    fit(through, 4)
    fit(first, 2).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, 4, str(tmp_path / "half.ckpt"))
    assert not torch.equal(through.layer.weight, before)
    assert torch.equal(through.layer.weight, second.layer.weight)
