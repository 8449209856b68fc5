"""Experts of mixtures: those of transformers become block-sparse where they compute what ours do; others are named."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import blocksparse as bs
from blocksparse import BlockSparseError
from blocksparse.nn.module import Weight
from blocksparse.ops.expert_linear import EXPERT_LINEAR, expert_linear
from blocksparse.surgery.prunable import survey


@pytest.fixture(autouse=True)
def backend():
    with bs.use_backend("cpu" if bs.backends()["cpu"] else "reference"):
        yield


@pytest.fixture
def mixtral():
    """A block with a router and three experts; sizes are no multiples of the block."""
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=12, intermediate_size=20, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_transformers_experts_become_sparse_and_go_back(mixtral):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    sparse = bs.sparsify(mixtral, 0.5, 8, scope="layer", force=True)
    assert isinstance(sparse.experts, bs.nn.Experts)
    assert sparse.experts.gate_up_proj.layout.shape == (3 * 40, 16)
    assert sparse.experts.down_proj.layout.shape == (3 * 16, 24)
    dense = bs.densify(sparse)
    assert {n: p.shape for n, p in dense.named_parameters()} == {n: p.shape for n, p in mixtral.named_parameters()}
    close(sparse(x), dense(x))
    mixtral.load_state_dict(dense.state_dict())
    close(sparse(x), mixtral(x))
    again = bs.sparsify(dense, 0.25, 8, scope="layer", force=True)
    assert again.experts.down_proj.layout.nnz < sparse.experts.down_proj.layout.nnz


def test_gradients_are_those_of_the_stored_blocks(mixtral):
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    sparse = bs.sparsify(mixtral, 0.5, 4, scope="layer", force=True)
    mixtral.load_state_dict(bs.densify(sparse).state_dict())
    for model in (sparse, mixtral):
        model(x).square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        weight, dense = getattr(sparse.experts, name), getattr(mixtral.experts, name).grad.flatten(0, 1)
        mask = bs.to_dense(torch.ones_like(weight.values), weight.layout)
        close(bs.to_dense(weight.values.grad, weight.layout), dense * mask)


def test_all_blocks_compute_the_same_as_before(mixtral):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    close(bs.sparsify(mixtral, 1, 8, force=True)(x), mixtral(x))


def test_one_weight_alone_and_experts_without_a_block(mixtral):
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    rows = torch.zeros(3, 2, 3, dtype=torch.bool)
    rows[0] = True  # the other experts have none
    layout = bs.BlockLayout(rows.flatten(0, 1), 8)
    only = bs.sparsify(mixtral, layouts={"experts.down_proj": layout}, force=True)
    assert only.experts.gate_up_proj is not mixtral.experts.gate_up_proj
    assert isinstance(only.experts.gate_up_proj, nn.Parameter)
    assert isinstance(only.experts.down_proj, Weight)
    close(only(x), bs.densify(only)(x))
    with torch.no_grad():
        mixtral.experts.down_proj[1:] = 0
    close(only(x), mixtral(x))


def test_states_and_optimizers_follow(mixtral):
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    loaded = bs.densify(bs.sparsify(mixtral, 0.5, 4, force=True))
    optimizer = torch.optim.AdamW(mixtral.parameters(), lr=0.01)
    mixtral(x).square().sum().backward()
    optimizer.step()
    kept = optimizer.state[mixtral.experts.down_proj]["exp_avg"].flatten(0, 1)
    sparse = bs.sparsify(mixtral, 0.5, 4, force=True, inplace=True, optimizer=optimizer)
    weight = sparse.experts.down_proj
    close(optimizer.state[weight.values]["exp_avg"], bs.from_dense(kept, weight.layout))
    optimizer.zero_grad()
    sparse(x).square().sum().backward()
    optimizer.step()
    close(bs.load_sparsified(loaded, sparse.state_dict())(x), sparse(x))


def test_a_pruner_of_dense_weights_takes_experts(mixtral):
    optimizer = torch.optim.SGD(mixtral.parameters(), lr=0.1)
    method = bs.sparsity.GradualPruning(mixtral, optimizer, 0.5, begin=0, end=2, every=1, block_size=4)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        mixtral(x).square().mean().backward()
        method.step()
    assert any(isinstance(module, Weight) for module in method.finish().modules())


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        return torch.einsum("ti,eoi->teo", x, self.weight)


def test_what_is_not_known_is_refused_by_name(mixtral):
    class Scaled(type(mixtral.experts)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    mixtral.experts.__class__ = Scaled
    reasons = {weight.name: reason for weight, reason in survey(nn.ModuleList([mixtral, Einsum()]))}
    unknown = "has no block-sparse counterpart: how it multiplies a stack of weights is not known"
    assert reasons["0.experts.gate_up_proj"] == f"Scaled {unknown}"
    assert reasons["1.weight"] == f"Einsum {unknown}"
    with pytest.raises(BlockSparseError, match="weight: Einsum has no block-sparse counterpart"):
        bs.sparsify(Einsum(), 0.5, force=True)


def test_experts_of_other_forms_are_refused_by_name():
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    config = GptOssConfig(hidden_size=16, intermediate_size=16, num_local_experts=2)
    reasons = [reason for weight, reason in survey(nn.Sequential(GptOssExperts(config)))]
    assert all("GptOssExperts has no block-sparse counterpart" in reason for reason in reasons)


def test_tokens_without_an_expert_get_nothing():
    experts = bs.nn.Experts(2, 8, 8, density=0.5, block_size=4)
    y = experts(torch.randn(2, 8), torch.tensor([[2, 2], [0, 2]]), torch.ones(2, 2))
    assert not y[0].any()
    assert y[1].any()


SIZES = {"padded": (5, 20, 12, 0.5, 8), "oblong blocks": (3, 16, 24, 0.3, (4, 8)), "dense": (4, 20, 12, None, 8)}


def drawn(name):
    """Experts in float64, and a call of them in which the last expert has no token, and some tokens have none."""
    experts, hidden, inner, density, block = SIZES[name]
    made = bs.nn.Experts(experts, hidden, inner, density=density, block_size=block).double()
    index = torch.randint(experts - 1, (9, 2))
    index[0], index[1, 1] = experts, experts
    x, weights = torch.randn(9, hidden).double().requires_grad_(), torch.rand(9, 2).double().requires_grad_()
    return made, (x, index, weights)


def by_expert(experts, x, index, weights):
    """The definition, by the dense weights of each expert."""
    y = torch.zeros_like(x)
    up, down = (
        weight if isinstance(weight, nn.Parameter) else bs.to_dense(weight.values, weight.layout)
        for weight in (experts.gate_up_proj, experts.down_proj)
    )
    for nth, (u, d) in enumerate(zip(up.chunk(experts.num_experts), down.chunk(experts.num_experts), strict=True)):
        u, d = (part.flatten(0, -2) for part in (u, d))
        u, d = u[: 2 * experts.intermediate_dim, : x.shape[1]], d[: x.shape[1], : experts.intermediate_dim]
        gate, gated = (x @ u.T).chunk(2, -1)
        y = y + (nn.functional.silu(gate) * gated) @ d.T * (weights * (index == nth)).sum(1, keepdim=True)
    return y


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_it_is_the_sum_of_what_the_experts_of_a_token_compute(name, backend):
    experts, inputs = drawn(name)
    if not bs.backends()[backend]:
        pytest.skip("the core is not built")
    leaves = [inputs[0], inputs[2], *experts.parameters()]
    with bs.use_backend(backend):
        found = experts(*inputs)
        grads = torch.autograd.grad(found.square().sum(), leaves)
    expected = by_expert(experts, *inputs)
    close(found, expected)
    for mine, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        close(mine, wanted)
    close(experts(inputs[0], inputs[1].int(), inputs[2]), expected)


ROUTINGS = {
    "one expert has all tokens": lambda: torch.full((40, 2), 3),
    "one has most": lambda: torch.where(torch.rand(40, 2) < 0.8, 5, torch.randint(24, (40, 2))),
    "even": lambda: torch.arange(80).view(40, 2) % 24,
    "no token": lambda: torch.zeros(0, 2, dtype=torch.long),
    "no token has an expert": lambda: torch.full((40, 2), 24),
    "no expert per token": lambda: torch.zeros(40, 0, dtype=torch.long),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_any_imbalance_and_number_of_threads(name, dtype):
    torch.manual_seed(1)
    experts = bs.nn.Experts(24, 48, 40, density=0.4, block_size=8).to(dtype)
    index = ROUTINGS[name]()
    x, weights = torch.randn(len(index), 48, dtype=dtype), torch.rand(index.shape, dtype=dtype)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]

    def run():
        y = experts(x, index, weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(run())
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
    with bs.use_backend("reference"):
        expected = run()
    bounds = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[0], expected, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("out", "in_"), [(96, 24), (300, 100), (7, 97), (40, 1)])
def test_dense_experts_of_any_size(out, in_, dtype):
    torch.manual_seed(out)
    layout, starts = bs.BlockLayout([[True]] * 3, (out, in_)), torch.tensor([0, 30, 30, 300])
    values = torch.randn(3, out, in_, dtype=dtype)
    for x, weights in (
        (torch.randn(300, in_, dtype=dtype), values.mT),
        (torch.randn(300, out, dtype=dtype), values),
    ):
        y = EXPERT_LINEAR((values, x), layout, (starts, weights is values))
        exact = torch.cat([x[:30].double() @ weights[0].double(), x[30:].double() @ weights[2].double()])
        assert (y.double() - exact).norm() < (2e-6 if dtype == torch.float32 else 1e-14) * exact.norm()


@pytest.mark.parametrize("density", [None, 0.5])
def test_transforms_of_torch_func(density):
    """The router is inside of the transform: each sample chooses its own experts."""
    experts = bs.nn.Experts(4, 16, 24, density=density, block_size=8, dtype=torch.float64)
    parameters, router = dict(experts.named_parameters()), torch.randn(16, 4, dtype=torch.float64)
    x = torch.randn(3, 5, 16, dtype=torch.float64)

    def loss(parameters, x):
        weights, index = (x @ router).softmax(-1).topk(2)
        return torch.func.functional_call(experts, parameters, (x, index, weights)).sin().sum()

    samples = [one.clone().requires_grad_() for one in x]
    leaves = [*parameters.values()]
    expected = [torch.autograd.grad(loss(parameters, one), [*leaves, one], create_graph=True) for one in samples]
    of_parameters, of_x = torch.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(parameters, x)
    for own, *right in zip([*of_parameters.values(), of_x], *expected, strict=True):
        close(own, torch.stack(right))
    twice = torch.func.jacrev(torch.func.jacrev(loss, 1), 1)(parameters, x[0]).flatten(0, 1)
    for own, number in zip(twice, expected[0][-1].flatten(), strict=True):
        close(own, torch.autograd.grad(number, samples[0], retain_graph=True)[0])
    close(torch.vmap(loss, (None, 0))(parameters, x), torch.stack([loss(parameters, one) for one in x]))


@pytest.mark.parametrize("density", [None, 0.5])
def test_bad_calls_are_refused_by_name(density):
    experts = bs.nn.Experts(4, 16, 24, density=density, block_size=8)
    x, index, weights = torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    for arguments, message in [
        ((None, index, weights), r"hidden_states: expected a tensor \[tokens, 16\], got NoneType"),
        ((x.tolist(), index, weights), r"hidden_states: expected a tensor \[tokens, 16\], got list"),
        ((x[:, :8], index, weights), r"hidden_states: expected a tensor \[tokens, 16\], got \[3, 8\]"),
        (
            (x.double(), index, weights),
            "hidden_states: expected the dtype and the device of the experts, torch.float32",
        ),
        ((x.to("meta"), index, weights), "hidden_states: expected the dtype and the device of the experts"),
        ((x, None, weights), r"top_k_index: expected a tensor \[3, k\], got NoneType"),
        ((x, index.float(), weights), "top_k_index: expected integers"),
        ((x, index, weights[:2]), r"top_k_weights: expected a tensor \[3, k\], got \[2, 2\]"),
        ((x, index, weights.to(torch.complex64)), "top_k_weights: expected real numbers, got torch.complex64"),
    ]:
        with pytest.raises(BlockSparseError, match=message):
            experts(*arguments)


def test_a_name_of_an_activation_is_refused():
    with pytest.raises(BlockSparseError, match=r"act_fn.*elementwise function.*'silu'"):
        bs.nn.Experts(2, 8, 8, act_fn="silu")


@pytest.mark.parametrize("name", SIZES)
def test_experts_are_twice_differentiable(name):
    experts, (x, index, weights) = drawn(name)
    names = [each for each, _ in experts.named_parameters()]

    def run(x, weights, *values):
        return torch.func.functional_call(experts, dict(zip(names, values, strict=True)), (x, index, weights))

    leaves = x, weights, *experts.parameters()
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", SIZES)
def test_compiled_experts_are_one_graph_that_computes_the_same(name):
    experts, inputs = drawn(name)
    leaves = [inputs[0], inputs[2], *experts.parameters()]
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for own, other in zip(
        *([f(*inputs), *torch.autograd.grad(f(*inputs).square().sum(), leaves)] for f in (compiled, experts)),
        strict=True,
    ):
        close(own, other)
    with pytest.raises(BlockSparseError, match="top_k_index: expected numbers from 0"):
        compiled(inputs[0], inputs[1] - 7, inputs[2])


@pytest.mark.parametrize("density", [0.5, None])
def test_the_graph_of_compiled_experts_has_one_product_for_all_of_them(density):
    nodes = []

    def backend(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    for number in (2, 24):
        torch._dynamo.reset()
        experts = bs.nn.Experts(number, 16, 8, density=density, block_size=8)
        torch.compile(experts, backend=backend)(torch.randn(9, 16), torch.randint(number, (9, 2)), torch.rand(9, 2))
    assert len(nodes) == 2
    assert nodes[0] == nodes[1]


class Sizes(TorchDispatchMode):
    """The sizes of all tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.total += sum(each.numel() for each in torch.utils._pytree.tree_leaves(made) if isinstance(each, Tensor))
        return made


@pytest.mark.parametrize("how", ["asked", "captured"])
@pytest.mark.parametrize("density", [0.5, None])
def test_the_backward_pass_writes_the_gradient_of_all_experts_once(how, density, monkeypatch):
    monkeypatch.setattr("blocksparse.nn.experts._is_captured", lambda x: how == "captured")
    for number in (6, 30):
        experts = bs.nn.Experts(number, 64, 48, density=density, block_size=16)
        index = torch.arange(8).reshape(4, 2) % number
        y = experts(torch.randn(4, 64), index, torch.rand(4, 2)).sum()
        with Sizes() as sizes:
            y.backward()
        weights = sum(parameter.numel() for parameter in experts.parameters())
        assert sizes.total < (4 if how == "asked" else 6) * weights


@pytest.mark.parametrize("name", SIZES)
def test_operations_of_experts_on_the_meta_device(name):
    experts, (x, index, weights) = drawn(name)
    y = experts.to("meta")(x.detach().to("meta").requires_grad_(), index.to("meta"), weights.detach().to("meta"))
    assert (y.shape, y.device.type) == (x.shape, "meta")
    y.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in experts.parameters())


@pytest.mark.parametrize("starts", [[1, 2, 3], [0, 3, 2], [0, 2, 9]])
def test_starts_that_are_none_are_refused(starts):
    layout = bs.patterns.dense((16, 8), 8)
    with pytest.raises(BlockSparseError, match=r"starts: expected 0, then non-decreasing numbers up to 5"):
        expert_linear(torch.randn(5, 8), torch.randn(layout.values_shape), layout, torch.tensor(starts))


@pytest.mark.parametrize("how", ["captured", "exported"])
def test_where_the_host_cannot_be_asked_every_expert_takes_all_tokens(how, monkeypatch):
    experts = bs.nn.Experts(4, 12, 20, density=0.5, block_size=8).double()
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    index = torch.randint(3, (9, 2))  # one expert has none
    index[0], index[1] = torch.tensor([4, 4]), torch.tensor([2, 2])  # a token without any, one with the same twice
    weights = torch.rand(9, 2, dtype=torch.float64)
    expected = experts(x, index, weights)
    grads = torch.autograd.grad(expected.square().sum(), [x, *experts.parameters()])
    if how == "captured":
        monkeypatch.setattr("blocksparse.nn.experts._is_captured", lambda x: True)
        monkeypatch.setattr(torch.Tensor, "tolist", None)
        found = experts(x, index, weights)
        for own, other in zip(
            torch.autograd.grad(found.square().sum(), [x, *experts.parameters()]), grads, strict=True
        ):
            close(own, other)
    else:  # of dense experts; others have an operation of their own
        dense = experts.densified()
        exported = torch.export.export(dense, (x.detach(), index, weights))
        assert not any("blocksparse" in str(node.target) for node in exported.graph.nodes)
        found = exported.module()(x.detach(), index, weights)
        other = torch.export.export(experts, (x.detach(), index, weights)).module()
        close(other(x.detach(), index, weights), expected)
        with pytest.raises(BlockSparseError, match="top_k_index"):
            other(x.detach(), index - 4, weights)
    close(found, expected)
    assert not found[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_of_experts():
    with bs.use_backend("triton"), torch.no_grad():
        experts = bs.nn.Experts(4, 64, 96, density=0.5, device="cuda")
        x, index, weights = torch.randn(9, 64).cuda(), torch.randint(4, (9, 2)).cuda(), torch.rand(9, 2).cuda()
        expected = experts(x, index, weights)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for nth in range(4):  # kernels of all experts for all tokens are compiled before
                experts(x, torch.full_like(index[:, :1], nth), weights[:, :1])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = experts(x, index, weights)
        graph.replay()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "density"), [(16, 128, 64, 0.25), (8, 128, 64, 0.1), (3, 90, 33, 0.5)]
)
def test_every_expert_has_blocks(experts, hidden, inner, density):
    module = bs.nn.Experts(experts, hidden, inner, density=density)
    for name in ("gate_up_proj", "down_proj"):
        counts = {int(rows.sum()) for rows in getattr(module, name).layout.mask().chunk(experts)}
        assert len(counts) == 1 or hidden % 32, name  # with padding, blocks hold unequally many weights
        assert min(counts) > 0, name


def test_a_density_without_a_block_for_each_expert():
    with pytest.raises(bs.BlockSparseError, match="one of the 8 blocks"):
        bs.nn.Experts(16, 128, 64, density=0.05)


@pytest.mark.parametrize("starts", [torch.tensor([0]), torch.tensor([0, 2, 5], dtype=torch.int32), [0, 2, 5]])
def test_starts_that_route_does_not_return(starts):
    layout = bs.patterns.random((2 * 64, 32), block_size=16, density=0.5, seed=0)
    with pytest.raises(bs.BlockSparseError, match=r"starts: expected int64 .* as `route` returns"):
        expert_linear(torch.randn(5, 32), torch.randn(layout.values_shape), layout, starts)
