"""A diffusion-convolutional network that classifies the nodes of a graph."""

from __future__ import annotations

from torch import Tensor, nn

from blocksparse.nn import DiffusionConv


class DCNN(nn.Module):
    """A diffusion-convolution, and a linear layer on its output for each node.

    Shapes: rows of a `bs.nn.Diffusion`'s output, `[nodes, hops + 1, features]` or flattened to
    `[nodes, (hops + 1) * features]`, to `[nodes, classes]`.

    Example:
        >>> import torch, blocksparse as bs
        >>> from blocksparse_lab.models.dcnn import DCNN
        >>> diffusion = bs.nn.Diffusion(torch.tensor([[0, 1], [1, 2]]), nodes=3, hops=2)
        >>> DCNN(features=5, classes=2)(diffusion(torch.randn(3, 5))).shape
        torch.Size([3, 2])

    Source: Atwood, Towsley, Diffusion-convolutional neural networks (2016).
    """

    def __init__(self, features: int, classes: int, hops: int = 2):
        super().__init__()
        self.conv = DiffusionConv(features, hops)
        self.output = nn.Linear(self.conv.weight.numel(), classes)

    def forward(self, z: Tensor) -> Tensor:
        z = z if z.dim() == 3 else z.unflatten(1, tuple(self.conv.weight.shape))
        return self.output(self.conv(z).flatten(1))
