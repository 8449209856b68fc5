"""Time a training step of the transformer of `gpt-methods`, wide with fixed blocks, against the dense one.

Both have equal multiply-adds per byte. A step is forward, cross-entropy, backward and Adam, on the same random bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blocksparse.measure import Call
from blocksparse_lab.experiments.transformers import EXPERIMENTS, TransformerExperiment
from blocksparse_lab.models.gpt import GPTConfig
from blocksparse_lab.recipes import gpt
from targets.rows import RowIterator, race, set_threads, timing_options


def rows(budget: float = 5.0, quick: bool = False) -> RowIterator:
    """Time a step with one thread and with all, as a multiple of a dense one; `quick` uses few bytes."""
    experiment = EXPERIMENTS["gpt-methods"]
    assert isinstance(experiment, TransformerExperiment)
    configs = {name: experiment.contenders[name].config for name in ("dense", "fixed")}
    batch = 2 if quick else experiment.settings.batch
    for threads in sorted({1, torch.get_num_threads()}):
        with set_threads(threads):
            steps = {name: _training_step(config, batch) for name, config in configs.items()}
            timed = race(steps, **timing_options(budget, quick))
        wide = configs["fixed"]
        work = (
            f"a step, transformer of width {wide.width}, blocks of {wide.block_size}, density {wide.density:g}, "
            f"{batch} texts of {wide.context} bytes, float32, {threads} thread{'s' * (threads > 1)}"
        )
        yield timed.row(work, "fixed", "dense", f"dense of width {configs['dense'].width}, equal multiply-adds")


def _training_step(config: GPTConfig, batch: int) -> Call:
    model = gpt.network(config).train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    text = torch.randint(256, (config.context + 1, batch), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        logits, _ = model(text[:-1])
        F.cross_entropy(logits.flatten(0, 1), text[1:].flatten()).backward()
        optimizer.step()

    return step
