"""Makes a trained model block-sparse, and trains it to compute what it computed before."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..checked import checked_block, integer, number, positive_fraction
from ..conversion.speed import Example
from ..errors import BlockSparseError
from ..sparsity.calibration.calibrate import Batches
from ..sparsity.distillation import Distillation
from ..sparsity.feature_order import reorder_features
from ..surgery.model_tools import copy_model, unwrapped_model
from ..surgery.prunable import Skip, skip_by_name
from ..surgery.tied import tied_names, untie_output_layers
from .batches import BatchReader, Data, Loss
from .measures import check_finite_parameters, default_block_size, first_example
from .result import CompressionResult
from .run_folder import RunFolder
from .stages import CompressionRun, Evaluate
from .training import Budget, Training

DEFAULT_MINUTES = 10.0


@torch.inference_mode(False)
def compress(
    model: nn.Module,
    data: Batches,
    density: float = 0.1,
    block_size: int | tuple[int, int] | None = None,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    evaluate: Evaluate | None = None,
    folder: str | Path | None = None,
    skip: Skip = (),
    example: Example | None = None,
    hidden: float = 0.0,
    seed: int = 0,
) -> CompressionResult:
    """Make a trained model block-sparse and fast, and train it to compute what it computed before.

    The weights are fitted to the data at `density`, as `sparsify` does, and at a higher density. The denser model loses
    blocks in stages while it is trained against the teacher's outputs, and on labels if there are any. If the model
    fitted at `density` does better after a few steps, or the time is short, that one is trained instead. Layers that
    are not faster block-sparse on the example stay dense. A block-sparse output layer gets a weight of its own if it
    shared that of an embedding, which stays dense. Hidden features are reordered first, as by
    `sparsity.permute_features`, unless `hidden` is given. An eighth of the data is held out: at most 1,024 samples, or
    128 if each has 64 tokens or more. The model that is best on it at the target density is returned. Its weights are
    those of a step or averages over steps. It is never worse on the held-out data than the model fitted at this density
    in one shot. A short test finds the learning rate.

    Args:
        model: a trained model; it stays as it is. If it is compiled or parallel, the model inside counts.
        data: two batches of its inputs or more: tensors, tuples or lists of arguments, or dicts of arguments by name.
            One value more than the model has arguments is the label. Batches up to 1 GiB are read once and kept.
        density: fraction of their parameters that weights keep, 0.1 by default. Weights that stay dense because they
            keep all of their blocks count; those that would be slower, or are skipped, do not.
        block_size: an int or (rows, columns); by default 16 for float32 on CPUs, and 32 otherwise.
        minutes: time to use, 10 by default. The fit at the start ends after 0.75 of it at the latest; weights that it
            has not reached then keep their largest blocks. A step that has begun is finished.
        steps: number of training steps instead of a time.
        teacher: the model to agree with; by default the model itself.
        loss: a function of the model's output and the batch that returns a loss to add. By default the `loss` in the
            output, as of transformers with labels, or cross-entropy if the label has one class per row of the output.
        evaluate: a function of a model that returns a number, higher for better ones. It then decides which model is
            the best, and its results are in the curve.
        folder: folder for the best model so far, `best.safetensors`, the one fitted in one shot, `fit.safetensors`, and
            `curve.json`. `load_sparsified` takes what `safetensors.torch.load_file` reads. An interrupted run in it is
            resumed. It needs the same model, teacher, `density`, `block_size`, `skip`, `hidden` and number of labels;
            pass the same data and `loss` too. Other data give a warning, and so does another run that writes to it
            meanwhile.
        skip: modules, names or shell patterns of weights that stay dense, as for `sparsify`.
        example: inputs to measure speeds on, as for `sparsify`; by default the first held-out batch.
        hidden: weight of the error of hidden layers; see `sparsity.Distillation`.
        seed: seed of the order of batches, 0 by default.

    Returns:
        The model with its curve. After a KeyboardInterrupt, the best so far; before the first fit there is none, and
        the interrupt is raised.

    Raises:
        BlockSparseError: options out of range, both `minutes` and `steps`, fewer than two batches, labels in some
            tuples only, data that a model does not accept or that are too large, parameters that are not finite,
            a teacher with other outputs or with outputs that are not finite, a model without weights to train, or a
            folder of another run, with a `curve.json` of another program, or one that cannot be written. A
            `SparsityWarning` says if nothing became sparse, the density was not reached, the budget was too short to
            fit or train, labels are ignored, or the disk is full.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        >>> result = bs.compress(model, torch.randn(256, 512).split(32), density=0.25, steps=20)
        >>> result.model(torch.randn(3, 512)).shape, result.curve[0].density
        (torch.Size([3, 512]), 1.0)

    Source: Kurtic et al., Sparse fine-tuning for inference acceleration of large language models (2023).
    """
    density = positive_fraction("density", density)
    if minutes is not None and steps is not None:
        raise BlockSparseError("minutes and steps: give one of them, the other follows from it.")
    if steps is not None:
        integer("steps", steps, 1)
    else:
        minutes = number("minutes", DEFAULT_MINUTES if minutes is None else minutes, 0)
    hidden, seed = number("hidden", hidden, 0), integer("seed", seed, 0)
    model = unwrapped_model(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BlockSparseError.expected("model", "parameters to train (call model.requires_grad_(True))", "none")
    check_finite_parameters(model)
    block_size = checked_block(default_block_size(model) if block_size is None else block_size)
    if teacher is not None:
        teacher = unwrapped_model(teacher, "teacher")
        check_finite_parameters(teacher, "teacher")
    run_folder = None if folder is None else RunFolder(folder)
    budget = Budget(minutes, steps)
    read = Data.read(data)
    reader = BatchReader(model, loss)
    labels = reader.count_labels([*read.train, *read.held_out])
    example = first_example(reader, read.held_out) if example is None else example
    skip = skip_by_name(model, skip)
    if run_folder is not None:
        run_folder.settings = {
            "density": density,
            "block_size": list(block_size),
            "skip": sorted({*map(str, [skip] if isinstance(skip, str | nn.Module) else skip)}),
            "hidden": hidden,
            "model": _checksum(model),
            "teacher": _checksum(model if teacher is None else teacher),
            "labels": labels,
            "data": read.checksum(),
        }
    untied: dict[str, str] = {}
    if tied_names(model):
        model = copy_model(model)
        untied = untie_output_layers(model)
    if not hidden:  # the hidden layers of another teacher, or of an earlier run, may have another order
        model = reorder_features(model, example, density, block_size, skip)
    dense_model = copy_model(model).eval()
    teacher = dense_model if teacher is None else teacher
    kind = reader.output_kind(dense_model, read.held_out[0], warn=True)
    reader.warn_of_unknown_classes(dense_model, [*read.held_out, *read.train])
    rows = reader.rows_per_sample(dense_model, read.held_out[0])
    read.limit_held_out(rows)
    distillation = Distillation(teacher, copy_model(model), output=kind, hidden=hidden)
    run = CompressionRun(
        dense_model=dense_model,
        training=Training(distillation, reader, read, budget, seed),
        target=density,
        block_size=block_size,
        example=example,
        evaluate=evaluate,
        folder=run_folder,
        has_steps=rows > 1,
        untied=untied,
    )
    run.training.check()
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # timings and dropout draw random numbers
        return run.run(skip)


def _checksum(model: nn.Module) -> str:
    """Return the checksum of a model's state."""
    return checkpoint.checksum_of([each for each in model.state_dict().values() if isinstance(each, Tensor)])
