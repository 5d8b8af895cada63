"""Frameworks over PyTorch, with small models whose weights are random."""

import os

from ranks import RANK, WORLD, batches, main, on_gpu, program


@program
def accelerate_ddp():
    return accelerated()


@program
def accelerate_fsdp():
    from accelerate import FullyShardedDataParallelPlugin

    return accelerated(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]))


def small_gpt2():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def accelerated(**how):
    """Accelerate's training loop over a GPT-2 of transformers."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", **how)
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, words = [], batches(accelerator.device)
    for _ in range(12):
        batch = next(words)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"near": {"losses": losses}}


@program
def trainer():
    """The Trainer of transformers."""
    import torch
    from transformers import Trainer, TrainingArguments

    words = torch.randint(0, 512, (16 * WORLD * 12, 64), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in words]
    how = TrainingArguments(
        output_dir=os.environ["RESULTS"] + "/trainer", per_device_train_batch_size=16, max_steps=12, logging_steps=1, report_to=[], seed=7, bf16=True,
        save_strategy="steps", save_steps=6, ddp_find_unused_parameters=False, dataloader_num_workers=2, disable_tqdm=True, use_cpu=not on_gpu(),
    )
    trainer = Trainer(model=small_gpt2(), args=how, train_dataset=rows)
    trainer.train()
    # Rank 0 alone keeps a history of them all.
    return {"near": {"losses": [row["loss"] for row in trainer.state.log_history if "loss" in row]}}


def lightning_run(strategy):
    import lightning
    import torch

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.layers = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
            self.losses = []

        def training_step(self, batch, _):
            loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(32 * WORLD * 12, 128, generator=generator), torch.randint(0, 10, (32 * WORLD * 12,), generator=generator))
    model = Small()
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu() else "cpu", devices=WORLD, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_checkpointing=True, default_root_dir=os.environ["RESULTS"], enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 32))
    return {"near": {"losses": model.losses}}


@program
def lightning_ddp():
    return lightning_run("ddp")


@program
def lightning_fsdp():
    return lightning_run("fsdp")


if __name__ == "__main__":
    main()
