"""Named shapes of convolutions for tests, benchmarks and tuning, with target speed-ups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blocksparse.errors import BlockSparseError

from .linear_specs import ProductSpec

PATTERNS = ("random", "block-diagonal")


@dataclass(frozen=True)
class ConvSpec(ProductSpec):
    """One pass of a block-sparse 2-D convolution.

    `size` is the height and width of the input; `padding` is as in torch. `pattern` is "random" with the given density,
    or "block-diagonal", which sets the density. `pass_` is "forward", "dgrad", "wgrad" or "train" (all through
    autograd).

    >>> ConvSpec(256, 256, size=28, images=16, density=0.25)
    ConvSpec(256x256 3x3, 16 images 28x28, block 32, density 0.25, float32 forward)
    """

    out_channels: int
    in_channels: int
    size: int
    images: int = 16
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    block: int = 32
    density: float = 0.1
    dtype: str = "float32"
    pass_: str = "forward"
    pattern: str = "random"

    def __post_init__(self) -> None:
        sizes = ("size", "images", "kernel", "stride")
        self._check(sizes, ("out_channels", "in_channels"), PATTERNS)
        if self.padding < 0:
            raise BlockSparseError.expected("padding", "an int, 0 or more", self.padding)
        if self.kernel > self.size + 2 * self.padding:
            raise BlockSparseError.expected("kernel", f"at most the padded image of {self.size}", self.kernel)

    def shrunk(self, by: int) -> ConvSpec:
        """Return a smaller spec to try a program with: `by` times fewer and `by` times smaller images."""
        return replace(self, images=max(self.images // by, 1), size=max(self.size // by, self.kernel))

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def tokens(self) -> int:
        """How often each block is multiplied: positions times taps, including those in the padding."""
        return self.images * self.out_size**2 * self.kernel**2

    def __repr__(self) -> str:
        pattern = f"density {self.density:g}" if self.pattern == "random" else self.pattern
        kernel = f"{self.kernel}x{self.kernel}" + (f" stride {self.stride}" if self.stride > 1 else "")
        return (
            f"ConvSpec({self.out_channels}x{self.in_channels} {kernel}, {self.images} images "
            f"{self.size}x{self.size}, block {self.block}, {pattern}, {self.dtype} {self.pass_})"
        )


@dataclass(frozen=True)
class ConvTarget:
    """A spec and the target speed-up over a peer in each of the three passes."""

    spec: ConvSpec
    peer: str
    ratio: float


LAYER = ConvSpec(256, 256, size=28)

# ResNet-50 on images of 224x224: the 3x3 convolutions of its stages, and the 1x1 around them.
RESNET50 = {
    **{
        f"resnet50-{stage}-3x3": ConvSpec(channels, channels, size=size)
        for stage, channels, size in (("conv2", 64, 56), ("conv3", 128, 28), ("conv4", 256, 14), ("conv5", 512, 7))
    },
    **{
        f"resnet50-{stage}-1x1": ConvSpec(4 * channels, channels, size=size, kernel=1, padding=0)
        for stage, channels, size in (("conv2", 64, 56), ("conv3", 128, 28), ("conv4", 256, 14), ("conv5", 512, 7))
    },
    "resnet50-conv4-3x3-stride2": ConvSpec(256, 256, size=28, stride=2),
    "resnet50-conv4-shortcut": ConvSpec(1024, 512, size=28, kernel=1, stride=2, padding=0),
}
# PixelCNN++ on CIFAR-10: 160 filters, concat_elu before each convolution, three resolutions. Its kernels are 2x3 and
# 2x2; only the square ones are timed.
PIXELCNN = {f"pixelcnn-{size}": ConvSpec(160, 320, size=size, kernel=2, padding=1) for size in (32, 16, 8)}
LAYERS = {"reach": LAYER, **RESNET50, **PIXELCNN}

REACH = (
    ConvTarget(LAYER, "dense", 7.0),
    ConvTarget(replace(LAYER, density=0.25), "dense", 2.8),
    ConvTarget(replace(LAYER, pattern="block-diagonal"), "grouped", 1.0),
    ConvTarget(replace(LAYER, images=1, pattern="block-diagonal"), "grouped", 1.0),
)

# Time is linear in nnz in each pass; the intercept is at most this fraction of the dense time.
LINE_DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
LINE_INTERCEPT = 0.05

# Targets on an H200 against cuDNN, for each pass.
GPU_REACH = (
    ConvTarget(replace(LAYER, images=64, dtype="bfloat16"), "dense", 3.0),
    ConvTarget(replace(LAYER, images=64, dtype="bfloat16", pattern="block-diagonal"), "grouped", 1.0),
)
