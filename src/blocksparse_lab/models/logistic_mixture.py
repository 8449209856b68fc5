"""Discretised mixture of logistic distributions over the 256 levels of each colour of a pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse.errors import BlockSparseError

LEVELS = 256
# Half the distance of two levels; levels are from -1 to 1.
HALF = 1 / (LEVELS - 1)
MIN_LOG_SCALE = -7.0
# The first and last level lie beyond these bounds and get all probability below and above.
EDGE = 0.999


def scaled(images: Tensor) -> Tensor:
    """Scale uint8 levels to numbers from -1 to 1."""
    return images.float() * (2 * HALF) - 1


def levels(x: Tensor) -> Tensor:
    """Return the nearest uint8 levels, the inverse of `scaled`."""
    return ((x.clamp(-1, 1) + 1) / (2 * HALF)).round().to(torch.uint8)


def outputs(channels: int, mixtures: int = 10) -> int:
    """Return how many numbers a network outputs per pixel of 1 or 3 channels.

    >>> from blocksparse_lab.models.logistic_mixture import outputs
    >>> outputs(channels=3), outputs(channels=1)
    (100, 30)
    """
    if channels not in (1, 3):
        raise BlockSparseError.expected("channels", "1 or 3", repr(channels))
    if mixtures < 1:
        raise BlockSparseError.expected("mixtures", "a positive int", repr(mixtures))
    return mixtures * (1 + channels * (3 if channels == 3 else 2))


def log_prob(x: Tensor, parameters: Tensor) -> Tensor:
    """Return the logarithm of the probability of each pixel, in nats.

    A pixel belongs to one component of the mixture. In it, each colour is logistic about a mean that depends linearly
    on the previous colours: green on red, blue on red and green. A level has the probability of the interval around it;
    the first and last level also have all below and above.

    Args:
        x: `[n, channels, height, width]`, levels from -1 to 1 (`scaled`); 1 or 3 channels.
        parameters: `[n, outputs(channels, mixtures), height, width]`: the logits of the components, then for each
            colour means, log-scales (at least -7) and, for 3 channels, coefficients before their tanh. Red's
            coefficients are those of red for green, green's those of red for blue, blue's those of green for blue.

    Returns:
        `[n, height, width]` in float32, or in float64 if x is float64.

    The difference of the distribution function over an interval is computed as sigma(a) sigma(-b) (1 - exp(b - a)),
    which loses no digits. The original takes the difference, and the density where it is at most 1e-5; then the
    probabilities of all levels add up to 1 only within 1.5e-5 (worst at log-scales about -6.9), not within rounding.

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017).
    """
    x = x if x.dtype == torch.float64 else x.float()
    logits, means, log_scales, coefficients = _parts(parameters.to(x.dtype), x.shape)
    x = x.unsqueeze(2)
    if coefficients is not None:
        means = torch.stack([_mean(means, coefficients, x, colour) for colour in range(3)], 1)
    inverse = torch.exp(-log_scales)
    off = (x - means) * inverse
    above, below = off + HALF * inverse, off - HALF * inverse
    low, high = F.logsigmoid(above), F.logsigmoid(-below)
    # If the scale overflows, the interval must not, for the sake of the gradient.
    inner = low + high + torch.log(-torch.expm1(-(2 * HALF * inverse).clamp(min=1e-30)))
    each = torch.where(x < -EDGE, low, torch.where(x > EDGE, high, inner))
    return torch.logsumexp(each.sum(1) + logits.log_softmax(1), 1)


def sample(parameters: Tensor, channels: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw levels from -1 to 1, `[n, channels, height, width]`, from the mixture; `parameters` as for `log_prob`."""
    n, _, height, width = parameters.shape
    logits, *others = _parts(parameters.float(), (n, channels, height, width))

    def uniform(like: Tensor) -> Tensor:
        # Avoid 0 and 1, whose logarithms are infinite.
        return torch.rand(like.shape, generator=generator, device=like.device).clamp(1e-5, 1 - 1e-5)

    # Choose the component by its logits with Gumbel noise.
    part = (logits - torch.log(-torch.log(uniform(logits)))).argmax(1, keepdim=True)
    index = part.unsqueeze(1).expand(-1, channels, -1, -1, -1)
    means, log_scales, *rest = (one.gather(2, index) for one in others if one is not None)
    drawn = torch.zeros_like(means)
    u = uniform(means)
    for colour in range(channels):
        mean = _mean(means, rest[0], drawn, colour) if rest else means[:, colour]
        noise = torch.exp(log_scales[:, colour]) * (torch.log(u[:, colour]) - torch.log1p(-u[:, colour]))
        # The next colour sees the level, as in training.
        drawn[:, colour] = scaled(levels(mean + noise))
    return drawn.squeeze(2)


def _parts(parameters: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split into logits `[n, mixtures, h, w]` and means, log-scales, coefficients `[n, channels, mixtures, h, w]`."""
    n, channels, height, width = shape
    each = outputs(channels, 1)
    if parameters.dim() != 4 or parameters.shape[1] % each or tuple(parameters.shape[2:]) != (height, width):
        wanted = f"[{n}, a multiple of {each}, {height}, {width}]"
        raise BlockSparseError.expected("parameters", wanted, list(parameters.shape))
    mixtures = parameters.shape[1] // each
    logits, rest = parameters[:, :mixtures], parameters[:, mixtures:]
    means, log_scales, *coefficients = rest.unflatten(1, (channels, -1, mixtures)).unbind(2)
    return logits, means, log_scales.clamp(min=MIN_LOG_SCALE), coefficients[0].tanh() if coefficients else None


def _mean(means: Tensor, coefficients: Tensor, x: Tensor, colour: int) -> Tensor:
    """Return the means of a colour `[n, mixtures, h, w]`, given the previous colours in x `[n, 3, 1, h, w]`."""
    before = {0: (), 1: ((0, 0),), 2: ((1, 0), (2, 1))}[colour]  # (coefficient, colour)
    return sum((coefficients[:, c] * x[:, of] for c, of in before), start=means[:, colour])
