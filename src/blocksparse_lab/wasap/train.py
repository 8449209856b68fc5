"""WASAP-SGD and WASSP-SGD: several workers train a sparse network together, then each its own, then average them."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import checkpoint as checkpoints
from blocksparse.distributed import group
from blocksparse.distributed.wasap import prune_to, union_average, warm_up
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.sparse_training.set import SET
from blocksparse.sparsity.sparse_training.sgd import SGD
from blocksparse.surgery.agreement import digest
from blocksparse.surgery.prunable import Skip

from .asynchronous import FinishedEpoch, Master, MasterConnection
from .flat import FlatModel
from .settings import Epoch, Settings

Data = tuple[Tensor, Tensor]
# Samples that are evaluated at once. They take about as long as a training step, and workers wait for that long.
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
    """Train a block-sparse network on all processes of this run, on one machine or several.

    Call it in each process of `torchrun --nproc-per-node K script.py`. Without torchrun there is one worker.

    First phase (WASAP-SGD): each worker computes gradients on its shard of the data, as fast as it can. The master
    drops the gradients of connections that no longer exist, takes a step with each gradient, and answers with the
    newest network. After an epoch's number of gradients it evolves the topology. With `synchronous` (WASSP-SGD) all
    workers take each step together, with the mean gradient. The learning rate then rises to K times its value in five
    epochs.

    Second phase: each worker trains and evolves its own network. At the end these are averaged on the union of their
    topologies, and pruned by magnitude to the number of connections before.

    Process 0 is the master and a worker too. One process runs sequential sparse evolutionary training, bit for bit.
    Runs with `synchronous` have the same bits each time for the same number of processes; the asynchronous phase does
    not. Its messages are CPU tensors (gloo), whatever the model's device; other messages are on the model's device.

    If a process dies, the others raise a BlockSparseError when the connection breaks or the timeout ends. The last
    checkpoint is whole: the same call with `resume` continues from it, on any number of processes. The master writes it
    after each epoch of the first phase and at the end; a single process writes it after each epoch.

    Args:
        model: with the same structure in all processes. Training starts from the master's; all end with the result.
        data: inputs `[n, ...]` and targets `[n, ...]`, the same in all processes; worker k trains on rows k, k + K, ...
        settings: `Settings()` by default.
        test: inputs and class indices `[m]`, on which the master measures the accuracy.
        skip: weights that do not evolve, as in `bs.sparsity.SET`.
        loss: a function of outputs and targets, the mean over samples.
        checkpoint: the checkpoint file.
        resume: whether to resume from that file. After a restart by torchrun (`--max-restarts`) a run always does.
        report: called on the master after each epoch.

    Returns:
        On the master, the results of each epoch and of the average; on other processes an empty list.

    Raises:
        BlockSparseError: more workers than samples; inputs and targets that do not fit each other; a model without
            block-sparse weights, or with running statistics (batch norm); models that differ between processes; a
            checkpoint with other settings; a process that does not answer.

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
        raise BlockSparseError.expected("resume", "a checkpoint to resume from", "None")
    with group.process_group(settings.timeout) as (rank, workers):
        if workers > len(data[0]):
            raise BlockSparseError.expected("data", f"a sample or more for each of {workers} workers", len(data[0]))
        run = _Run(model, data, settings, test, skip, loss, rank, workers)
        run.path, run.report = None if checkpoint is None else Path(checkpoint), report
        was_training = model.training
        devices = {p.device.index for p in model.parameters() if p.is_cuda}
        with torch.random.fork_rng([device for device in devices if device is not None]):
            run.train(resume)
        model.train(was_training)
        return run.epochs


class _Run:
    """One process of a run; see `train` for the arguments."""

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
        self.flat = FlatModel(model)
        self.optimizer = SGD(model.parameters(), settings.learning_rate, settings.momentum, settings.weight_decay)
        seed, stop, regrow = settings.seed, settings.epochs, settings.regrow
        self.method = SET(model, self.optimizer, settings.zeta, skip=skip, end=stop, init=regrow, seed=seed)
        self.device = self.flat.parameters[0].device
        self.epochs: list[Epoch] = []
        n = len(data[0])
        self.shards = [len(range(k, n, workers)) for k in range(workers)]
        self.rows = torch.arange(rank, n, workers)

    def train(self, resume: bool) -> None:
        """Run both phases, or what a checkpoint leaves of them."""
        self.check_agreement()
        # After a failure torchrun starts all processes again; they should resume then.
        restarted = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and self.path is not None and self.path.exists()
        )
        start = self.load_checkpoint() if (resume or restarted) and self.rank == group.MASTER else 0
        start = int(group.broadcast(torch.tensor(start)))
        self.broadcast_network()
        together = self.settings.together
        if start < together:
            (self.train_synchronously if self.settings.synchronous else self.train_asynchronously)(start)
        if start < self.settings.epochs:
            self.train_alone(max(start, together))
            self.average_networks()

    # -- data --------------------------------------------------------------------------------------------------

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """Yield the rows of each of this worker's batches in an epoch; seed dropout for it."""
        yield from batches(self.rows, self.settings, epoch, self.rank)

    def gradient(self, model: nn.Module, rows: Tensor) -> float:
        """Compute the parameters' gradients on these rows; return the loss."""
        model.zero_grad(set_to_none=True)
        x, y = (each[rows.to(each.device)].to(self.device) for each in self.data)
        loss = self.loss(model(x), y)
        loss.backward()
        return loss.item()

    # -- first phase -------------------------------------------------------------------------------------------

    def train_asynchronously(self, start: int) -> None:
        """Train the master's network with the gradients of all workers, from an epoch on."""
        steps = sum(-(-size // self.settings.batch) for size in self.shards)
        wire = self.flat.dtype if self.settings.wire is None else getattr(torch, self.settings.wire)
        if self.rank == group.MASTER:
            together = self.settings.together
            self.train_as_master(
                Master(self.flat, self.optimizer, self.method, start, together, steps, self.workers, wire)
            )
        else:
            self.model.train()
            master = MasterConnection(self.flat, wire)
            for rows in self.endless_batches(start):
                if not master.push(len(rows), self.gradient(self.model, rows)):
                    break
        self.broadcast_network()

    def train_as_master(self, master: Master) -> None:
        """Train on the master's own shard of the data, and answer the others between the steps."""
        evaluated = self.model if self.workers == 1 else copy.deepcopy(self.model)
        self.model.train()
        rows = self.endless_batches(master.epoch)
        while master.steps_left:
            batch = next(rows)
            loss = self.gradient(self.model, batch)
            master.step(len(batch), loss)
            self.evaluate_finished_epochs(master, evaluated)
            master.serve()
        master.dismiss()
        self.evaluate_finished_epochs(master, evaluated)

    def evaluate_finished_epochs(self, master: Master, model: nn.Module) -> None:
        """Evaluate and save the networks of finished epochs, loaded into `model` if that is a copy."""
        while master.finished:
            done = master.finished.popleft()
            if model is not self.model:
                flat = FlatModel(model)
                flat.load(done.layouts, flat.split(done.values))
            self.evaluate_and_save(model, done, "asynchronous", master.serve)
            if model is self.model:
                master.start = time.perf_counter()  # nothing was trained in the meantime

    def endless_batches(self, epoch: int) -> Iterator[Tensor]:
        """Yield the worker's batches without end: a fast worker sees its shard more often."""
        while True:
            yield from self.batches(epoch)
            epoch += 1

    def train_synchronously(self, start: int) -> None:
        """Train one network in common steps, from an epoch on."""
        settings, param_group = self.settings, self.optimizer.param_groups[0]
        steps = -(-max(self.shards) // settings.batch)
        for epoch in range(start, settings.together):
            param_group["lr"] = warm_up(settings.learning_rate, self.workers, epoch)
            epoch_start, rows, loss = time.perf_counter(), self.batches(epoch), 0.0
            self.model.train()
            for step in range(steps):
                batch = next(rows, self.rows[:0])
                loss += self.synchronous_step(batch, step)
            self.end_epoch(epoch, epoch_start, loss, "synchronous")
            # All processes have taken the same steps, but their processors may round differently.
            self.broadcast_network()
        param_group["lr"] = settings.learning_rate

    def synchronous_step(self, rows: Tensor, step: int) -> float:
        """Take a step with the mean gradient over all workers' samples; return the sum of this worker's losses."""
        loss = self.gradient(self.model, rows) if len(rows) else 0.0
        if self.workers > 1:
            batch = self.settings.batch
            samples = sum(min(batch, max(0, size - step * batch)) for size in self.shards)
            if not len(rows):
                self.model.zero_grad(set_to_none=True)
            mean = group.all_reduce(self.flat.gradients() * (len(rows) / samples))
            gradients, present = mean.tensor_split([self.flat.numel])
            self.flat.load_gradients(self.flat.split(gradients), present.tolist())
        self.optimizer.step()
        return loss * len(rows)

    # -- second phase ------------------------------------------------------------------------------------------

    def train_alone(self, start: int) -> None:
        """Train and evolve this worker's own network, from an epoch on."""
        if self.rank != group.MASTER:
            self.method.seed = derived_seed(self.settings.seed, 0, self.rank)
        for epoch in range(start, self.settings.epochs):
            epoch_start, loss = time.perf_counter(), 0.0
            self.model.train()
            for rows in self.batches(epoch):
                loss += self.gradient(self.model, rows) * len(rows)
                self.optimizer.step()
            self.end_epoch(epoch, epoch_start, loss, "alone")

    def average_networks(self) -> None:
        """Replace the networks of all workers by their average, pruned to the number of connections before."""
        values, topologies = gather(self.flat.values()), gather(self.flat.topology())
        if self.rank == group.MASTER:
            layouts = [self.flat.layouts_of(topology) for topology in topologies]
            parts = [self.flat.split(each) for each in values]
            average_into(self.flat, layouts, parts)
            self.optimizer.state.clear()
            last = self.epochs[-1]
            epoch = Epoch(last.epoch, "average", last.loss, self.accuracy(self.model), last.samples_per_second)
            self.save(self.model, epoch.epoch, self.flat.momentum(self.optimizer), self.method.calls)
            self.report_epoch(epoch)
        self.broadcast_network()

    # -- agreement of the processes ---------------------------------------------------------------------------

    def check_agreement(self) -> None:
        """Raise a BlockSparseError on all processes unless they have the same model, settings and data."""
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
        if differing := differing_facts(facts):
            ranks = ", ".join(f"process {rank}: {name}" for rank, name in differing)
            raise BlockSparseError.expected(
                "processes", "the same model, settings and data in all", f"others in {ranks}"
            )

    def broadcast_network(self) -> None:
        """Copy the master's network, momentum and count of evolutions to all processes."""
        if self.workers == 1:
            return
        topology = group.broadcast(self.flat.topology())
        values, momentum = group.broadcast(self.flat.values()), group.broadcast(self.flat.momentum(self.optimizer))
        self.method.calls = int(group.broadcast(torch.tensor(self.method.calls)))
        if self.rank != group.MASTER:
            self.flat.load(self.flat.layouts_of(topology), self.flat.split(values))
            self.flat.load_momentum(self.optimizer, momentum)

    def end_epoch(self, epoch: int, epoch_start: float, loss: float, phase: str) -> None:
        """Evolve and record, after an epoch in which all processes trained in step or each alone."""
        self.method.step()
        total, samples = group.all_reduce(torch.tensor([loss, len(self.rows)], dtype=torch.float64)).tolist()
        if self.rank == group.MASTER:
            seconds, flat = time.perf_counter() - epoch_start, self.flat
            momentum, calls = flat.momentum(self.optimizer), self.method.calls
            mean = total / samples
            done = FinishedEpoch(epoch + 1, [], torch.empty(0), momentum, calls, mean, int(samples), seconds)
            self.evaluate_and_save(self.model, done, phase)

    def evaluate_and_save(
        self, model: nn.Module, done: FinishedEpoch, phase: str, meanwhile: Callable[[], object] = bool
    ) -> None:
        """Report an epoch with its accuracy, and save it unless several workers train alone."""
        accuracy = self.accuracy(model, meanwhile)
        if phase != "alone" or self.workers == 1:
            self.save(model, done.epoch, done.momentum, done.calls)
        self.report_epoch(Epoch(done.epoch, phase, done.loss, accuracy, done.samples / max(done.seconds, 1e-9)))

    def report_epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        if self.report is not None:
            self.report(epoch)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, meanwhile: Callable[[], object] = bool) -> float | None:
        """Return the accuracy on the test set, if there is one; call `meanwhile` after each batch of it."""
        if self.test is None:
            return None
        model.eval()
        correct = 0
        for x, y in zip(*(each.split(TEST_BATCH) for each in self.test), strict=True):
            correct += int((model(x.to(self.device)).argmax(-1) == y.to(self.device)).sum())
            meanwhile()
        model.train()
        return correct / len(self.test[0])

    # -- checkpoints -------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return the facts that a checkpoint must share with the run that resumes from it."""
        settings = asdict(self.settings)
        del settings["timeout"], settings["wire"]
        return {"kind": "wasap", "settings": settings}

    def save(self, model: nn.Module, epoch: int, momentum: Tensor, calls: int) -> None:
        """Save the state after an epoch, if the run has a checkpoint file."""
        if self.path is None:
            return
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        tensors["momentum"] = momentum
        checkpoints.save(self.path, tensors, {**self.about(), "epoch": epoch, "calls": calls})

    def load_checkpoint(self) -> int:
        """Load the checkpoint; return the number of finished epochs."""
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
    """Yield the rows of each batch in an epoch, shuffled; seed PyTorch's generators, which dropout uses."""
    seed = derived_seed(settings.seed, epoch + 1, rank)
    torch.manual_seed(seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    yield from rows[order].split(settings.batch)


def derived_seed(seed: int, epoch: int, rank: int) -> int:
    """Return a seed of 63 bits for an epoch and a rank."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def differing_facts(facts: Mapping[str, object]) -> list[tuple[int, str]]:
    """Return the processes that differ from the majority, each with the name of the first fact that differs.

    In a tie, the facts of the lowest rank count.
    """
    by_rank = group.all_gather([digest(fact) for fact in facts.values()])
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*by_rank, strict=True)]
    differing = []
    for rank, digests in enumerate(by_rank):
        if names := [name for name, mine, most in zip(facts, digests, usual, strict=True) if mine != most]:
            differing.append((rank, names[0]))
    return differing


def gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all processes on the master, and an empty list on the others."""
    if group.is_single_process():
        return [tensor]
    is_master = dist.get_rank() == group.MASTER
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if is_master else []
    with group.reraise_comm_errors():
        dist.gather(tensor, tensors if is_master else None, group.MASTER)
    return tensors


def average_into(flat: FlatModel, layouts: list[list[BlockLayout]], parts: list[list[Tensor]]) -> None:
    """Set a model to the average of several networks, with each weight pruned to its number of blocks in the model."""
    for i, parameter in enumerate(flat.parameters):
        values = [each[i].to(parameter.dtype) for each in parts]
        at = flat.module_of.get(parameter)
        if at is None:
            parameter.data.copy_(sum(v.double() for v in values) / len(values))
        else:
            module = flat.modules[at]
            layout, mean = union_average([each[at] for each in layouts], values)
            module.set_layout(*prune_to(layout, mean, module.layout.nnz))


def _check(model: nn.Module, data: Data, test: Data | None) -> None:
    """Raise a BlockSparseError unless the data are pairs of tensors and the model has no running statistics."""
    for name, pair in (("data", data), ("test", test)):
        if pair is None:
            continue
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
            raise BlockSparseError.expected(name, "a pair of tensors, inputs and targets", type(pair).__name__)
        if len(pair[0]) != len(pair[1]) or len(pair[0]) == 0:
            got = f"{len(pair[0])} inputs and {len(pair[1])} targets"
            raise BlockSparseError.expected(name, "as many targets as inputs, one or more", got)
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise BlockSparseError.expected(name, "a module without running statistics", type(module).__name__)
