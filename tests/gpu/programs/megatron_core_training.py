"""Trainings as users of Megatron-Core write them: a GPT of its layers, its own data parallelism, its distributed optimizer."""

import itertools

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ranks import batches, begin, finish, main, on_gpu, program, timed


class Norm(torch.nn.LayerNorm):
    """PyTorch's layer norm for sequence parallelism, which Megatron-Core has with Apex or Transformer Engine alone: each rank has a part of the
    sequence, so that the gradients of these weights have to be summed, and Megatron-Core does so for weights with this mark."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel


def train(tensor):
    """Trains with tensor parallelism of this size, and data parallelism over the rest; each step takes two microbatches."""
    device = begin()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(7)
    vocabulary, width, heads, layers, places = (32768, 1024, 16, 8, 512) if on_gpu() else (512, 128, 4, 2, 64)
    config = TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=heads, hidden_dropout=0, attention_dropout=0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(config, TransformerBlockSubmodules([layer] * layers, Norm), vocabulary, places)
    shared = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=10_000_000 if on_gpu() else 100_000, **shared)
    model = DistributedDataParallel(config, how, Float16Module(config, model.to(device)))
    model.broadcast_params()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, **shared), [model], use_gloo_process_groups=False)
    config.no_sync_func, config.grad_scale_func, config.finalize_model_grads_func = model.no_sync, optimizer.scale_loss, finalize_model_grads
    run, losses, norms = get_forward_backward_func(), [], []
    at = torch.arange(places, device=device)
    # Ranks of one tensor-parallel group take the same words; again and again, so that the losses fall.
    words = itertools.cycle(itertools.islice(batches(device, vocabulary, 4, places + 1, 100 + parallel_state.get_data_parallel_rank()), 4))

    def forward(words, model):
        batch = next(words)
        loss = model(batch[:, :-1], at.expand(len(batch), -1), None, labels=batch[:, 1:])
        return loss, lambda loss: (loss.float().mean(), loss.detach().float().mean())

    def step():
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(forward_step_func=forward, data_iterator=words, model=model, num_microbatches=2, seq_length=places, micro_batch_size=4)
        good, norm, _ = optimizer.step()
        assert good, "the optimizer left out a step"
        losses.append(torch.stack(found).mean())
        norms.append(norm)

    ms = timed(step, 20)
    near = {"losses": [loss.item() for loss in losses], "norms of gradients": norms}
    parallel_state.destroy_model_parallel()
    finish()
    return {"ms": ms, "near": near}


@program
def megatron_data_parallel():
    """All ranks are data-parallel."""
    return train(1)


@program
def megatron_tensor_parallel():
    """Pairs of ranks share each layer, and the sequence between layers (sequence parallelism)."""
    return train(2)


if __name__ == "__main__":
    main()
