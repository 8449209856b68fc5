"""A process of WASAP's tests: it trains a small net on toy data, and fails on purpose if its options say so.

Arguments: the folder for results, and a dict with options. Options under the key of a rank are for this rank only:

    settings: those of `blocksparse.distributed.Settings`
    rows, data, hidden: the number of rows, the seed of the data, the width of the first hidden layer
    group: the address of a process group that the script forms itself
    stop, signal: the step after which the process sends itself this signal (SIGKILL), unless torchrun restarted it
    interrupt: whether to send SIGINT to the process after a second
    error: whether to write the error of `train`, or "done", to a file, and end at once
    again: whether to train in one group three times, of which the first is refused
    resume: whether to resume from the checkpoint
"""

import datetime
import os
import signal
import sys
import threading

import torch
from torch import nn

from blocksparse import BlockSparseError
from blocksparse.distributed import Settings, train
from blocksparse_lab.models.mlp import SparseMLP
from processes import error_of


def toy_data(seed, n):
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :5].sum(1) > 0).long()


def network(seed=0, hidden=64):
    sizes = [20, hidden, 64, 2]
    return SparseMLP(sizes, density=0.3, activation="relu", dropout=0.1, init="fan_in", seed=seed)


def main(folder, options):
    rank = int(os.environ["RANK"])
    settings = Settings(**options["settings"] | options.get(rank, {}).pop("settings", {}))
    options |= options.get(rank, {})
    torch.set_num_threads(1)
    if "group" in options:
        world, timeout = int(os.environ["WORLD_SIZE"]), datetime.timedelta(seconds=settings.timeout)
        torch.distributed.init_process_group(
            "gloo", init_method=options["group"], rank=rank, world_size=world, timeout=timeout
        )
    if "interrupt" in options:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    steps = 0

    def loss(y, target):
        nonlocal steps
        steps += 1
        if steps == options.get("stop") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), options.get("signal", signal.SIGKILL))
        return nn.functional.cross_entropy(y, target)

    def run():
        model = network(seed=rank, hidden=options.get("hidden", 64))  # all must end with the master's
        nnz = [layer.layout.nnz for layer in model.layers]
        data = toy_data(options.get("data", 1), options.get("rows", 512))
        epochs = train(
            model, data, settings, test=toy_data(2, 500), skip=model.output, loss=loss,
            checkpoint=f"{folder}/last.safetensors", resume=options.get("resume", False),
        )  # fmt: skip
        assert [layer.layout.nnz for layer in model.layers] == nnz
        assert bool(epochs) == (rank == 0)
        assert all(epoch.samples_per_second > 0 for epoch in epochs)
        return model.state_dict(), [(epoch.epoch, epoch.phase, epoch.accuracy) for epoch in epochs]

    if "error" in options:
        try:
            run()
            text = "done"
        except BlockSparseError as error:
            text = str(error)
        except KeyboardInterrupt:
            text = "interrupted"
        with open(f"{folder}/{rank}.error", "w") as file:
            file.write(f"{text}.\n")
        os._exit(0)
    if "again" in options:
        torch.distributed.init_process_group("gloo")
        error = error_of(train, SparseMLP([20, 8, 2], epsilon=3), toy_data(1, 1), settings)
        assert error == "data: expected a sample or more for each of 2 workers, got 1"
        first = run()[0]
        results = run()
        for name, tensor in results[0].items():
            assert torch.equal(first[name], tensor), name
        torch.distributed.destroy_process_group()
    else:
        results = run()
    torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], eval(sys.argv[2]))
