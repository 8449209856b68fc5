"""PixelCNN++: published number of parameters, exact causality, probabilities that sum to 1, exact bands."""

from __future__ import annotations

import pytest
import torch

import blocksparse as bs
from blocksparse_lab.models import logistic_mixture as mixture
from blocksparse_lab.models.pixelcnn import PixelCNN, parameter_count

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def half_random(outputs: int, inputs: int) -> bs.BlockLayout:
    return bs.patterns.random((outputs, inputs), 4, density=0.5, seed=0)


VARIANTS = {
    "dense": {},
    "groups": {"sparse": 2, "depth": 2},
    "blocks": {"sparse": 2, "block_size": 2, "depth": 2},
    "layout": {"sparse": half_random},
    "grey": {"channels": 1, "mixtures": 3},
}

SAMPLED = [pytest.param(name, marks=[pytest.mark.full] * (name == "layout")) for name in VARIANTS]


def model(variant: str = "dense", **options) -> PixelCNN:
    torch.manual_seed(3)
    made = PixelCNN(8, 1, **({"mixtures": 2} | VARIANTS[variant] | options))
    made.initialise(torch.rand(4, made.channels, 8, 8) * 2 - 1)
    return made.eval()


# -- the network -----------------------------------------------------------------------------------------------------


def test_as_many_parameters_as_the_original():
    assert parameter_count() == 53_659_080
    assert parameter_count(filters=16, resnets=1) == 147_144


def test_sparse_and_deeper_has_about_as_many():
    for options in ({"sparse": 4, "depth": 4}, {"sparse": 2, "block_size": 16, "depth": 2}):
        assert abs(parameter_count(160, 5, **options) / 53_659_080 - 1) < 0.05


@pytest.mark.parametrize(
    "variant", ["dense", "groups", "blocks", pytest.param("layout", marks=pytest.mark.full), "grey"]
)
def test_an_output_depends_on_no_pixel_from_its_own_on(variant):
    net = model(variant).double()
    x = (torch.rand(1, net.channels, 8, 8, dtype=torch.float64) * 2 - 1).requires_grad_()
    y = net(x)
    order = torch.arange(64).view(8, 8)
    seen = torch.ones(64, 64)
    for at in (*range(20), *range(27, 64, 3)):
        (grad,) = torch.autograd.grad((y[0, :, at // 8, at % 8] * torch.randn(y.shape[1])).sum(), x, retain_graph=True)
        assert (grad[0][:, order >= at] == 0).all()
        seen[at] = grad[0].abs().amax(0).flatten()
    # Each pixel depends on the nearest ones before it, and the last on the very first.
    for at in range(1, 64):
        if at % 8:
            assert seen[at, at - 1] > 0
        if at >= 8:
            assert seen[at, at - 8] > 0
    assert seen[63, 0] > 0


def test_no_pixel_after_its_own_changes_an_output():
    # The same without gradients: NaN in a later pixel changes nothing.
    net = model("groups")
    x = torch.rand(1, 3, 8, 8) * 2 - 1
    other = x.clone()
    other.view(1, 3, 64)[..., 30:] = torch.nan
    before, after = (net(one).flatten(2)[..., :31] for one in (x, other))
    assert torch.equal(before, after)


@pytest.mark.parametrize("variant", ["dense", "groups", "blocks"])
def test_initialised_outputs_have_mean_0_and_deviation_1(variant):
    net = model(variant)
    seen = {}
    for name, module in net.named_modules():
        if isinstance(module, bs.nn.WeightNorm):
            module.register_forward_hook(lambda m, _, y, name=name: seen.update({name: (m.scale, y)}))
    x = torch.rand(4, 3, 8, 8) * 2 - 1
    net.initialise(x)
    net(x)
    assert len(seen) == sum(isinstance(module, bs.nn.WeightNorm) for module in net.modules())
    for name, (scale, y) in seen.items():
        std, mean = torch.std_mean(y, (0, 2, 3), correction=0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-4 * scale, rtol=0, msg=name)
        torch.testing.assert_close(std, torch.full_like(std, scale), atol=0, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    "variant", ["dense", "groups", "blocks", pytest.param("layout", marks=pytest.mark.full), "grey"]
)
def test_bands_of_rows_are_the_whole(variant):
    net = model(variant)
    x = torch.rand(2, net.channels, 12, 8) * 2 - 1
    with torch.no_grad(), bs.nn.bands(net) as below:
        parts = []
        for y in range(0, 12, 4):
            net(torch.rand_like(x[:, :, :4]))  # earlier content must not matter
            parts.append(net(x[:, :, y : y + 4]))
            below.next()
    whole = net(x)
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(net(x), whole)  # the next call is unaffected


def test_channels_last_is_the_same():
    net, x = model("blocks"), torch.rand(2, 3, 8, 8) * 2 - 1
    torch.testing.assert_close(net(x.to(memory_format=torch.channels_last)), net(x), atol=1e-5, rtol=1e-5)


def test_under_vmap():
    net, x = model("blocks"), torch.rand(2, 1, 3, 8, 8) * 2 - 1
    torch.testing.assert_close(torch.vmap(net)(x), torch.stack([net(one) for one in x]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ({"filters": 0}, "filters"),
        ({"resnets": 1.5}, "resnets"),
        ({"depth": 0}, "depth"),
        ({"channels": 2}, "channels"),
        ({"mixtures": 0}, "mixtures"),
        ({"dropout": 1.0}, "dropout: expected"),
        ({"sparse": 3}, "sparse: expected groups that divide 8 filters, got 3"),
        ({"block_size": 4}, "block_size"),
        ({"sparse": 2, "block_size": 3}, "expected"),
        ({"sparse": lambda outputs, inputs: bs.patterns.dense((4, 4), 4)}, "layout"),
    ],
)
def test_wrong_sizes_are_refused(options, subject):
    with pytest.raises(bs.BlockSparseError, match=subject):
        PixelCNN(**({"filters": 8, "resnets": 1} | options))


@pytest.mark.parametrize("shape", [(1, 3, 8, 6), (1, 3, 7, 8), (1, 1, 8, 8), (3, 8, 8), (1, 3, 0, 8)])
def test_images_of_another_size_are_refused(shape):
    with pytest.raises(bs.BlockSparseError, match=r"images: expected \[n, 3, height, width\], both divisible by 4"):
        model()(torch.zeros(shape))


def test_wrong_causal_layers_are_refused():
    for wrong, shift in ((torch.nn.Conv2d(2, 2, 2), "down"), (torch.nn.Conv2d(2, 2, 3, padding=1), "down")):
        with pytest.raises(bs.BlockSparseError, match="module"):
            bs.nn.Causal2d(wrong, shift)
    with pytest.raises(bs.BlockSparseError, match="shift"):
        bs.nn.Causal2d(torch.nn.Conv2d(2, 2, 2), "up")
    with pytest.raises(bs.BlockSparseError, match="direction"):
        bs.nn.Shift2d("left")


# -- the mixture -----------------------------------------------------------------------------------------------------


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Return parameters of single logistics of 1 channel, `[n, 3, 1, 1]`."""
    means, scales = torch.linspace(-1.2, 1.5, 109, dtype=dtype), torch.linspace(-7, 2, 91, dtype=dtype)
    found = torch.cartesian_prod(means, scales)
    return torch.cat([torch.zeros_like(found[:, :1]), found], 1).view(-1, 3, 1, 1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_probabilities_of_all_levels_add_up_to_one(dtype, bound):
    parameters = grid(dtype)
    total = torch.zeros(len(parameters), dtype=torch.float64)
    for level in range(256):
        x = torch.full((len(parameters), 1, 1, 1), level / 127.5 - 1, dtype=dtype)
        total += mixture.log_prob(x, parameters).double().exp().flatten()
    assert (total - 1).abs().max() < bound


def naive(x: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Compute pixel by pixel from the definition, in float64: x `[n, c, 1, 1]`."""
    n, channels = x.shape[:2]
    found = torch.zeros(n, dtype=torch.float64)
    mixtures = parameters.shape[1] // mixture.outputs(channels, 1)
    for i in range(n):
        p, pixel = parameters[i, :, 0, 0].double(), x[i, :, 0, 0].double()
        logits, rest = p[:mixtures].softmax(0), p[mixtures:].view(channels, -1, mixtures)
        for k in range(mixtures):
            chance = logits[k]
            c = rest[:, 2, k].tanh() if channels == 3 else None
            for colour in range(channels):
                mean = rest[colour, 0, k]
                if colour == 1:
                    mean = mean + c[0] * pixel[0]
                if colour == 2:
                    mean = mean + c[1] * pixel[0] + c[2] * pixel[1]
                scale = rest[colour, 1, k].clamp(min=-7).exp()
                high = torch.sigmoid((pixel[colour] + 1 / 255 - mean) / scale) if pixel[colour] < 0.999 else 1.0
                low = torch.sigmoid((pixel[colour] - 1 / 255 - mean) / scale) if pixel[colour] > -0.999 else 0.0
                chance = chance * (high - low)
            found[i] += chance
    return found.log()


@pytest.mark.parametrize("channels", [1, 3])
def test_log_prob_is_the_definition(channels):
    torch.manual_seed(0)
    parameters = torch.randn(40, mixture.outputs(channels, 4), 1, 1)
    x = mixture.scaled(torch.randint(0, 256, (40, channels, 1, 1)).to(torch.uint8))
    x[:4], x[4:8] = -1, 1
    found = mixture.log_prob(x, parameters).flatten()
    torch.testing.assert_close(found.double(), naive(x, parameters), atol=1e-4, rtol=1e-4)


def test_log_prob_has_finite_gradients_far_from_the_means():
    for mean, log_scale in ((-1.0, -50.0), (300.0, -7.0), (0.0, 150.0), (1e4, 90.0)):
        parameters = torch.zeros(3, 30, 1, 1)
        parameters[:, 10:20], parameters[:, 20:] = mean, log_scale
        parameters.requires_grad_()
        found = mixture.log_prob(torch.tensor([0.9, -0.3, -1.0]).view(3, 1, 1, 1), parameters)
        found.sum().backward()
        assert found.isfinite().all()
        assert parameters.grad.isfinite().all()
    x = torch.rand(2, 3, 2, 2, dtype=torch.float64)
    given = torch.randn(2, 20, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: mixture.log_prob(x, p), (given,))


@pytest.mark.parametrize("channels", [1, 3])
def test_samples_are_distributed_as_log_prob_says(channels):
    torch.manual_seed(0)
    count = 40_000
    parameters = torch.randn(1, mixture.outputs(channels, 3), 1, 1) * 0.5
    drawn = mixture.sample(parameters.expand(count, -1, -1, -1), channels, torch.Generator().manual_seed(1))
    # The entropy is the mean of -log p over samples, and over the levels of one channel.
    found = -mixture.log_prob(drawn, parameters.expand(count, -1, -1, -1)).mean()
    assert torch.equal(mixture.scaled(mixture.levels(drawn)), drawn)
    if channels == 1:
        x = mixture.scaled(torch.arange(256, dtype=torch.uint8)).view(256, 1, 1, 1)
        logs = mixture.log_prob(x, parameters.expand(256, -1, -1, -1)).flatten()
        assert abs(found + (logs.exp() * logs).sum()) < 0.03
        counts = torch.bincount(mixture.levels(drawn).flatten().long(), minlength=256) / count
        assert (counts - logs.exp()).abs().max() < 0.01
    else:
        wrong = drawn[torch.randperm(count)][:, :1]
        mixed = torch.cat([wrong, drawn[:, 1:]], 1)  # the red of another pixel is less likely
        assert -mixture.log_prob(mixed, parameters.expand(count, -1, -1, -1)).mean() > found


def test_levels_and_back():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(mixture.levels(mixture.scaled(every)), every)
    with pytest.raises(bs.BlockSparseError, match=r"parameters: expected \[2, a multiple of 10, 4, 4\]"):
        mixture.log_prob(torch.zeros(2, 3, 4, 4), torch.zeros(2, 30, 4, 5))


def test_a_few_steps_lower_the_loss():
    net = model("groups").train()
    x = mixture.scaled(torch.randint(90, 110, (8, 3, 8, 8)).to(torch.uint8))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = -net.log_prob(x).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
