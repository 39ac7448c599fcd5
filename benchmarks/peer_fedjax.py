"""FedJAX's own federated averaging: jitted `for_each_client`, its shuffling and batching, in memory.

The jitted backend is FedJAX's default. Its other one, `pmap`, failed in a trial with two host devices on this version of jax.
"""

import itertools
import time
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import protocol
from fedjax.algorithms import fed_avg

Params = list[tuple[jax.Array, jax.Array]]


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Logits of a dense network."""
    hidden = x
    for matrix, bias in params[:-1]:
        hidden = jax.nn.relu(hidden @ matrix + bias)
    matrix, bias = params[-1]
    return hidden @ matrix + bias


def loss(params: Params, batch: dict[str, Any], rng: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    chances = jax.nn.log_softmax(forward(params, batch["x"]))
    return -jnp.mean(jnp.take_along_axis(chances, batch["y"][:, None], axis=1))


def _order_batches_by_seed() -> None:
    """Give FedJAX, which orders batches at random for every client and round, one seed after another: repeatable accuracies."""
    generator, seeds = np.random.RandomState, itertools.count()
    np.random.RandomState = lambda seed=None: generator(next(seeds) if seed is None else seed)


def main() -> None:
    """Do the job on the command line."""
    _order_batches_by_seed()
    job = protocol.job()
    data = protocol.read(job.data)
    arrays = [jnp.asarray(value) for value in protocol.read_weights(job.weights)]
    params = [(matrix.T, bias) for matrix, bias in zip(arrays[::2], arrays[1::2], strict=True)]
    sets = [fedjax.ClientDataset({"x": c.x.reshape(len(c.y), -1), "y": c.y.astype(np.int32)}) for c in data.clients]
    batching = fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=1, seed=None)
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(learning_rate=job.lr), fedjax.optimizers.sgd(learning_rate=1.0), batching
    )
    batches = [len(batch["y"]) for each in sets for batch in each.shuffle_repeat_batch(batching)]

    state = algorithm.init(params)
    rng, seconds = jax.random.PRNGKey(0), []
    for _ in range(job.warm + job.rounds):
        began = time.perf_counter()
        rng, *keys = jax.random.split(rng, len(sets) + 1)
        cohort = [(str(index).encode(), each, key) for index, (each, key) in enumerate(zip(sets, keys, strict=True))]
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - began)

    guesses = jax.jit(forward)(state.params, data.test.x.reshape(len(data.test.y), -1)).argmax(1)
    right = float(np.mean(np.asarray(guesses) == data.test.y))
    protocol.answer("fedjax", job.work, seconds[job.warm :], len(batches), sum(batches), right)


if __name__ == "__main__":
    main()
