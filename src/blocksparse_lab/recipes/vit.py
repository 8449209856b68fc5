"""Vision transformers on small images: settings, facts and trainer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..data.images import Images
from ..models.gpt import GPTConfig
from ..models.vit import ViT
from ..training.settings import EpochSettings
from ..training.trainer import Task, Trainer, device_of
from .grow import GrowTask, Growth
from .resnet import ImageRows, ImageTask, multiply_adds

NETWORK = "vit"


@dataclass(frozen=True)
class ViTSettings(EpochSettings):
    """A vision transformer and its training by AdamW, whose learning rate rises over the first tenth of the steps."""

    model: GPTConfig = field(default_factory=lambda: GPTConfig(width=128, layers=3, context=16))
    epochs: int = 5
    batch: int = 64
    weight_decay: float = 0.01


def trainer(settings: ViTSettings, images: Images, run: str | Path, growth: Growth | None = None) -> Trainer:
    """Return a trainer of a new network in a run folder; `growth` moves its blocks."""
    s = settings
    model = ViT(s.model, images.shape, len(images.classes))
    weights = [weight for weight in model.layers.parameters() if weight.dim() > 1]
    facts: dict[str, Any] = {
        "data": images.name,
        "tested": len(images.test),
        "epochs": s.epochs,
        "parameters": sum(p.numel() for p in model.parameters()),
        "density": sum(weight.numel() for weight in weights) / (12 * s.model.layers * s.model.width**2),
        "multiply_adds_per_image": multiply_adds(model, images),
    }
    about = {"network": NETWORK, **asdict(s.model)}
    inner = ImageTask(model, ImageRows(images), s.epochs, s.batch, seed=s.seed, device=device_of(s.device), about=about)
    task: Task = inner if growth is None else GrowTask(inner, growth, inner.steps, s.seed)
    return Trainer(task, run, s.in_epochs(inner.steps_per_epoch, warmup=inner.steps // 10, save_minutes=2.0), facts)
