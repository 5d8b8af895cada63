"""JAX over several processes, a GPU each: psum, all_to_all, ppermute, and a step of training whose gradients are summed."""

import os
import time

from ranks import RANK, WORLD, main, program


@program
def jax_collectives():
    import jax

    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", WORLD, RANK, local_device_ids=[RANK])
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))
    there = NamedSharding(mesh, P("x"))

    def whole(count):
        mine = np.arange(count, dtype=np.float32) % 1009 + RANK
        return jax.make_array_from_process_local_data(there, mine[None], (WORLD, count))

    def step(x):
        summed = jax.lax.psum(x, "x")
        moved = jax.lax.ppermute(x, "x", [(r, (r + 1) % WORLD) for r in range(WORLD)])
        turned = jax.lax.all_to_all(x.reshape(WORLD, -1), "x", 0, 0, tiled=True).reshape(x.shape)
        return summed, moved, turned, jax.lax.all_gather(x[:, :7], "x", tiled=True)

    call = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P("x"), P("x"), P("x"))))
    exact, ms = {}, None
    for count in (WORLD * 16, WORLD * 4096, WORLD << 20):
        x = whole(count)
        found = jax.block_until_ready(call(x))
        names = ("psum", "ppermute", "all_to_all", "all_gather")
        for name, y in zip(names, found):
            part = np.asarray(y.addressable_shards[0].data, dtype=np.float64)
            exact[f"{name} {count}"] = [float(part.sum()), float((part.ravel() * (np.arange(part.size) % 31)).sum())]
        base = np.arange(count) % 1009
        psum = np.asarray(found[0].addressable_shards[0].data).ravel()
        assert (psum == WORLD * base + WORLD * (WORLD - 1) // 2).all(), f"psum of {count}"
        left = np.asarray(found[1].addressable_shards[0].data).ravel()
        assert (left == base + (RANK - 1) % WORLD).all(), f"ppermute of {count}"
        began = time.perf_counter()
        for _ in range(10):
            found = call(x)
        jax.block_until_ready(found)
        ms = (time.perf_counter() - began) * 100

    weights = jnp.ones((64, 64)) * 0.01
    rows = jax.make_array_from_process_local_data(there, np.random.default_rng(RANK).standard_normal((1, 32, 64)).astype(np.float32), (WORLD, 32, 64))

    @jax.jit
    def train(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w) - x).mean())(w)
        return w - 0.1 * gradient, loss

    losses = []
    for _ in range(20):
        weights, loss = train(weights, rows)
        losses.append(float(loss))
    jax.distributed.shutdown()
    return {"ms": ms, "near": {"losses": losses}, "exact": exact}


if __name__ == "__main__":
    main()
