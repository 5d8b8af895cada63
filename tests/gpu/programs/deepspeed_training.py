"""Trainings with DeepSpeed's ZeRO, with an optimizer of PyTorch: DeepSpeed's own would be compiled first."""

import contextlib
import itertools

import deepspeed
import torch

from ranks import batches, begin, finish, gpt, loss_of, main, on_gpu, program, timed


def zero(stage, **more):
    """A GPT in bfloat16 whose optimizer's state, and from stage 2 gradients, and in stage 3 weights, are shared out over the ranks."""
    device = begin()
    sizes = {"vocabulary": 32768, "width": 768, "heads": 12, "layers": 8, "places": 256} if on_gpu() else {"vocabulary": 512, "places": 64}
    bucket = 10_000_000 if on_gpu() else 100_000
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **more},
    }
    # Each layer is shared out as soon as it is made.
    with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else contextlib.nullcontext():
        model = gpt(**sizes)
    model, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), config=config)
    # The same words again and again, so that the losses fall.
    words = itertools.cycle(itertools.islice(batches(device, sizes["vocabulary"], places=sizes["places"]), 4))
    losses, norms = [], []

    def step():
        for _ in range(2):
            loss = loss_of(model, next(words))
            model.backward(loss)
            model.step()
            losses.append(loss.detach())
        norms.append(model.get_global_grad_norm())

    ms = timed(step, 20)
    near = {"losses": [loss.item() for loss in losses], "norms of gradients": norms}
    model.destroy()
    finish()
    return {"ms": ms, "near": near}


@program
def deepspeed_zero_1():
    return zero(1)


@program
def deepspeed_zero_2():
    return zero(2)


@program
def deepspeed_zero_3():
    """Layers are fetched ahead of their use; small weights are shared out too."""
    return zero(3, stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=1_000_000)


if __name__ == "__main__":
    main()
