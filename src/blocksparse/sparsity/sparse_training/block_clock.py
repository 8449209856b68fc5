"""An age for each block, by which Adam corrects its bias and the learning rate warms up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checked import BLOCK_AGE, check_state_of_blocks, integer
from ...errors import BlockSparseError, warn_user
from ...surgery.optimizer import clocked, has_block_clock, is_optimizer, unwrapped
from ...surgery.rows import put_rows, take_rows
from ...surgery.sharding import local_of
from ..updates import accelerate_accumulates, was_skipped
from .sgd import SGD

MAX_AGE = (1 << 16) - 1  # two digits of 8 bits: a state dict in bfloat16 keeps both exactly
SETTLED = 1e-3  # a bias below this is not corrected any more
MAX_BETA = 0.9999  # its bias at the largest age is 0.0014
OWN_ATTRIBUTES = {"optimizer", "warmup", "_updates", "_before", "_young"}  # all others are the optimizer's

Group = Mapping[str, Any]
State = Mapping[str, Tensor]


class BlockClock:
    """A clock per block: new blocks train like parameters that have just been created.

    Adam's count of steps belongs to the whole parameter. With a clock, bias correction uses the steps since a block was
    grown, and its moments start at 0. Its learning rate (and decoupled weight decay) rises linearly over the first
    `warmup` of these steps. Blocks that existed before the first change are as the optimizer left them.

    Hooks correct the values of young blocks after each `optimizer.step()`. The ages are in the optimizer's state, so
    they are saved with it, follow the blocks, and work under DDP, FSDP2 and tensor parallelism. The clock itself is not
    saved: if you load the state into a new optimizer, wrap that one too; a warning reminds you.

    Methods and GradScaler accept the clock or the optimizer. Schedulers accept the optimizer only. accelerate's
    `prepare` ignores a clock: prepare the optimizer first, then wrap it.

    - Adam, AdamW, NAdam, also fused, foreach, AMSGrad: as a new parameter's.
    - RAdam: likewise, but blocks rest while its second moment has too few steps to be rectified.
    - SGD and Lion: only the warm-up, since they correct no bias.

    Args:
        optimizer: one of these, or a wrapper of it such as accelerate's.
        warmup: steps over which the learning rate of a new block rises, 100 by default; 0 for none, 65,535 at most.

    Raises:
        BlockSparseError: another kind of optimizer; one with `capturable=True`, whose graph runs no hooks; one that has
            a clock; Adam's betas above 0.9999, whose bias outlasts the clock; `warmup` out of range.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(64, 64, density=0.25, block_size=8)
        >>> optimizer = bs.sparsity.BlockClock(torch.optim.AdamW(layer.parameters()), warmup=50)
        >>> method = bs.sparsity.SET(layer, optimizer, init="zeros", every=100)
        >>> layer(torch.randn(16, 64)).square().mean().backward()
        >>> optimizer.step()

    Source: Xiao et al., Memory-efficient LLM training with dynamic sparsity: from stability to practical scaling
    (2026), which resets the step of each new parameter and warms its learning rate up.
    """

    def __init__(self, optimizer: Any, warmup: int = 100):
        if not is_optimizer(optimizer):
            raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__)
        self.optimizer, self.warmup = optimizer, integer("warmup", warmup, 0, below=MAX_AGE + 1)
        if has_block_clock(self._inner):
            raise BlockSparseError(
                f"optimizer: this {type(self._inner).__name__} has a BlockClock already: use that one"
            )
        self._updates = _update_of(self._inner)
        self._before: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._young: dict[Tensor, _YoungBlocks] = {}
        self._register()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # GradScaler sets `grad_scale` and `found_inf`, which a fused step reads from the optimizer itself.
        if name in OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in OWN_ATTRIBUTES:
            object.__delattr__(self, name)
        else:
            delattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "warmup": self.warmup}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._updates, self._before, self._young = _update_of(self._inner), {}, {}
        if not has_block_clock(self._inner):
            self._register()

    @property
    def _inner(self) -> Any:
        """The optimizer without wrappers, which has the hooks and the state."""
        return unwrapped(self.optimizer)

    def _register(self) -> None:
        clocked.add(self._inner)
        self._inner.register_step_pre_hook(self._remember)
        self._inner.register_step_post_hook(self._correct)

    @torch.no_grad()
    def _remember(self, optimizer: Any, *_: Any) -> None:
        """Copy the values of young blocks before a step."""
        if accelerate_accumulates():  # an optimizer that accelerate has prepared does not step now
            warn_user(
                f"{type(optimizer).__name__} steps while accelerate accumulates gradients: prepare ignores a "
                "BlockClock, so write BlockClock(accelerator.prepare(optimizer))",
            )
        self._before = {}
        for group in optimizer.param_groups:
            _check_group(optimizer, group, self._updates is not None)
            limit = max(self.warmup, settling_time(group))
            for parameter in group["params"]:
                ages = optimizer.state.get(parameter, {}).get(BLOCK_AGE)
                if ages is None:
                    continue
                check_state_of_blocks(BLOCK_AGE, ages, parameter.shape)
                young = self._young_blocks(parameter, local_of(ages), min(limit, MAX_AGE))
                if young.numel():
                    self._before[parameter] = young, take_rows(local_of(parameter.detach()), young)

    def _young_blocks(self, parameter: Tensor, ages: Tensor, limit: int) -> Tensor:
        """Return the positions of the blocks below an age.

        They are the same until the oldest reaches it or other code changes the ages, so a GPU seldom waits for them.
        """
        known = self._young.get(parameter)
        if known is None or not known.steps or known.limit != limit or known.ages is not ages or known.is_changed():
            if not bool(((ages >= 0) & (ages <= 255) & (ages == ages.round())).all()):
                expected = "two digits from 0 to 255 for each block"
                raise BlockSparseError.expected(f"{BLOCK_AGE} in the optimizer's state", expected, "other numbers")
            age = _read(ages)
            blocks = (age < limit).nonzero().squeeze(1)
            steps = limit - int(age[blocks].max()) if blocks.numel() else 1
            known = self._young[parameter] = _YoungBlocks(blocks, limit, steps, ages, ages._version)
        return known.blocks

    @torch.no_grad()
    def _correct(self, optimizer: Any, *_: Any) -> None:
        """Repeat the step of young blocks with their own ages, and count it."""
        before, self._before = self._before, {}
        if was_skipped(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in before and parameter.grad is not None:
                    self._correct_parameter(parameter, group, optimizer.state[parameter], *before[parameter])

    def _correct_parameter(
        self, parameter: Tensor, group: Group, state: dict[str, Any], young: Tensor, old: Tensor
    ) -> None:
        """Set the values of young blocks to those of a step at their own ages, from the values before the step."""
        ages, values = local_of(state[BLOCK_AGE]), local_of(parameter.detach())
        age = _read(take_rows(ages, young)) + 1
        ages[young] = torch.stack([age % 256, age // 256], 1).to(ages.dtype)
        known = self._young[parameter]
        known.steps, known.version = known.steps - 1, ages._version
        age = age.double().view(-1, *[1] * (values.dim() - 1))
        own = {
            name: _widened(take_rows(local_of(each), young))
            for name, each in state.items()
            if isinstance(each, Tensor) and each.shape == parameter.shape
        }
        rate = (age / self.warmup).clamp(max=1) if self.warmup else torch.ones_like(age)
        wide = _widened(old)
        rate = rate.to(wide.dtype)
        if self._updates is None:
            new = wide + rate * (_widened(take_rows(values, young)) - wide)
        else:
            rate = float(group["lr"]) * rate
            grad, decay = _widened(take_rows(local_of(parameter.grad), young)), float(group["weight_decay"])  # type: ignore[arg-type]
            grad = -grad if group.get("maximize") else grad
            if group.get("decoupled_weight_decay"):
                wide = wide * (1 - rate * decay)
            elif decay:
                grad = grad + decay * wide
            new = wide - rate * self._updates(group, own, grad, age)
        put_rows(values, young, new)


@dataclass
class _YoungBlocks:
    """Positions of the blocks below an age for so many more steps, and the ages that they come from."""

    blocks: Tensor
    limit: int
    steps: int
    ages: Tensor
    version: int

    def is_changed(self) -> bool:
        """Return whether other code has changed the ages in place."""
        return self.ages._version != self.version


def settling_time(group: Group) -> int:
    """Return the age at which Adam's bias is below `SETTLED`; 0 without betas."""
    decays = [float(beta) for beta in group.get("betas", ()) if 0 < float(beta) < 1]
    return max((math.ceil(math.log(SETTLED) / math.log(beta)) for beta in decays), default=0)


def _adam(group: Group, state: State, grad: Tensor, age: Tensor) -> Tensor:
    """Return Adam's step at these ages, for a learning rate of 1; the moments are those after the step."""
    mean, squares = state["exp_avg"], state.get("max_exp_avg_sq", state["exp_avg_sq"])
    correction1, correction2 = (_bias_correction(float(beta), age, mean.dtype) for beta in group["betas"])
    return mean / correction1 / ((squares / correction2).sqrt() + group["eps"])


def _bias_correction(beta: float, age: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 - beta^age."""
    if age.device.type != "cpu" or (oldest := int(age.max())) >= age.numel():
        return (1 - beta**age).to(dtype)
    ages = torch.arange(oldest + 1, dtype=age.dtype, device="cpu")  # fewer powers than one for each block
    return (1 - beta**ages).to(dtype)[age.long()]


def _nadam(group: Group, state: State, grad: Tensor, age: Tensor) -> Tensor:
    """Return NAdam's step at these ages; see `_adam`."""
    beta1, beta2 = map(float, group["betas"])
    steps = torch.arange(1, int(age.max()) + 2, dtype=torch.float64, device=age.device)
    mu = beta1 * (1 - 0.5 * 0.96 ** (steps * group["momentum_decay"]))
    product, index = mu.cumprod(0), age.long()
    of_grad = ((1 - mu[index - 1]) / (1 - product[index - 1])).to(grad.dtype)
    of_mean = (mu[index] / (1 - product[index])).to(grad.dtype)
    squares = state["exp_avg_sq"] / (1 - beta2**age).to(grad.dtype)
    return (of_grad * grad + of_mean * state["exp_avg"]) / (squares.sqrt() + group["eps"])


def _radam(group: Group, state: State, grad: Tensor, age: Tensor) -> Tensor:
    """Return RAdam's step at these ages, 0 before it can be rectified; see `_adam`."""
    beta1, beta2 = map(float, group["betas"])
    mean, limit = state["exp_avg"] / (1 - beta1**age).to(grad.dtype), 2 / (1 - beta2) - 1
    if limit <= 5:  # RAdam never uses its second moment
        return mean
    length = limit - 2 * age * beta2**age / (1 - beta2**age)
    squared = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    factor = torch.where(length > 5, squared.clamp(min=0).sqrt() * (1 - beta2**age).sqrt(), 0.0)
    return mean * factor.to(grad.dtype) / (state["exp_avg_sq"].sqrt() + group["eps"])


Update = Callable[[Group, State, Tensor, Tensor], Tensor]
UPDATES: dict[type[torch.optim.Optimizer], Update | None] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.SGD: None,
    SGD: None,
}


def _update_of(optimizer: Any) -> Update | None:
    """Return the function that computes a step of this optimizer; None if a clock only warms it up."""
    kind = type(optimizer)
    if kind not in UPDATES and kind.__name__ != "Lion":
        raise BlockSparseError(
            f"optimizer: a BlockClock supports Adam, AdamW, NAdam, RAdam, SGD and Lion, not {kind.__name__}: use one "
            "of them, or train without a clock, SMET with warmup=None (new blocks then start at the mean second moment "
            "of the others)"
        )
    update = UPDATES.get(kind)
    for group in optimizer.param_groups:
        _check_group(optimizer, group, update is not None)
    return update


def _check_group(optimizer: Any, group: Group, corrects_bias: bool) -> None:
    """Raise a BlockSparseError for settings of a group that a clock cannot serve."""
    if group.get("capturable"):
        kind = type(optimizer).__name__
        raise BlockSparseError(
            f"optimizer: {kind} has capturable=True, but a CUDA graph runs no hooks: use capturable=False"
        )
    largest = max((float(beta) for beta in group.get("betas", ())), default=0.0)
    if corrects_bias and largest > MAX_BETA:
        expected = f"{MAX_BETA} or less, since a BlockClock counts {MAX_AGE:,} steps"
        raise BlockSparseError.expected("betas", expected, largest)


def _read(ages: Tensor) -> Tensor:
    """Return ages, int64 `[nnz]`, from their two digits."""
    digits = ages.long()
    return digits[:, 0] + 256 * digits[:, 1]


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
