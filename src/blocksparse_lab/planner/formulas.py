"""Formulas for bytes and seconds as functions of sizes, each with its source."""

from __future__ import annotations

import math

# Elements of optimizer state per weight.
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def shard(rows: int, ranks: int) -> int:
    """Return the number of rows on the fullest rank: FSDP2 splits the first dimension as `torch.chunk` does.

    >>> shard(10, 4), shard(2, 4)
    (3, 1)
    """
    return math.ceil(rows / ranks)


# How many rounds of a ring a collective takes: an all-reduce is a reduce-scatter and an all-gather.
ROUNDS = {"broadcast": 1, "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_bytes(collective: str, size: float, ranks: int) -> float:
    """Return the bytes that a rank sends when a ring moves `size` bytes; in each round, each piece passes all ranks but
    one.

    In a broadcast, each rank but the last passes on all bytes.
    Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH (2005); Patarasuk,
    Yuan, Bandwidth optimal all-reduce algorithms (2009).

    >>> ring_bytes("all_gather", 100, 4), ring_bytes("all_reduce", 100, 4)
    (75.0, 150.0)
    """
    if collective == "broadcast":
        return size * (ranks > 1)
    return ROUNDS[collective] * size * (ranks - 1) / ranks


def ring_steps(collective: str, ranks: int) -> int:
    """Return how many messages follow one another.

    >>> ring_steps("all_reduce", 4), ring_steps("all_gather", 4)
    (6, 3)
    """
    return ROUNDS[collective] * (ranks - 1)


def model_state_bytes(weights: float, stored: int, optimizer: str) -> dict[str, float]:
    """Return the bytes of values, gradients and optimizer state for this many weights of `stored` bytes each.

    With Adam in float32 these are 16 bytes per weight, as in mixed precision with values in 16 bits.
    Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020), section 3.

    >>> model_state_bytes(1000, 4, "adam")
    {'values': 4000, 'gradients': 4000, 'optimizer': 8000}
    """
    size = weights * stored
    return {"values": size, "gradients": size, "optimizer": size * STATES[optimizer]}


def flops(weights: float, tokens: float, recompute: bool = False) -> float:
    """Return the operations of a training step: two per stored weight and token for the output and for each of two
    gradients.

    Recomputing activations adds another forward pass.
    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix.

    >>> flops(1000, 10)
    60000.0
    """
    return (8.0 if recompute else 6.0) * weights * tokens


def attention_flops(width: float, tokens: float, sequence: float, recompute: bool = False) -> float:
    """Return the operations of one layer's scores and weighted sums, which have no weights; causal masks save nothing.

    Source: see `flops`.
    """
    return (8.0 if recompute else 6.0) * 2 * width * tokens * sequence


def transformer_activation_bytes(width: int, tokens: int, bytes_each: int, tensor_parallel: int = 1) -> float:
    """Return the activation bytes of one Transformer layer, with flash attention and sequence parallelism over the
    tensor-parallel ranks.

    In 16 bits there are 34 bytes per token and feature: attention 11, feed-forward 19, two layer norms 4. Flash
    attention does not store the scores, 5 a s / h.
    Source: Korthikanti et al., Reducing activation recomputation in large Transformer models (2022), equations 1 and 4.
    """
    return 17 * bytes_each * width * tokens / tensor_parallel


def optimizer_traffic(weights: float, stored: int, optimizer: str) -> float:
    """Return the bytes that a fused optimizer step reads and writes: value and states twice, the gradient once.

    >>> optimizer_traffic(1000, 4, "adam")
    28000
    """
    return weights * stored * (3 + 2 * STATES[optimizer])


def overlapped(computing: float, sending: float, chunks: int) -> float:
    """Return the seconds of computing and sending in parallel, if the last of several equal chunks is sent after
    computing.

    Source: Li et al., PyTorch distributed: experiences on accelerating data parallel training (2020), section 3.2.

    >>> overlapped(10.0, 4.0, 4), overlapped(10.0, 20.0, 4)
    (11.0, 22.5)
    """
    return max(computing + sending / chunks, computing / chunks + sending)
