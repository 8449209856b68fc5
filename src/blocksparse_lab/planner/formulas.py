"""Bytes and seconds as functions of sizes alone, each with its source."""

from __future__ import annotations

import math

# Numbers that an optimizer keeps for each weight.
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def shard(lines: int, ranks: int) -> int:
    """The lines of a parameter that the fullest rank keeps: FSDP2 cuts the first dimension as `torch.chunk`.

    >>> shard(10, 4), shard(2, 4)
    (3, 1)
    """
    return math.ceil(lines / ranks)


# How many times the pieces of a tensor go round: an all-reduce is a reduce-scatter, then an all-gather.
ROUNDS = {"broadcast": 1, "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_bytes(collective: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends for a ring to move `size` bytes: in each round each piece passes each rank but one.

    Of a broadcast it passes on all bytes, but for the last rank.
    Source: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH (2005); Patarasuk,
    Yuan, Bandwidth optimal all-reduce algorithms (2009).

    >>> ring_bytes("all_gather", 100, 4), ring_bytes("all_reduce", 100, 4)
    (75.0, 150.0)
    """
    if collective == "broadcast":
        return size * (ranks > 1)
    return ROUNDS[collective] * size * (ranks - 1) / ranks


def ring_steps(collective: str, ranks: int) -> int:
    """How many messages follow each other.

    >>> ring_steps("all_reduce", 4), ring_steps("all_gather", 4)
    (6, 3)
    """
    return ROUNDS[collective] * (ranks - 1)


def model_state_bytes(weights: float, stored: int, optimizer: str) -> dict[str, float]:
    """Bytes of values, gradients and optimizer state of this many weights, each of `stored` bytes.

    Adam in float32 keeps 16 bytes for each weight, as it does in mixed precision with values in 16 bits.
    Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020), section 3.

    >>> model_state_bytes(1000, 4, "adam")
    {'values': 4000, 'gradients': 4000, 'optimizer': 8000}
    """
    of_each = weights * stored
    return {"values": of_each, "gradients": of_each, "optimizer": of_each * STATES[optimizer]}


def flops(weights: float, tokens: float, recompute: bool = False) -> float:
    """Of a training step: two operations per stored weight and token, for output, gradient of input and of weight.

    Recomputing activations adds the forward pass once more.
    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix.

    >>> flops(1000, 10)
    60000.0
    """
    return (8.0 if recompute else 6.0) * weights * tokens


def attention_flops(width: float, tokens: float, sequence: float, recompute: bool = False) -> float:
    """Of the scores and the weighted sums of one layer, which have no weights; causal masks are not made use of.

    Source: as `flops`.
    """
    return (8.0 if recompute else 6.0) * 2 * width * tokens * sequence


def transformer_activation_bytes(width: int, tokens: int, bytes_each: int, tensor_parallel: int = 1) -> float:
    """Of one layer of a Transformer, with sequence parallelism over the tensor-parallel ranks and flash attention.

    34 bytes per token and feature in 16 bits: attention 11, feed-forward 19, two layer norms 4. The scores,
    5 a s / h, are not kept by flash attention.
    Source: Korthikanti et al., Reducing activation recomputation in large Transformer models (2022), equations 1 and 4.
    """
    return 17 * bytes_each * width * tokens / tensor_parallel


def optimizer_traffic(weights: float, stored: int, optimizer: str) -> float:
    """Bytes that a fused optimizer step reads and writes: value and states twice, the gradient once.

    >>> optimizer_traffic(1000, 4, "adam")
    28000
    """
    return weights * stored * (3 + 2 * STATES[optimizer])


def overlapped(computing: float, sending: float, chunks: int) -> float:
    """Seconds of computing and sending side by side, where the last of several equal chunks is sent after computing.

    Source: Li et al., PyTorch distributed: experiences on accelerating data parallel training (2020), section 3.2.

    >>> overlapped(10.0, 4.0, 4), overlapped(10.0, 20.0, 4)
    (11.0, 22.5)
    """
    return max(computing + sending / chunks, computing / chunks + sending)
