"""WASAP-SGD and WASSP-SGD: truly sparse networks trained by several workers, with one topology or several."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import checkpoint as checkpoints
from blocksparse.distributed import group
from blocksparse.distributed.wasap import prune_to, union_average, warm_up
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.sparse_training.set import SET
from blocksparse.sparsity.sparse_training.sgd import SGD
from blocksparse.surgery.prunable import Skip

from .asynchronous import Finished, Master, ToMaster
from .flat import Flat
from .settings import Epoch, Settings

Data = tuple[Tensor, Tensor]
# Samples that are tested at once: about as long as a training step, for which others have to wait for an answer.
TEST_BATCH = 250
Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    model: nn.Module,
    data: Data,
    settings: Settings | None = None,
    *,
    test: Data | None = None,
    skip: Skip = (),
    loss: Loss = F.cross_entropy,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    report: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Trains a block-sparse network with all processes of this run, on one machine or on several.

    Call it in each process of `torchrun --nproc-per-node K script.py`; without torchrun the one process is all workers.

    In the first phase (WASAP-SGD) each worker computes gradients on its own part of the data, as fast as it can, for
    the master, which drops those of connections that are gone, takes a step with each, evolves the topology after as
    many as an epoch has, and answers with the newest network. With `synchronous` (WASSP-SGD) all workers take each step
    together, with the mean gradient and a learning rate that rises to K times its value within five epochs. In the
    second phase each worker trains and evolves alone. At the end the networks are averaged on the union of their
    topologies, and pruned by magnitude to as many connections as before.

    Process 0 is the master and a worker too. With one process this is sequential sparse evolutionary training, bit
    for bit; with `synchronous` any number of processes gives the same bits each time, and the asynchronous phase does
    not. Its messages are CPU tensors (gloo), wherever the model is; all others are where it is.

    A process that dies stops the run: the others get a BlockSparseError as soon as the connection breaks or the timeout
    is over. The last checkpoint is whole; the same call with `resume` goes on from there, with any number of processes.
    The master writes it after each epoch of the first phase and at the end; with one process, after each epoch.

    Args:
        model: of the same structure in all processes; training starts from the master's, and all end with the result.
        data: inputs `[n, ...]` and targets `[n, ...]`, the same in all processes; worker k takes rows k, k + K, ...
        settings: `Settings()` by default.
        test: inputs and class numbers `[m]`, on which the master measures the accuracy.
        skip: as for `bs.sparsity.SET`: what does not evolve.
        loss: of outputs and targets, a mean over samples.
        checkpoint: the file for it.
        resume: whether to go on from that file; after a restart by torchrun (`--max-restarts`) it does in any case.
        report: called on the master after each epoch.

    Returns:
        What came out of each epoch, and of the average, on the master; nothing elsewhere.

    Raises:
        BlockSparseError: more workers than data, data that do not fit each other, a model without block-sparse weights
            or with running statistics (batch norm), models that differ between the processes, a checkpoint of other
            settings, a process that does not answer.

    Example:
        >>> import torch, blocksparse as bs
        >>> from blocksparse.distributed import Settings, train
        >>> x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
        >>> model = bs.nn.Linear(20, 2, density=0.5, block_size=1)
        >>> epochs = train(model, (x, (x[:, 0] > 0).long()), Settings(epochs=3, batch=32))
        >>> [(epoch.epoch, epoch.phase) for epoch in epochs]
        [(1, 'asynchronous'), (2, 'asynchronous'), (3, 'alone'), (3, 'average')]

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """
    settings = Settings() if settings is None else settings
    _check(model, data, test)
    if resume and checkpoint is None:
        raise BlockSparseError.expected("resume", "a checkpoint to go on from", "None")
    with group.process_group(settings.timeout) as (rank, workers):
        if workers > len(data[0]):
            raise BlockSparseError.expected("data", f"a sample or more for each of {workers} workers", len(data[0]))
        run = _Run(model, data, settings, test, skip, loss, rank, workers)
        run.path, run.report = None if checkpoint is None else Path(checkpoint), report
        was_training = model.training
        devices = {p.device.index for p in model.parameters() if p.is_cuda}
        with torch.random.fork_rng([device for device in devices if device is not None]):
            run.all(resume)
        model.train(was_training)
        return run.epochs


class _Run:
    path: Path | None
    report: Callable[[Epoch], None] | None

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        settings: Settings,
        test: Data | None,
        skip: Skip,
        loss: Loss,
        rank: int,
        workers: int,
    ):
        self.model, self.data, self.settings, self.test, self.loss = model, data, settings, test, loss
        self.rank, self.workers = rank, workers
        self.flat = Flat(model)
        self.optimizer = SGD(model.parameters(), settings.learning_rate, settings.momentum, settings.weight_decay)
        seed, stop, regrow = settings.seed, settings.epochs, settings.regrow
        self.method = SET(model, self.optimizer, settings.zeta, skip=skip, end=stop, init=regrow, seed=seed)
        self.device = self.flat.parameters[0].device
        self.epochs: list[Epoch] = []
        n = len(data[0])
        self.shards = [len(range(k, n, workers)) for k in range(workers)]
        self.rows = torch.arange(rank, n, workers)

    def all(self, resume: bool) -> None:
        self.check_same()
        # torchrun starts all again after a failure: to go on, not to begin once more.
        again = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and self.path is not None and self.path.exists()
        )
        start = self.resumed() if (resume or again) and self.rank == group.MASTER else 0
        start = int(group.broadcast(torch.tensor(start)))
        self.share()
        together = self.settings.together
        if start < together:
            (self.synchronous if self.settings.synchronous else self.asynchronous)(start)
        if start < self.settings.epochs:
            self.alone(max(start, together))
            self.average()

    # -- data --------------------------------------------------------------------------------------------------

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """The rows of each batch of this worker in an epoch; dropout is seeded for it."""
        yield from batches(self.rows, self.settings, epoch, self.rank)

    def gradient(self, model: nn.Module, rows: Tensor) -> float:
        """Leaves the gradient in the parameters; returns the loss."""
        model.zero_grad(set_to_none=True)
        x, y = (part[rows.to(part.device)].to(self.device) for part in self.data)
        loss = self.loss(model(x), y)
        loss.backward()
        return loss.item()

    # -- first phase -------------------------------------------------------------------------------------------

    def asynchronous(self, start: int) -> None:
        steps = sum(-(-size // self.settings.batch) for size in self.shards)
        wire = self.flat.dtype if self.settings.wire is None else getattr(torch, self.settings.wire)
        if self.rank == group.MASTER:
            together = self.settings.together
            self.lead(Master(self.flat, self.optimizer, self.method, start, together, steps, self.workers, wire))
        else:
            self.model.train()
            master = ToMaster(self.flat, wire)
            for rows in self.stream(start):
                if not master.push(len(rows), self.gradient(self.model, rows)):
                    break
        self.share()

    def lead(self, master: Master) -> None:
        """Trains on the master's own part of the data, answers the others between the steps."""
        shown = self.model if self.workers == 1 else copy.deepcopy(self.model)
        self.model.train()
        rows = self.stream(master.epoch)
        while master.left:
            batch = next(rows)
            loss = self.gradient(self.model, batch)
            master.step(len(batch), loss)
            self.show(master, shown)
            master.serve()
        master.dismiss()
        self.show(master, shown)

    def show(self, master: Master, model: nn.Module) -> None:
        """Evaluates and saves the epochs that are over by now; a copy of the model becomes what they left."""
        while master.finished:
            done = master.finished.popleft()
            if model is not self.model:
                flat = Flat(model)
                flat.load(done.layouts, flat.split(done.values))
            self.record(model, done, "asynchronous", master.serve)
            if model is self.model:
                master.start = time.perf_counter()  # nobody trained meanwhile

    def stream(self, epoch: int) -> Iterator[Tensor]:
        """The worker's batches without end: a fast one sees its part more often."""
        while True:
            yield from self.batches(epoch)
            epoch += 1

    def synchronous(self, start: int) -> None:
        settings, group_of = self.settings, self.optimizer.param_groups[0]
        steps = -(-max(self.shards) // settings.batch)
        for epoch in range(start, settings.together):
            group_of["lr"] = warm_up(settings.learning_rate, self.workers, epoch)
            clock, rows, loss = time.perf_counter(), self.batches(epoch), 0.0
            self.model.train()
            for step in range(steps):
                batch = next(rows, self.rows[:0])
                loss += self.together(batch, step)
            self.end(epoch, clock, loss, "synchronous")
            # Each process has taken the same steps, but different processors may round differently.
            self.share()
        group_of["lr"] = settings.learning_rate

    def together(self, rows: Tensor, step: int) -> float:
        """A step of all workers with the mean gradient over their samples; returns the sum of the losses here."""
        loss = self.gradient(self.model, rows) if len(rows) else 0.0
        if self.workers > 1:
            batch = self.settings.batch
            samples = sum(min(batch, max(0, size - step * batch)) for size in self.shards)
            if not len(rows):
                self.model.zero_grad(set_to_none=True)
            mean = group.all_reduce(self.flat.gradients() * (len(rows) / samples))
            parts, there = mean.tensor_split([self.flat.numbers])
            self.flat.load_gradients(self.flat.split(parts), there.tolist())
        self.optimizer.step()
        return loss * len(rows)

    # -- second phase ------------------------------------------------------------------------------------------

    def alone(self, start: int) -> None:
        if self.rank != group.MASTER:
            self.method.seed = number_of(self.settings.seed, 0, self.rank)
        for epoch in range(start, self.settings.epochs):
            clock, loss = time.perf_counter(), 0.0
            self.model.train()
            for rows in self.batches(epoch):
                loss += self.gradient(self.model, rows) * len(rows)
                self.optimizer.step()
            self.end(epoch, clock, loss, "alone")

    def average(self) -> None:
        values, topologies = group.gather(self.flat.values()), group.gather(self.flat.topology())
        if self.rank == group.MASTER:
            layouts = [self.flat.layouts_of(topology) for topology in topologies]
            parts = [self.flat.split(one) for one in values]
            average_into(self.flat, layouts, parts)
            self.optimizer.state.clear()
            last = self.epochs[-1]
            epoch = Epoch(last.epoch, "average", last.loss, self.accuracy(self.model), last.samples_per_second)
            self.save(self.model, epoch.epoch, self.flat.momentum(self.optimizer), self.method.calls)
            self.tell(epoch)
        self.share()

    # -- what the processes tell each other --------------------------------------------------------------------

    def check_same(self) -> None:
        """All must have been given the same: what they would send each other does not fit, or trains something else."""
        flat, settings = self.flat, asdict(self.settings)
        del settings["timeout"]
        shapes = [(name, list(p.shape), p.dtype) for name, p in zip(flat.names, flat.parameters, strict=True)]
        facts = {
            "parameters": shapes,
            "numbers of connections": [(layout.grid, layout.block_shape, layout.nnz) for layout in flat.layouts()],
            **{f"settings ({name})": value for name, value in settings.items()},
            "inputs": self.data[0],
            "targets": self.data[1],
        }
        if differ := group.differing(facts):
            ranks = ", ".join(f"process {rank}: {what}" for rank, what in differ)
            raise BlockSparseError.expected(
                "processes", "the same model, settings and data in all", f"others in {ranks}"
            )

    def share(self) -> None:
        """Gives all the master's network, momentum and count of evolutions."""
        if self.workers == 1:
            return
        topology = group.broadcast(self.flat.topology())
        values, momentum = group.broadcast(self.flat.values()), group.broadcast(self.flat.momentum(self.optimizer))
        self.method.calls = int(group.broadcast(torch.tensor(self.method.calls)))
        if self.rank != group.MASTER:
            self.flat.load(self.flat.layouts_of(topology), self.flat.split(values))
            self.flat.load_momentum(self.optimizer, momentum)

    def end(self, epoch: int, clock: float, loss: float, phase: str) -> None:
        """Of an epoch in which all processes work in step, or each alone."""
        self.method.step()
        total, samples = group.all_reduce(torch.tensor([loss, len(self.rows)], dtype=torch.float64)).tolist()
        if self.rank == group.MASTER:
            seconds, flat = time.perf_counter() - clock, self.flat
            momentum, calls = flat.momentum(self.optimizer), self.method.calls
            mean = total / samples
            done = Finished(epoch + 1, [], torch.empty(0), momentum, calls, mean, int(samples), seconds)
            self.record(self.model, done, phase)

    def record(self, model: nn.Module, done: Finished, phase: str, meanwhile: Callable[[], object] = bool) -> None:
        accuracy = self.accuracy(model, meanwhile)
        if phase != "alone" or self.workers == 1:
            self.save(model, done.epoch, done.momentum, done.calls)
        self.tell(Epoch(done.epoch, phase, done.loss, accuracy, done.samples / max(done.seconds, 1e-9)))

    def tell(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        if self.report is not None:
            self.report(epoch)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, meanwhile: Callable[[], object] = bool) -> float | None:
        """On the test set, if there is one; `meanwhile` is called after each part of it."""
        if self.test is None:
            return None
        model.eval()
        right = 0
        for x, y in zip(*(part.split(TEST_BATCH) for part in self.test), strict=True):
            right += int((model(x.to(self.device)).argmax(-1) == y.to(self.device)).sum())
            meanwhile()
        model.train()
        return right / len(self.test[0])

    # -- checkpoints -------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        said = asdict(self.settings)
        del said["timeout"], said["wire"]
        return {"kind": "wasap", "settings": said}

    def save(self, model: nn.Module, epoch: int, momentum: Tensor, calls: int) -> None:
        if self.path is None:
            return
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        tensors["momentum"] = momentum
        checkpoints.save(self.path, tensors, {**self.about(), "epoch": epoch, "calls": calls})

    def resumed(self) -> int:
        """Loads the checkpoint; returns how many epochs are over."""
        if self.path is None:
            return 0
        tensors, about = checkpoints.load(self.path)
        epoch, self.method.calls = about.pop("epoch", 0), about.pop("calls", 0)
        if about != self.about():
            raise BlockSparseError.expected(str(self.path), f"a checkpoint of {self.about()}", about)
        momentum = tensors.pop("momentum")
        try:
            self.model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
        except RuntimeError as error:
            raise BlockSparseError.expected(str(self.path), "a checkpoint of this model", error) from error
        self.flat.load_momentum(self.optimizer, momentum)
        return epoch


def batches(rows: Tensor, settings: Settings, epoch: int, rank: int = 0) -> Iterator[Tensor]:
    """The rows of each batch in an epoch, shuffled; seeds PyTorch's generators, of which dropout draws."""
    seed = number_of(settings.seed, epoch + 1, rank)
    torch.manual_seed(seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    yield from rows[order].split(settings.batch)


def number_of(seed: int, epoch: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def average_into(flat: Flat, layouts: list[list[BlockLayout]], parts: list[list[Tensor]]) -> None:
    """Leaves the average of several networks in a model, each weight pruned to the blocks that it has there."""
    for i, parameter in enumerate(flat.parameters):
        values = [one[i].to(parameter.dtype) for one in parts]
        at = flat.module_of.get(parameter)
        if at is None:
            parameter.data.copy_(sum(v.double() for v in values) / len(values))
        else:
            module = flat.modules[at]
            layout, mean = union_average([one[at] for one in layouts], values)
            module.set_layout(*prune_to(layout, mean, module.layout.nnz))


def _check(model: nn.Module, data: Data, test: Data | None) -> None:
    for name, pair in (("data", data), ("test", test)):
        if pair is None:
            continue
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise BlockSparseError.expected(name, "a pair of tensors, inputs and targets", type(pair).__name__)
        if len(pair[0]) != len(pair[1]) or len(pair[0]) == 0:
            got = f"{len(pair[0])} inputs and {len(pair[1])} targets"
            raise BlockSparseError.expected(name, "as many targets as inputs, one or more", got)
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise BlockSparseError.expected(name, "a module without running statistics", type(module).__name__)
