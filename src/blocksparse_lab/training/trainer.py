"""Train a task in a folder. A repeated call resumes or extends the run, with the same bits as without the stop."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checked import is_int
from blocksparse.distributed import single_file
from blocksparse.distributed.group import all_max, all_reduce, on_all
from blocksparse.errors import BlockSparseError
from blocksparse.surgery.sharding import reshard

from ..machine import code, machine
from . import parallel, resume, sharding
from .callback import Callback, Task
from .cuda_graph import GraphedStep
from .optimizers import learning_rate, optimizer_for
from .run_log import NoLog, RunLog
from .settings import FREE, Settings
from .signals import Interrupted, catch_signals


class Diverged(BlockSparseError):
    """A loss, gradient or parameter is not finite."""


class Trainer:
    """Trains a task in a run folder.

    Args:
        task: what to train.
        run: the folder, created if missing. It gets `config.json`, `log.jsonl`, TensorBoard's events,
            `last.safetensors` (the newest checkpoint), and at the end `result.json`.
        settings: settings of the run, saved verbatim; with the task's description they identify the run.
        facts: further entries of `config.json` and `result.json`, ready for JSON.

    A checkpoint has everything that later steps depend on. A run that was killed at any moment and resumes ends with
    the same bits as one that was not killed. With more `steps` than before, a finished run is extended.

    With a process group, each rank computes a shard of every batch, DistributedDataParallel averages gradients, and
    rank 0 writes. A run resumes with the same bits on the same number of ranks. On another number it differs by
    rounding and by what dropout draws. With `settings.shard`, FSDP2 shards every parameter; the checkpoint file is
    the same.
    """

    def __init__(self, task: Task, run: str | Path, settings: Settings, facts: Mapping[str, Any] | None = None):
        self.task, self.run, self.settings, self.facts = task, Path(run), settings, dict(facts or {})
        self.device = device_of(settings.device)
        self.rank, self.processes = parallel.rank_and_size()
        if self.processes > 1:
            task.split(self.rank, self.processes)
        self._averaged_loss = parallel.DistributedLoss(task, self.processes)
        self.model = task.model.to(self.device)
        self.sharded = settings.shard and self.processes > 1
        if self.sharded:
            sharding.shard(task, self.processes, self.device)
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0  # of training, the second over all threads
        self.held_out: float | None = None  # newest held-out figure
        self.parameters = dict(self.model.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()} if settings.ema else {}
        self.optimizer = optimizer_for(list(self.parameters.values()), settings, self.device)
        task.attach(self.optimizer, self.ema)
        self._refresh_model()
        # Groups that the task added keep their rates in proportion to the first group's.
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._factors = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
        # Sums since the last log line stay on the device, so that a GPU need not wait for the host.
        self._total = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss = torch.zeros((), device=self.device)
        self._norm = torch.zeros((), device=self.device)
        self._finite = torch.ones((), dtype=torch.bool, device=self.device)
        self._ema_weight = torch.zeros((), device=self.device)
        self._logged = (0, 0.0)  # step and seconds
        self._machine = machine(self.device.type)  # at the start: a later commit is not what runs
        self._codes = {code(self._machine)}  # and of earlier parts of a resumed run
        self._graph: GraphedStep | None = None
        self._callbacks: tuple[Callback, ...] = (task,)

    def _refresh_model(self) -> None:
        """Use the task's current model and parameters."""
        self.model = self.task.model
        self.parameters = dict(self.model.named_parameters())

    @property
    def loss(self) -> float:
        """Loss of the newest step in nats."""
        return float(self._loss)

    @property
    def path(self) -> Path:
        """Path of the newest checkpoint."""
        return self.run / "last.safetensors"

    # -- the course of a run -----------------------------------------------------------------------------------------

    def train(self, *callbacks: Callback) -> dict[str, Any]:
        """Train to the last step, from the newest checkpoint if there is one; return the content of `result.json`.

        Raises:
            BlockSparseError: the run has another task or other settings, a loss or gradient is not finite, or the disk
                is full. The newest checkpoint stays whole.
            Interrupted: SIGINT or SIGTERM arrived; the step was finished and saved. A second signal stops at once.
        """
        with catch_signals() as caught:
            for _ in self.steps(*callbacks, caught=caught):
                pass
        return resume.checked_result(self.run / "result.json")

    def steps(self, *callbacks: Callback, caught: Sequence[int] = ()) -> Generator[int]:
        """Train step by step; yield the number of steps done. A caller may stop early, which saves nothing.

        Args:
            callbacks: participants besides the task.
            caught: signals received so far, a list that may grow; at the first one, save and raise `Interrupted`.
        """
        self._callbacks = (self.task, *callbacks)
        s = self.settings
        try:
            self.run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BlockSparseError.expected("run", "a folder to write to", f"{self.run} ({error.strerror})") from error
        devices = [self.device] if self.device.type == "cuda" else []
        result = self.run / "result.json"
        with RunLog(self.run) if self.rank == 0 else NoLog() as log, torch.random.fork_rng(devices):
            self._begin(log)
            self._notify("began", self.step)
            if self.step == s.steps and parallel.broadcast(result.exists()):
                return
            if self.rank == 0 and result.exists():  # extended run: set its old results aside
                for path in {*self.run.glob("*.json")} - {self.run / "config.json"}:
                    path.replace(path.with_suffix(".json.old"))
            if not log.open_tensorboard(self.step):
                self._notify("note", "no curves for TensorBoard, which is not installed: pip install tensorboard")
            self.model.train()
            self._graph = self._graphed_step()
            saved = self._resume_clock()
            while self.step < s.steps:
                with self._phase("train"), parallel.comm_errors():
                    self._step()
                self._notify("after_step", self.step)
                if self._due(s.log_every):
                    self._log(log)
                if self._due(s.eval_every):
                    with self._phase("evaluate"), parallel.comm_errors():
                        self._evaluate(log)
                late = 0 < s.save_minutes * 60 < time.perf_counter() - saved
                # Clocks differ between ranks, and signals arrive at different steps.
                old, signal = all_max(late, max(caught, default=0))
                if self._due(s.save_every) or old or signal:
                    with self._phase("save"):
                        self._save(log)
                    saved = self._resume_clock()
                if signal and self.step < s.steps:
                    raise Interrupted(signal, self.step)
                yield self.step
            if self.rank == 0:
                self._finish()
            parallel.broadcast(0)  # wait until the result is written

    def _notify(self, method: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*arguments)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Enter the phase contexts of all callbacks."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.phase(name))
            yield

    def _due(self, every: int) -> bool:
        return self.step == self.settings.steps or (every > 0 and self.step % every == 0)

    def _begin(self, log: RunLog | NoLog) -> None:
        """Resume from the checkpoint, or start a run and save its first checkpoint; write config.json."""
        if parallel.broadcast(self.path.exists()):
            self.load()
            finished = self.step == self.settings.steps and parallel.broadcast((self.run / "result.json").exists())
            if (last := int(log.truncate_after(self.step, drop=not finished))) < self._logged[0] and self.rank == 0:
                self._notify("note", f"{self.run / 'log.jsonl'} lacks what is after step {last:,}, up to {self.step:,}")
        elif self.rank == 0 and not log.is_empty():
            raise BlockSparseError.expected(
                str(self.run), "last.safetensors beside log.jsonl", "none; use a new folder"
            )
        else:
            parallel.seed_process(self.settings.seed, 0, self.rank)
            # A full disk is better found now than after an hour.
            with self._phase("save"):
                self._save(log)
        config = {
            "unit": self.task.unit,
            "bytes_per_step": self.task.bytes_per_step,
            "task": self.task.about(),
            "settings": asdict(self.settings),
            "facts": self.facts,
        }
        if self.rank == 0:
            checkpoint.write_text(self.run / "config.json", json.dumps(config, indent=1) + "\n")

    def _finish(self) -> None:
        """Write result.json."""
        s = self.settings
        read = s.steps * self.task.bytes_per_step
        result = {
            "held_out": self.held_out,
            "unit": self.task.unit,
            "steps": s.steps,
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "bytes": read,
            "bytes_per_second": read / max(self.seconds, 1e-9),
            "task": self.task.about(),
            "settings": asdict(s),
            "facts": self.facts,
            "machine": self._machine | ({"codes": sorted(self._codes)} if len(self._codes) > 1 else {}),
        }
        checkpoint.write_text(self.run / "result.json", json.dumps(result, indent=1) + "\n")

    # -- a step ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Set the learning rate and run one training step."""
        s = self.settings
        self._notify("before_step", self.step)
        self._refresh_model()
        for group, factor in zip(self.optimizer.param_groups, self._factors, strict=True):
            rate = factor * learning_rate(s, self.step)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        # At first the mean covers few steps, and the initial parameters must not dominate it.
        self._ema_weight.fill_(1 - min(s.ema, (1 + self.step) / (10 + self.step)))
        if self._graph is None:
            self._run_step(self.step)
        else:
            self._graph(*(self.task.inputs(self.step) or ()))
        self.step += 1

    def _run_step(self, *inputs: Any) -> None:
        """Run forward, backward and update for a step, or for a task's inputs within a CUDA graph."""
        self.optimizer.zero_grad()  # an interrupted step, or other code, may have left gradients
        with self._autocast():
            if self.processes > 1 and not self.sharded:
                loss = self._averaged_loss(*inputs)
            else:
                loss = self.task.loss(*inputs) if self._graph is None else self.task.loss_of(*inputs)
        loss = self._backward(loss)
        given = [p for p in self.parameters.values() if p.grad is not None]
        norm = sharding.full_tensor(nn.utils.get_total_norm([p.grad for p in given if p.grad is not None]))
        self._loss.copy_(loss)
        self._norm.copy_(norm)
        self._total += self._loss
        self._finite &= torch.isfinite(self._total + norm)
        if self.device.type == "cpu":  # other devices would have to wait
            self._check_finite()
        if self.settings.clip:
            nn.utils.clip_grads_with_norm_(given, self.settings.clip, norm)
        self.optimizer.step()
        self._notify("after_update")
        self.optimizer.zero_grad()  # frees memory for evaluations, layout changes and checkpoints
        with torch.no_grad():
            for name, mean in self.ema.items():
                sharding.local_shard(mean).lerp_(sharding.local_shard(self.parameters[name]), self._ema_weight)

    def _backward(self, loss: Tensor) -> Tensor:
        """Compute gradients of the mean over the whole batch; return that mean."""
        if self.processes == 1:
            loss.backward()
            return loss.detach()
        (loss * (self.task.share * self.processes)).backward()
        return all_reduce(loss.detach() * self.task.share)

    def _graphed_step(self) -> GraphedStep | None:
        wanted = self.settings.cuda_graph and self.settings.optimizer == "adam" and self.device.type == "cuda"
        able = wanted and self.processes == 1 and self.task.inputs(self.step) is not None
        return GraphedStep(self._run_step, lambda text: self._notify("note", text)) if able else None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    def _check_finite(self) -> None:
        """Raise Diverged if a loss or gradient since the last check was not finite."""
        if bool(self._finite):
            return
        at = f"step {self.step + 1}" if self.device.type == "cpu" else f"steps {self._logged[0] + 1} to {self.step}"
        got = f"loss {float(self._loss):g}, gradient of norm {float(self._norm):g}"
        raise self._diverged(at, "a finite loss and gradient", got)

    def _diverged(self, at: str, expected: str, got: str) -> Diverged:
        """Return the error of a diverged run, with advice."""
        s = self.settings
        smaller = f"a smaller clip than {s.clip:g}" if s.clip else "a clip of 1"
        tries = [f"a lower learning rate than {s.learning_rate:g}", f"a longer warmup than {s.warmup}", smaller]
        if s.dtype != "float32":
            tries.append("float32")
        saved = f"{self.path} is intact" if self.path.exists() else "Nothing is saved yet"
        return Diverged.expected(
            at, expected, f"{got}. {saved}. Try in another folder: {', '.join(tries[:-1])} or {tries[-1]}"
        )

    # -- logging and timing ------------------------------------------------------------------------------------------

    def _resume_clock(self) -> float:
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        return self._started

    def _stop_clock(self) -> None:
        """Add the time since the clock started to the training time, which excludes evaluations and saving."""
        started, cpu_started = self._started, self._cpu_started
        self.seconds += self._resume_clock() - started
        self.cpu_seconds += self._cpu_started - cpu_started

    def _log(self, log: RunLog | NoLog) -> None:
        """Log the mean loss, speed and gradient norm since the last line."""
        self._check_finite()  # waits for a GPU, so that the time is that of the steps
        self._stop_clock()
        steps, seconds = self.step - self._logged[0], self.seconds - self._logged[1]
        record = {
            "step": self.step,
            "loss": float(self._total) / steps * self.task.per_nat,
            "lr": learning_rate(self.settings, self.step - 1),
            "grad_norm": float(self._norm),
            "seconds": self.seconds,
            "bytes_per_second": steps * self.task.bytes_per_step / max(seconds, 1e-9),
        }
        self._total.zero_()
        self._logged = (self.step, self.seconds)
        log.write(record)
        self._notify("logged", record)

    def _evaluate(self, log: RunLog | NoLog) -> None:
        """Evaluate the model, with running means if there are any, and log the figure."""
        self._check_finite()
        self._stop_clock()
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.eval()
        with torch.no_grad(), self._autocast(), torch.random.fork_rng(devices), self._with_means():
            self.held_out = self.task.evaluate(self.model)
        reshard(self.model)  # free what the evaluation gathered
        self.model.train()
        record = {"step": self.step, "held_out": self.held_out, "seconds": self.seconds}
        log.write(record)
        self._notify("logged", record)
        self._resume_clock()

    @contextmanager
    def _with_means(self) -> Iterator[None]:
        """Use the running means as the model's parameters, if there are any, inside the `with` block."""
        try:
            self._swap_means()
            yield
        finally:
            self._swap_means()

    def _swap_means(self) -> None:
        """Exchange the parameters with their running means."""
        # In place, because FSDP2 gathers from its own memory.
        for name, mean in self.ema.items():
            own, other = sharding.local_shard(self.parameters[name]), sharding.local_shard(mean)
            copy = own.clone()
            own.copy_(other)
            other.copy_(copy)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, log: RunLog | NoLog) -> None:
        """Save a checkpoint, unless a parameter is not finite."""
        if self.step:
            self._check_finite()
            self._stop_clock()
        learned = [*self.parameters.items(), *self.ema.items()]
        broken = [
            nth for nth, (_, tensor) in enumerate(learned, 1) if not sharding.local_shard(tensor).isfinite().all()
        ]
        if last := all_max(max(broken, default=0))[0]:  # only one rank may have it
            raise self._diverged(
                f"step {self.step}", "finite parameters", f"values that are not in {learned[last - 1][0]}"
            )
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"ema.{name}": tensor for name, tensor in self.ema.items()}
        for name, parameter in self.parameters.items():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = tensor
        tensors |= {f"task.{name}": tensor for name, tensor in self.task.state_dict().items()}
        tensors |= {**parallel.rng_states(self.device), "trainer.total": self._total}
        about = {
            "step": self.step,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "logged": self._logged,
            "held_out": self.held_out,
            "unit": self.task.unit,
            "task": self.task.about(),
            "settings": asdict(self.settings),
            "processes": self.processes,
            "codes": sorted(self._codes),
        }
        on_all(log.sync)  # log lines must reach the disk before their checkpoint
        if self.sharded:
            single_file.write(self.path, tensors, about)
        elif self.rank == 0:
            checkpoint.save(self.path, tensors, about)

    def load(self) -> None:
        """Restore model, optimizer, task and PyTorch's generators from the newest checkpoint.

        Raises:
            BlockSparseError: there is no checkpoint, it has another task or other settings, or a tensor does not fit.
        """
        # Copy tensors one by one from the file: all at once would need the memory of two models.
        with checkpoint.opened(self.path) as (tensors, about):
            self._check_identity(about)
            at = resume.read_progress(self.path, about, self.settings.steps)
            state = {name: tensor.clone() for name, tensor in checkpoint.part(tensors, "task.").items()}
            with resume.report_faults(self.path):
                self.task.resume(state)
                self._refresh_model()
                resume.check_tensors(self.path, tensors, self.model, self.ema)
                # The model comes first: its layouts determine all further shapes.
                if self.sharded:
                    sharding.load_state_dict(self.model, checkpoint.part(tensors, "model."))
                else:
                    self.model.load_state_dict(checkpoint.part(tensors, "model."))
                for name, mean in checkpoint.part(tensors, "ema.").items():
                    self.ema[name] = sharding.copy_like(mean, self.parameters[name])
                states = checkpoint.part(tensors, "optimizer.")
                for name, parameter in self.parameters.items():
                    for key, tensor in checkpoint.part(states, f"{name}.").items():
                        self.optimizer.state[parameter][key] = _like(tensor, parameter)
                self.task.load_state_dict(state)
                self._total.copy_(tensors["trainer.total"])
                parallel.restore_rng_states(tensors, self.device, self.settings.seed, at.step, self.rank)
            self.step, self.seconds, self.cpu_seconds, self._logged, self.held_out, codes = at
            self._codes |= codes
            if (before := about.get("processes", 1)) != self.processes:
                now = f"{self.processes} process{'es' * (self.processes > 1)}"
                self._notify(
                    "note", f"resumes on {now} after {before}: results may differ by rounding and by what dropout draws"
                )

    def _check_identity(self, about: Mapping[str, Any]) -> None:
        """Raise if the checkpoint is of another task or of other settings."""
        settings = about.get("settings", {})
        if not isinstance(settings, dict):
            raise BlockSparseError.expected(f"{self.path}, settings", "a dict", f"{settings!r:.99}")
        theirs = resume.flatten(
            {"task": about.get("task", {}), "settings": resume.with_defaults(settings, self.settings)}
        )
        mine = resume.flatten({"task": self.task.about(), "settings": asdict(self.settings)})
        free = {f"settings.{name}" for name in FREE}
        before, now = theirs.get("settings.steps"), mine["settings.steps"]
        if is_int(before) and now > before:
            free |= {"settings.steps", "settings.epochs"}
        differ = [
            key for key in {**theirs, **mine} if key not in free and theirs.get(key, "none") != mine.get(key, "none")
        ]
        if differ:
            # Settings and the task's description share some fields.
            expected, got = (
                ", ".join(dict.fromkeys(f"{key.partition('.')[2]} {of.get(key, 'none')}" for key in differ))
                for of in (theirs, mine)
            )
            raise BlockSparseError.expected(
                str(self.run), f"the run's settings: {expected}", f"{got}; use a new folder, or these settings"
            )


def device_of(name: str) -> torch.device:
    """Return the torch device for "cpu" or "cuda".

    Raises:
        BlockSparseError: another name, or "cuda" without a GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" or not torch.cuda.is_available():
        raise BlockSparseError.expected("device", "cpu, or cuda where there is a GPU", repr(name))
    return torch.device("cuda", torch.cuda.current_device())


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Copy optimizer state to a parameter's device and, if the shapes agree, to its memory format, as Adam keeps it."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    return sharding.copy_like(tensor, parameter)
