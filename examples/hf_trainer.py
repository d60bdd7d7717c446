"""A small model of transformers trained by its `Trainer` under a plan.

`torchrun --nproc-per-node 2 examples/hf_trainer.py`

`Trainer` divides the data and wraps models in `DistributedDataParallel`; under a plan it does
neither. The losses are those of one device, which this prints beside them.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autopar

STEPS = 3
BATCH = 8
TOKENS = 16


class PlannedTrainer(Trainer):
    """A `Trainer` of a module that `autopar.parallelize` has made."""

    def create_accelerator_and_postprocess(self) -> None:
        """Leave the module as it is: the plan says what its ranks communicate."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda module, *args, **options: module

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The global batch, on every rank."""
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, size, collate_fn=self.data_collator)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """The planned loss, whole on every rank."""
        return model.loss(**inputs)


def model() -> LlamaForCausalLM:
    """Two layers with random weights, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    """Random tokens of all steps."""
    tokens = torch.randint(0, 64, (STEPS * BATCH, TOKENS))
    return [{"input_ids": row, "labels": row} for row in tokens]


def planned_losses(data: list[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of `Trainer`, under a plan for the ranks of torchrun."""
    ranks = int(os.environ["WORLD_SIZE"])
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    plan = autopar.plan(model(), inputs, cluster="local-cpu", devices=ranks, mesh=(ranks,))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            logging_steps=1,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PlannedTrainer(autopar.parallelize(model(), plan), args, train_dataset=data)
        trainer.train()
    return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]


def losses_of_one_device(data: list[dict[str, torch.Tensor]]) -> list[float]:
    """The losses of an ordinary loop."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-5, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        rows = data[step * BATCH : (step + 1) * BATCH]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = module(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Train on the ranks of torchrun and on one device, and print both rows of losses."""
    torch.manual_seed(1)
    data = samples()
    under_plan = planned_losses(data)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"plan": under_plan, "device": losses_of_one_device(data)}))


if __name__ == "__main__":
    main()
