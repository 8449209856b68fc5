"""Drawings of letters and digits in the typefaces that matplotlib ships, distorted at random."""

from __future__ import annotations

import string
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 32  # pixels of a drawing
PATCH = (8, 4)  # pixels that are neighbours in a flattened drawing
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# Small letters that look like their capitals count as these, as in EMNIST's 47 balanced classes.
CASELESS = "cijklmopsuvwxyz"
CLASSES = "".join(character for character in CHARACTERS if character not in CASELESS)
TYPEFACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10"),
)


def draw(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw `count` characters, each in a random typeface, turned, scaled, slanted, shifted, dimmed, and with noise.

    Returns:
        float32 `[count, 1024]` with mean 0 and variance 1, in patches of 8 x 4 pixels; int64 `[count]`, indices into
        `CLASSES`.

    >>> from blocksparse_lab.data import letters
    >>> drawings, labels = letters.draw(100, seed=1)
    >>> drawings.shape, labels.shape, len(letters.CLASSES)
    (torch.Size([100, 1024]), torch.Size([100]), 47)
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    typeface = torch.randint(len(TYPEFACES), (count,), generator=generator)
    character = torch.randint(len(CHARACTERS), (count,), generator=generator)
    angle, slant = uniform(-0.2, 0.2), uniform(-0.2, 0.2)
    width, height = uniform(-0.15, 0.15).exp(), uniform(-0.15, 0.15).exp()
    cos, sin = angle.cos(), angle.sin()
    across = torch.stack([cos * width, (slant * cos - sin) * height, uniform(-0.1, 0.1)], 1)
    down = torch.stack([sin * width, (slant * sin + cos) * height, uniform(-0.1, 0.1)], 1)
    to_original = 0.8 * torch.stack([across, down], 1)  # the affine map from a drawing to its original
    originals = _originals()
    drawings = torch.empty(count, SIDE * SIDE)
    for part in torch.arange(count).split(2000):  # a few MB at a time stay in the cache
        grid = F.affine_grid(to_original[part], [len(part), 1, SIDE, SIDE], align_corners=False)
        original = originals[typeface[part], character[part]].float().unsqueeze(1)
        pixels = F.grid_sample(original, grid, align_corners=False).squeeze(1)
        drawings[part] = _in_patches(pixels)
    drawings *= (uniform(0.5, 1) / 255).unsqueeze(1)
    drawings += 0.1 * torch.randn(drawings.shape, generator=generator)
    class_of = [CLASSES.index(c.upper() if c in CASELESS else c) for c in CHARACTERS]
    return (drawings - drawings.mean()) / drawings.std(), torch.tensor(class_of)[character]


def as_pictures(drawings: Tensor) -> Tensor:
    """Put the pixels of drawings `[n, 1024]` back into rows and columns, `[n, 32, 32]`."""
    patches = (-1, SIDE // PATCH[0], SIDE // PATCH[1], *PATCH)
    return drawings.reshape(patches).transpose(2, 3).reshape(-1, SIDE, SIDE)


def _in_patches(pixels: Tensor) -> Tensor:
    """Flatten pictures `[n, 32, 32]` patch by patch, so that a block of weights sees pixels close to each other."""
    patches = (-1, SIDE // PATCH[0], PATCH[0], SIDE // PATCH[1], PATCH[1])
    return pixels.reshape(patches).transpose(2, 3).flatten(1)


def _originals(side: int = 64) -> Tensor:
    """Draw each character upright in each typeface, uint8 `[typefaces, characters, side, side]`."""
    import matplotlib
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    drawn = np.zeros((len(TYPEFACES), len(CHARACTERS), side, side), np.uint8)
    for row, typeface in zip(drawn, TYPEFACES, strict=True):
        font = ImageFont.truetype(folder / f"{typeface}.ttf", side * 5 // 8)
        for place, character in zip(row, CHARACTERS, strict=True):
            image = Image.new("L", (side, side))
            ImageDraw.Draw(image).text((side / 2, 0.72 * side), character, fill=255, font=font, anchor="ms")
            place[:] = np.asarray(image)
    return torch.from_numpy(drawn)
