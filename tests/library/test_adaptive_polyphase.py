"""Adaptive polyphase sampling, and networks that do not see circular shifts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse_lab.models.resnet import ResNet

HALF = bs.nn.AdaptivePolyphaseDownsample


def by_definition(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    chosen, images = [], []
    for image in x:
        four = [image[:, i::2, j::2] for i in range(2) for j in range(2)]
        best = max(range(4), key=lambda k: four[k].norm().item())
        chosen.append(best)
        images.append(four[best])
    return torch.stack(images), chosen


def binomial(x: torch.Tensor, weights: list[int]) -> torch.Tensor:
    line = torch.tensor(weights, dtype=x.dtype) / sum(weights)
    before = (len(weights) - 1) // 2
    for axis in (2, 3):
        x = sum(w * x.roll(before - i, axis) for i, w in enumerate(line))
    return x


@pytest.mark.parametrize("blur", [1, 2, 3, 4])
def test_it_is_the_definition(blur):
    x = torch.randn(5, 3, 8, 6, dtype=torch.float64)
    y, index = HALF(blur)(x)
    weights = {1: [1], 2: [1, 1], 3: [1, 2, 1], 4: [1, 3, 3, 1]}[blur]
    _, chosen = by_definition(x)
    assert index.tolist() == chosen  # of what is not blurred
    blurred = binomial(x, weights)
    for image, k, found in zip(blurred, chosen, y, strict=True):
        torch.testing.assert_close(found, image[:, k // 2 :: 2, k % 2 :: 2])


def test_a_given_index_is_taken():
    x = torch.randn(3, 2, 4, 4)
    index = torch.tensor([3, 0, 2])
    y, same = HALF()(x, index)
    assert same is index
    torch.testing.assert_close(y[0], x[0, :, 1::2, 1::2])


def test_there_and_back():
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    y, index = HALF()(x)
    big = bs.nn.AdaptivePolyphaseUpsample()(y, index)
    for image, original, k in zip(big, x, index.tolist(), strict=True):
        kept = torch.zeros_like(original)
        kept[:, k // 2 :: 2, k % 2 :: 2] = original[:, k // 2 :: 2, k % 2 :: 2]
        torch.testing.assert_close(image, kept)
    smooth = bs.nn.AdaptivePolyphaseUpsample(blur=3)(y, index)
    torch.testing.assert_close(smooth, 4 * binomial(big, [1, 2, 1]))


@pytest.mark.parametrize("blur", [1, 3])
def test_gradients(blur):
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    y, index = HALF(blur)(x)
    y = y.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: HALF(blur)(x, index)[0], x)
    assert torch.autograd.gradcheck(lambda y: bs.nn.AdaptivePolyphaseUpsample(blur)(y, index), y)
    assert torch.autograd.gradgradcheck(lambda x: HALF(blur)(x, index)[0] ** 2, x)


@pytest.mark.parametrize("blur", [1, 3])
def test_transforms(blur):
    down, up = HALF(blur), bs.nn.AdaptivePolyphaseUpsample(blur)
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    y, index = down(x)
    close, vmap = torch.testing.assert_close, torch.func.vmap
    close(vmap(lambda image: down(image[None])[0][0])(x), y)
    close(vmap(lambda y, index: up(y[None], index[None])[0])(y, index), up(y, index))
    several = torch.stack([index, 3 - index])
    close(vmap(lambda index: up(y, index))(several), torch.stack([up(y, each) for each in several]))

    def loss(x):
        return down(x)[0].pow(3).sum()

    for_each = vmap(torch.func.grad(lambda image: loss(image[None])))(x)
    close(for_each, torch.func.grad(loss)(x))
    for function, given in ((lambda x: down(x)[0], x), (lambda y: up(y, index), y)):
        jacobian = torch.autograd.functional.jacobian(function, given)
        close(torch.func.jacrev(function)(given), jacobian)
        close(torch.autograd.functional.jacobian(function, given, vectorize=True), jacobian)
    hessian = torch.autograd.functional.hessian(loss, x)
    close(torch.autograd.functional.hessian(loss, x, vectorize=True), hessian)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of PyTorch's own making
def test_compiled_without_a_break():
    x = torch.randn(3, 2, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y, index = torch.compile(HALF(), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, HALF()(x, index)[0])
    y.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_stays():
    x = torch.randn(3, 2, 4, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    y, index = HALF()(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(y, x, torch.ones_like(y))[0].is_contiguous(memory_format=torch.channels_last)
    assert bs.nn.AdaptivePolyphaseUpsample()(y, index).is_contiguous(memory_format=torch.channels_last)


def consistency(model: torch.nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """The part of all circular shifts that leave the class as it is, and the largest difference of a logit."""
    with torch.no_grad():
        expected = model(images)
        same = worst = 0.0
        size = images.shape[-1]
        for i in range(size):
            shifted = torch.cat([images.roll((i, j), dims=(2, 3)) for j in range(size)])
            found = model(shifted).unflatten(0, (size, -1))
            same += (found.argmax(-1) == expected.argmax(-1)).sum().item()
            worst = max(worst, (found - expected).abs().max().item())
    return same / (size * size * len(images)), worst


@pytest.mark.parametrize("density", [pytest.param(None, marks=pytest.mark.full), 0.5])
def test_no_circular_shift_of_32_by_32_is_seen(density):
    """All 1,024 shifts, of an untrained network."""
    torch.manual_seed(0)
    model = ResNet(width=4, blocks=(1, 1, 1), density=density, block_size=2, downsample="aps", blur=3).eval()
    part, worst = consistency(model, torch.randn(1, 3, 32, 32))
    assert part == 1
    assert worst < 1e-5


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_plain_strides_see_shifts(padding_mode):
    torch.manual_seed(0)
    strided = ResNet(width=4, blocks=(1, 1, 1), padding_mode=padding_mode).eval()
    images = torch.randn(32, 3, 16, 16)
    with torch.no_grad():  # an untrained network's outputs hardly differ: their scale is set by these images
        strided.head.bias -= strided(images).mean(0)
    assert consistency(strided, images)[0] < 0.9


def test_it_trains():
    torch.manual_seed(0)
    model = ResNet(classes=2, channels=1, width=8, blocks=(1, 1), density=0.5, block_size=4, downsample="aps")
    images = torch.randn(8, 1, 8, 8)
    labels = torch.arange(8) % 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


def test_bad_input():
    down, up = HALF(), bs.nn.AdaptivePolyphaseUpsample()
    x = torch.randn(2, 1, 4, 4)
    for call, message in [
        (lambda: down(x[:, :, :3]), r"x: expected an even height and width, got \[2, 1, 3, 4\]"),
        (lambda: down(x[0]), r"x: expected a tensor \[n, channels, height, width\], got \[1, 4, 4\]"),
        (lambda: down(x, torch.zeros(3, dtype=torch.int64)), r"index: expected int64 \[2\], one for each image"),
        (lambda: up(x, torch.zeros(2)), r"index: expected int64 \[2\]"),
        (lambda: HALF(0), "blur: expected an int, 1 or more, got 0"),
        (lambda: ResNet(downsample="pool"), "downsample: expected one of stride, aps, got 'pool'"),
        (
            lambda: ResNet(downsample="aps", padding_mode="zeros"),
            "padding_mode: expected circular with aps, got 'zeros'",
        ),
        (lambda: ResNet(padding_mode="reflect"), "padding_mode: expected zeros or circular with stride, got 'reflect'"),
        (lambda: ResNet(width=0), "width: expected an int, 1 or more, got 0"),
        (lambda: ResNet(width=4, blocks=(1, 1), downsample="aps")(torch.randn(1, 3, 5, 5)), "an even height and width"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()
