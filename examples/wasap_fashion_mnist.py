"""Train a sparse network on Fashion-MNIST with several processes: WASAP-SGD, or WASSP-SGD with --synchronous.

Run: torchrun --nproc-per-node 2 examples/wasap_fashion_mnist.py --data FOLDER [--epochs 10] [--synchronous]

FOLDER has the four idx files of https://github.com/zalandoresearch/fashion-mnist, as published. Each process uses
OMP_NUM_THREADS threads, which torchrun sets to 1. With --checkpoint FILE a run can be stopped; add --resume to the
same command to continue it.
"""

import argparse
import os
import signal

# Ctrl-C ends a process at once and silently. Python's own handler would wait for a message that is under way.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as it is in a script's background
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from blocksparse.distributed import Epoch, Settings, train
from blocksparse_lab.data import idx
from blocksparse_lab.models.mlp import SparseMLP

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True, help="folder with the idx files")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=128, help="samples of each process in a step")
parser.add_argument("--hidden", type=int, default=1000, help="neurons in each of three layers")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--synchronous", action="store_true")
parser.add_argument("--checkpoint")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

images = idx.mnist(options.data)


def flat(pixels):
    return (pixels.flatten(1).float() / 255 - 0.286) / 0.353


def show(epoch: Epoch) -> None:
    print(
        f"epoch {epoch.epoch} {epoch.phase}: loss {epoch.loss:.4f}, accuracy {epoch.accuracy:.4f}, "
        f"{epoch.samples_per_second:,.0f} samples/s",
        flush=True,
    )


model = SparseMLP([784, *[options.hidden] * 3, 10], epsilon=20, alpha=0.6, seed=options.seed)
if os.environ.get("RANK", "0") == "0":
    weights = sum(layer.layout.nnz for layer in model.layers)
    print(f"{weights:,} connections, {os.environ.get('WORLD_SIZE', 1)} processes", flush=True)
train(
    model,
    (flat(images.train), images.train_labels),
    Settings(
        epochs=options.epochs,
        batch=options.batch,
        learning_rate=options.lr,
        seed=options.seed,
        synchronous=options.synchronous,
    ),
    test=(flat(images.test), images.test_labels),
    skip=model.output,
    checkpoint=options.checkpoint,
    resume=options.resume,
    report=show,
)
