"""Memory, traffic and time of each training engine for a net on some hardware, and the recommended one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blocksparse.errors import BlockSparseError

from . import formulas
from .hardware import Hardware
from .net import Net

MIB = 2**20
# Fraction of memory that PyTorch's caching allocator and NCCL leave to tensors.
USABLE = 0.9
# DistributedDataParallel's default.
BUCKET_BYTES = 25 * MIB
# A more complicated plan must be this many times as fast to be recommended.
MIN_GAIN = 1.05


@dataclass(frozen=True)
class Job:
    """A training run.

    Args:
        ranks: devices.
        tokens: per device and step; n devices that share a layer's work process n times as many together.
        sequence: tokens that attend to each other.
        wire: bytes of an element in products and, under FSDP2, in collectives.
        stored: bytes of a value, a gradient and an element of optimizer state: 4 in mixed precision.
        optimizer: one of `formulas.STATES`.
        recompute: whether the backward pass recomputes a layer's activations instead of storing them.
    """

    ranks: int
    tokens: int
    sequence: int = 1
    wire: int = 4
    stored: int = 4
    optimizer: str = "adamw"
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "sequence"):
            if getattr(self, name) < 1:
                raise BlockSparseError.expected(name, "at least 1", getattr(self, name))
        if self.optimizer not in formulas.STATES:
            raise BlockSparseError.expected("optimizer", f"one of {list(formulas.STATES)}", repr(self.optimizer))


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds of one engine, on the rank with most.

    Args:
        engine: "DDP", "FSDP2" or "TP n x FSDP2".
        memory: bytes by category.
        calls: of each collective in a step, the calls as (bytes of the tensor, number of ranks).
        seconds: of a step by part; their sum is the step apart from overlap.
        step: seconds of a step.
        fits: whether the memory fits into the device.
    """

    engine: str
    memory: dict[str, float]
    calls: dict[str, list[tuple[float, int]]]
    seconds: dict[str, float]
    step: float
    fits: bool

    @property
    def bytes_on_rank(self) -> float:
        return sum(self.memory.values())

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends per step, by collective, by the ring formulas."""
        return {
            name: sum(formulas.ring_bytes(name, size, ranks) for size, ranks in calls)
            for name, calls in self.calls.items()
        }

    def as_dict(self) -> dict[str, Any]:
        names = ("engine", "memory", "bytes_on_rank", "sent", "seconds", "step", "fits")
        return {name: getattr(self, name) for name in names}


@dataclass
class _Step:
    """Adds up the seconds of a step."""

    net: Net
    hardware: Hardware
    job: Job
    tensor_parallel: int = 1
    calls: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def send(self, collective: str, size: float, ranks: int, stride: int = 1) -> float:
        """Record a collective and return its seconds."""
        if ranks == 1 or size == 0:
            return 0.0
        self.calls.setdefault(collective, []).append((size, ranks))
        return self.hardware.seconds(collective, size, ranks, stride)

    def move(self, size: float) -> float:
        """Return the seconds to read or write bytes on the device."""
        return size / self.hardware.bandwidth * self.hardware.turns(self.job.ranks)

    def forward(self) -> float:
        """Return the seconds of products and attention: bound by arithmetic or by memory traffic."""
        job, split = self.job, self.tensor_parallel
        tokens, total = job.tokens * split, 0.0
        for product in self.net.products:
            weights = product.weights(split)
            features = product.in_features + product.out_features / split
            arithmetic = 2 * weights * tokens / self.hardware.rate(job.wire, product.block)
            total += max(
                arithmetic * self.hardware.turns(job.ranks),
                self.move(job.wire * (weights + tokens * features)),
            )
        if self.net.attention:
            flops = formulas.attention_flops(self.net.width, tokens, job.sequence) / 3 * len(self.net.layers) / split
            total += flops / self.hardware.dense[job.wire] * self.hardware.turns(job.ranks)
        return total

    def backward(self) -> float:
        """Return the seconds of the backward pass."""
        return (3 if self.job.recompute else 2) * self.forward()

    def optimizer(self, parameters: int) -> float:
        """Return the seconds of the optimizer."""
        return self.move(formulas.optimizer_traffic(parameters, self.job.stored, self.job.optimizer))

    def overlap(self, computing: float, sending: float, chunks: int) -> float:
        """Return the seconds of computing and sending, overlapped if the hardware does that."""
        overlap = self.hardware.overlap
        return formulas.overlapped(computing, sending, chunks) if overlap else computing + sending

    def memory(self, parameters: int) -> dict[str, float]:
        """Return the bytes of each category."""
        job = self.job
        return {
            **formulas.model_state_bytes(parameters, job.stored, job.optimizer),
            "layouts": sum(product.index_bytes(self.tensor_parallel) for product in self.net.products),
            "activations": activation_bytes(self.net, job, self.tensor_parallel),
        }

    def plan(self, engine: str, memory: dict[str, float], seconds: dict[str, float], total: float) -> Plan:
        """Return the plan of an engine."""
        fits = sum(memory.values()) <= USABLE * self.hardware.memory
        return Plan(engine, memory, self.calls, seconds, total, fits)


def plans(net: Net, hardware: Hardware, job: Job) -> list[Plan]:
    """Return plans for DDP, FSDP2 and TP x FSDP2, the simplest first.

    Tensor parallelism uses powers of two that divide the ranks, at most a node's devices, and at most the rows or
    columns of blocks of any product.
    """
    candidates = [ddp(net, hardware, job), fsdp2(net, hardware, job)]
    smallest = min(min(product.out_blocks, product.in_blocks) for product in net.products)
    degree = 2
    while degree <= min(hardware.devices, job.ranks, smallest):
        if job.ranks % degree == 0:
            candidates.append(fsdp2(net, hardware, job, degree))
        degree *= 2
    return candidates


def ddp(net: Net, hardware: Hardware, job: Job) -> Plan:
    """Plan DDP: every rank has everything, and gradients are summed in buckets during the backward pass.

    It presumes `gradient_as_bucket_view=True`; otherwise the buckets are a second copy of the gradients.
    """
    step = _Step(net, hardware, job)
    parameters = sum(product.parameters() for product in net.products)
    gradients = parameters * job.stored
    buckets = math.ceil(gradients / BUCKET_BYTES) if job.ranks > 1 else 1
    sending = sum(step.send("all_reduce", gradients / buckets, job.ranks) for _ in range(buckets))
    memory = step.memory(parameters)
    layouts_sent = step.send("broadcast", memory["layouts"], job.ranks)  # DDP's broadcast_buffers
    if job.wire < job.stored:  # autocast keeps the copies until the backward pass ends
        memory["copies"] = parameters * job.wire
    copying = step.move(2 * gradients) if job.ranks > 1 else 0.0  # into the buckets, divided
    seconds = {
        "forward": step.forward(),
        "backward": step.backward() + copying,
        "optimizer": step.optimizer(parameters),
        "collectives": sending + layouts_sent,
    }
    total = seconds["forward"] + seconds["optimizer"] + layouts_sent
    return step.plan("DDP", memory, seconds, total + step.overlap(seconds["backward"], sending, buckets))


def fsdp2(net: Net, hardware: Hardware, job: Job, tensor_parallel: int = 1) -> Plan:
    """Plan FSDP2: each rank keeps its shard of the blocks, and a layer is gathered before its forward and backward
    pass.

    Layers are wrapped one by one, with `reshard_after_forward=True`. With tensor parallelism, groups of ranks share a
    layer and data parallelism is over the groups; outputs of row-parallel products and input gradients of
    column-parallel ones are summed (Shoeybi et al., Megatron-LM, 2019).
    """
    step = _Step(net, hardware, job, tensor_parallel)
    shards = job.ranks // tensor_parallel
    units = [sum(p.parameters(tensor_parallel, shards) for p in layer) for layer in net.layers]
    gathered = [shards * unit * job.wire for unit in units]
    gathers = {
        when: sum(step.send("all_gather", size, shards, tensor_parallel) for size in gathered)
        for when in ("forward", "backward")
    }
    scatters = sum(step.send("reduce_scatter", size, shards, tensor_parallel) for size in gathered)
    tokens = job.tokens * tensor_parallel
    activation = tokens * net.width * job.wire
    pairs = [p for p in net.products if p.cut == "row"]
    passes = {"forward": 1, "backward": 2 if job.recompute else 1}
    added = {
        when: sum(step.send("all_reduce", activation, tensor_parallel) for _ in pairs * often)
        for when, often in passes.items()
    }
    parameters = sum(units)
    memory = step.memory(parameters)
    if shards > 1:  # the layer that computes, the next one, and a layer's gradients
        memory["copies"] = 3 * max(gathered)
    copies = sum(gathered) if shards > 1 else 0
    seconds = {
        # Copies from the gathered buffer to parameters; and of gradients to the buffer to scatter, with a division.
        "forward": step.forward() + step.move(2 * copies),
        "backward": step.backward() + step.move(6 * copies),
        "optimizer": step.optimizer(parameters),
        "collectives": sum(gathers.values()) + scatters + sum(added.values()),
    }
    sent = gathers["backward"] + scatters
    total = seconds["optimizer"]
    total += step.overlap(seconds["forward"] + added["forward"], gathers["forward"], len(units))
    total += step.overlap(seconds["backward"] + added["backward"], sent, len(units))
    return step.plan(f"TP {tensor_parallel} x FSDP2" if tensor_parallel > 1 else "FSDP2", memory, seconds, total)


def activation_bytes(net: Net, job: Job, tensor_parallel: int = 1) -> float:
    """Return the bytes stored for the backward pass: a formula for Transformers, otherwise the inputs of products and
    the output.
    """
    tokens = job.tokens * tensor_parallel
    whole: float = job.wire * tokens * net.width
    if net.attention:
        layer = formulas.transformer_activation_bytes(net.width, tokens, job.wire, tensor_parallel)
        whole /= tensor_parallel
    else:
        split = {"column": 1, "row": tensor_parallel}
        layer = job.wire * tokens * sum(p.in_features / split[p.cut] for p in net.layers[0])
    if job.recompute:  # the inputs of layers, and one layer at a time
        return layer + whole * len(net.layers)
    return layer * len(net.layers) + (0 if net.attention else whole)


def recommend(candidates: Sequence[Plan]) -> tuple[Plan | None, str]:
    """Return the simplest plan that fits and is within 5 % of the fastest, and the reason; the plan is None if nothing
    fits.
    """
    fitting = [plan for plan in candidates if plan.fits]
    if not fitting:
        least = min(candidates, key=lambda plan: plan.bytes_on_rank)
        largest = max(least.memory, key=lambda name: least.memory[name])
        ways = {
            "activations": "a smaller --batch or --recompute",
            "layouts": "a larger --block-size, or more tensor parallelism",
        }
        return None, (
            f"nothing fits: {least.engine} needs least, {least.bytes_on_rank / 1e9:.3g} GB, most of it {largest}: "
            f"try {ways.get(largest, 'more --gpus')}"
        )
    fastest = min(plan.step for plan in fitting)
    chosen = next(plan for plan in fitting if plan.step <= MIN_GAIN * fastest)
    before = candidates[: candidates.index(chosen)]
    reasons = []
    if too_large := [plan.engine for plan in before if not plan.fits]:
        reasons.append(f"{' and '.join(too_large)} {'does' if len(too_large) == 1 else 'do'} not fit")
    if slower := [plan for plan in before if plan.fits]:
        reasons += [f"{plan.engine} takes {plan.step / chosen.step:.2f} times as long" for plan in slower]
    after = [plan for plan in candidates[len(before) + 1 :] if plan.fits]
    if after:
        best = min(after, key=lambda plan: plan.step)
        gain = best.step / chosen.step
        text = f"takes {gain:.2f} times as long" if gain >= 1 else f"would save {1 - gain:.0%} only"
        reasons.append(f"{best.engine} {text}")
    return chosen, f"{chosen.engine}: {'; '.join(reasons) or 'the only one that fits'}"
