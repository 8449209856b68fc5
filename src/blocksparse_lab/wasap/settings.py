"""The settings of a WASAP run, and its results for each epoch."""

from __future__ import annotations

from dataclasses import dataclass

from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity.sparse_training.growth import INITS


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        epochs: the number of epochs of both phases together.
        batch: samples of each worker in a step.
        learning_rate, momentum, weight_decay: as in `bs.sparsity.SGD`. Gradients of `n` asynchronous workers are about
            `n - 1` steps old, which acts like more momentum (Mitliagkas et al., 2016): lower the rate for many workers.
        zeta: as in `bs.sparsity.SET`.
        regrow: the first values of new connections: "he" as in the papers, "xavier" or "zeros".
        synchronous: whether to run WASSP-SGD instead of WASAP-SGD.
        first_phase: the fraction of the epochs in which all workers train one network.
        wire: the dtype of messages in the asynchronous phase. "bfloat16" halves them: gradients, and the parameters
            from which workers compute them. The master keeps its own dtype. None sends the parameters' dtype.
        seed: the seed of the order of samples, of dropout, and of new connections.
        timeout: seconds without an answer after which a process counts as dead. Allow for an evaluation, a checkpoint
            and the lag of the slowest worker in an epoch together.

    Raises:
        BlockSparseError: a number out of range, or an unknown name.

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
        """The number of epochs in the first phase, in which all workers train one network."""
        return round(self.first_phase * self.epochs)


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch, or of the average at the end."""

    epoch: int
    """Counted from 1."""
    phase: str
    """"asynchronous", "synchronous", "alone", or "average"."""
    loss: float
    """The mean over the samples of all workers; for the average, that of the last epoch."""
    accuracy: float | None
    """The accuracy on the test set; None without one. In the second phase, that of the master's own network."""
    samples_per_second: float
    """Samples that all workers trained on per second, without the evaluations that all workers wait for."""
