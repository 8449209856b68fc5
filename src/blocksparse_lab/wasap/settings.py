"""Settings and per-epoch results of training by several processes."""

from __future__ import annotations

from dataclasses import dataclass

from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity.sparse_training.growth import INITS


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        epochs: of both phases.
        batch: samples of each worker in a step.
        learning_rate, momentum, weight_decay: of `bs.sparsity.SGD`. The gradients of `n` asynchronous workers are about
            `n - 1` steps old, which acts as more momentum (Mitliagkas et al., 2016): many want a smaller rate than one.
        zeta: of `bs.sparsity.SET`.
        regrow: its first values of new connections: "he", as in the papers, "xavier" or "zeros".
        synchronous: WASSP-SGD instead of WASAP-SGD.
        first_phase: the part of the epochs in which the workers train one network.
        wire: "bfloat16" halves the messages of the asynchronous phase, both gradients and the parameters that workers
            compute them with; the master's own stay as they are. None for the parameters' dtype.
        seed: of the order of the samples, of dropout, and of what grows.
        timeout: seconds without an answer after which a process counts as dead: more than an evaluation, a checkpoint
            and the slowest worker's lag in an epoch take together.

    Raises:
        BlockSparseError: numbers out of range, an unknown name.

    >>> from blocksparse.distributed import Settings
    >>> Settings(epochs=10).together, Settings(epochs=1).together
    (7, 1)
    """

    epochs: int = 10
    batch: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 2e-4
    zeta: float = 0.3
    regrow: str = "he"
    synchronous: bool = False
    first_phase: float = 0.7
    wire: str | None = None
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("seed", 0)):
            integer(name, getattr(self, name), least)
        for name in ("momentum", "weight_decay", "zeta", "first_phase"):
            number(name, getattr(self, name), 0, 1)
        number("learning_rate", self.learning_rate, 0)
        if self.regrow not in INITS:
            raise BlockSparseError.expected("regrow", f"one of {', '.join(INITS)}", repr(self.regrow))
        if self.wire not in (None, "bfloat16"):
            raise BlockSparseError.expected("wire", "None or 'bfloat16'", repr(self.wire))
        if not isinstance(self.synchronous, bool):
            raise BlockSparseError.expected("synchronous", "True or False", repr(self.synchronous))
        if number("timeout", self.timeout, 0) == 0:
            raise BlockSparseError.expected("timeout", "a positive number of seconds", self.timeout)

    @property
    def together(self) -> int:
        """Epochs of the first phase."""
        return round(self.first_phase * self.epochs)


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch, or of the average at the end."""

    epoch: int
    """Counted from 1."""
    phase: str
    """"asynchronous", "synchronous", "alone", or "average"."""
    loss: float
    """The mean over the samples of all workers; of the average, that of the epoch before."""
    accuracy: float | None
    """On the test set, if there is one; in the second phase, that of the master's own network."""
    samples_per_second: float
    """Samples that all workers trained on per second, evaluations left out as far as they held up all workers."""
