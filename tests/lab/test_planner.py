"""The planner's bytes equal those of real processes, and its command."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import real_steps
from blocksparse.errors import BlockSparseError
from blocksparse_lab.planner import formulas, hardware, measure, net, plan
from command import error, output, run

H100 = hardware.PRESETS["h100"]
NET = net.mlp(layers=3, width=256, hidden=512, density=0.25, block=16)
# Data parallel, tensor parallel, sharded and both, on other numbers of processes.
ENGINES = [
    (4, None), (2, 2), (4, 1), (4, 2),
    *(pytest.param(*engine, marks=pytest.mark.full) for engine in ((2, None), (2, 1), (4, 4))),
]  # fmt: skip


def planned(job, tensor_parallel):
    return plan.ddp(NET, H100, job) if tensor_parallel is None else plan.fsdp2(NET, H100, job, tensor_parallel)


@pytest.mark.parametrize(("ranks", "tensor_parallel"), ENGINES)
def test_bytes_equal_those_of_real_processes(processes, ranks, tensor_parallel):
    job = plan.Job(ranks, tokens=24, optimizer="adam" if tensor_parallel == 1 else "momentum")
    predicted = planned(job, tensor_parallel)
    real = processes(ranks)(real_steps.run, NET, job, tensor_parallel)
    memory = {name: max(rank["memory"][name] for rank in real) for name in real[0]["memory"]}
    assert memory == {name: size for name, size in predicted.memory.items() if name != "copies"}
    for rank in real:
        assert rank["calls"].keys() == predicted.calls.keys()
        for name, calls in rank["calls"].items():
            assert sum(size for size, _ in calls) == sum(size for size, _ in predicted.calls[name])
            assert {of for _, of in calls} == {of for _, of in predicted.calls[name]}


def test_measured_rates_make_a_plan(processes, tmp_path, monkeypatch):
    found = processes(2)(quick_rates)[0]
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"hardware": hardware.as_json(found)}))
    assert hardware.find(str(path)) == found
    assert "TP 2 x FSDP2" in output("plan", "--machine", path, "--params", "1M", "--dtype", "fp32", "--gpus", "2")


def quick_rates():
    budget, copied = measure.BUDGET, measure.COPIED
    measure.BUDGET, measure.COPIED = 0.01, 1 << 20
    try:
        found = measure.rates()
    finally:
        measure.BUDGET, measure.COPIED = budget, copied
    assert found.inside.all_reduce.bandwidth > 0
    assert dist.get_world_size() == found.devices == 2
    assert torch.get_num_threads() == 1
    return found


def test_zero_papers_example():
    # Rajbhandari et al., section 3.1: 1.5 B parameters need 24 GB with Adam in mixed precision
    assert sum(formulas.model_state_bytes(1.5e9, 4, "adam").values()) == 24e9


def test_megatron_papers_example():
    # Narayanan et al., table 1: 175 B parameters, 96 layers of width 12288, batch 1536 of 2048 tokens
    flops = formulas.flops(12 * 96 * 12288**2, 1536 * 2048, True)
    flops += 96 * formulas.attention_flops(12288, 1536 * 2048, 2048, True)
    assert flops == pytest.approx(96 * 1536 * 2048 * 12288**2 * 96 * (1 + 2048 / (6 * 12288)), rel=1e-6)


def test_recompute_makes_a_plan_fit():
    model = net.transformer(10**10, 0.05)
    job = plan.Job(256, 2048, 2048, wire=2)
    assert plan.recommend(plan.plans(model, H100, job))[0] is None
    chosen, why = plan.recommend(plan.plans(model, H100, replace(job, recompute=True)))
    assert chosen.fits
    assert "DDP does not fit" in why


def test_small_nets_stay_on_ddp():
    chosen, _ = plan.recommend(plan.plans(net.transformer(10**8, 0.1), H100, plan.Job(8, 8192, 2048, wire=2)))
    assert chosen.engine == "DDP"


LARGE = ["--gpus", "10000000", "--batch", "1000000", "--params", "1000B", "--inside", "0.001", "--between", "0.0001"]


@pytest.mark.parametrize(("width", "more"), [(80, []), (80, LARGE), (120, [])])
def test_command_is_readable(width, more):
    arguments = ["plan", "--params", "10B", "--density", "0.05", "--gpus", "256", "--recompute", *more]
    result = run(*arguments, columns=width)
    assert max(map(len, result.output.splitlines())) <= width
    assert all(word in result.output for word in ("DDP", "FSDP2", "TP 8 x FSDP2", "fits", "NO", "h100"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "gpus: expected from 1 to 10000000, got 0"),
        (["--gpus", "99999999999999999999"], "gpus: expected from 1 to 10000000"),
        (["--block-size", "0"], "block_size: expected at least 1, got 0"),
        (["--inside", "nan"], "inside: expected from 1e-06 to 1e+06, got nan"),
        (["--between", "1e300"], "between: expected from 1e-06"),
        (["--batch", "0"], "batch: expected from 1"),
        (["--density", "2"], "density: expected more than 0"),
        (["--machine", "abacus"], "expected one of"),
        (["--optimizer", "lion"], "optimizer: expected one of"),
        (["--params", "many"], "expected a number"),
        (["--params", "10001B"], "params: expected at most 10T"),
        (["--width", "100"], "a multiple of 64"),
        (["--per-node", "0"], "per_node: expected an int, 1 or more, got 0"),
        (["--memory", "-1"], "memory: expected from 1e-06"),
        (["--dtype", "int3"], "dtype: expected one of"),
        (["--params", "1", "--layers", "96"], "params: expected at least a block"),
    ],
)
def test_bad_options_are_said(arguments, said):
    assert said in error("plan", *arguments)


def test_file_that_has_no_rates(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text('{"hardware": {"name": 1}}')
    with pytest.raises(BlockSparseError, match="rates that plan --measure wrote"):
        hardware.find(str(path))
