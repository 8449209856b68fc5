"""PyTorch's own samples of its modules: block-sparse with all blocks stored they compute the same, gradients too."""

import warnings
from itertools import islice

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule, Weight

FAMILIES = [
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "LSTM", "GRU",
    "RNN", "LSTMCell", "GRUCell", "RNNCell", "MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder",
    "TransformerDecoderLayer", "Transformer",
]  # fmt: skip


@pytest.fixture(autouse=True)
def backend():
    with bs.use_backend("cpu" if bs.backends()["cpu"] else "reference"):
        yield


def samples(family, training):
    """Modules in this mode and their arguments, of each sample."""
    pytest.importorskip("expecttest", reason="PyTorch's samples need it")
    common_modules = pytest.importorskip("torch.testing._internal.common_modules")  # seconds, not when tests are listed
    (info,) = (each for each in common_modules.module_db if each.module_cls is getattr(nn, family))
    made = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )  # fmt: skip
    for sample in made:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # encoders tell what they do not fuse
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        yield sample.desc, module.double().train(training), sample.forward_input


def without_dropout(module):
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return module


def tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [] if found is None else [tensor for each in found for tensor in tensors(each)]


def leaves(given):
    """The arguments, with copies of tensors that gradients can be asked of, and these; equal ones stay the same."""
    memo = {}

    def leaf(value):
        if isinstance(value, tuple | list):
            return type(value)(leaf(each) for each in value)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return memo.setdefault(id(value), value.detach().clone().requires_grad_())
        return value

    kwargs = {name: leaf(value) for name, value in given.kwargs.items()}
    return leaf(tuple(given.args)), kwargs, list(memo.values())


def results(module, given):
    """Outputs; gradients of the arguments; those of the parameters by the dense names."""
    args, kwargs, wanted = leaves(given)
    outputs = tensors(module(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    loss = sum((y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in outputs)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return outputs, [each.grad for each in wanted], grads


def dense_gradients(module, grads):
    """The gradients under the names, and with the shapes, that they have in the dense module."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.grad = None
            parameter.copy_(torch.zeros_like(parameter) if grads[name] is None else grads[name])
    return dict(bs.densify(module).named_parameters())


def unfused(module, args, kwargs):
    """Call a module without PyTorch's fused encoders, which set padded positions to 0."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def cases():
    """All samples; of families that have many or slow ones, each fourth, and `full` all."""
    slow = ("Transformer", "TransformerEncoder", "TransformerDecoderLayer")
    many = ("LSTM", "GRU", "RNN", "MultiheadAttention", "TransformerEncoderLayer")
    for family in FAMILIES:
        for training, mode in ((True, "train"), (False, "eval")):
            if family in many:
                # Encoders have a fast path when they do not train; decoders have none, and take long.
                often = training or family not in ("LSTM", "MultiheadAttention")
                marks = () if often else pytest.mark.full
                yield pytest.param(family, training, 4, id=f"{family}-{mode}-fourth", marks=marks)
            marks = pytest.mark.full if family in slow + many else ()
            yield pytest.param(family, training, 1, id=f"{family}-{mode}", marks=marks)


@pytest.mark.parametrize(("family", "training", "every"), list(cases()))
def test_samples_agree(family, training, every):
    count = 0
    for desc, module, given in islice(samples(family, training), 0, None, every):
        module = without_dropout(module)
        sparse = bs.sparsify(module, 1, 4, force=True)
        assert any(isinstance(part, BlockSparseModule | Weight) for part in sparse.modules())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own modules
            outputs, of_inputs, of_parameters = results(module, given)
        found, of_inputs_found, of_values = results(sparse, given)
        at = f"{family} {desc}"
        close = {"rtol": 1e-9, "atol": 1e-10, "msg": lambda message, at=at: f"{at}: {message}"}
        torch.testing.assert_close(found, outputs, **close)
        torch.testing.assert_close(of_inputs_found, of_inputs, **close)
        if not training:
            with torch.no_grad(), warnings.catch_warnings():
                args, kwargs, _ = leaves(given)
                found = tensors(sparse(*args, **kwargs))  # quietly: warnings are errors
                torch.testing.assert_close(found, tensors(unfused(module, args, kwargs)), **close)
        dense = dense_gradients(sparse, of_values)
        for name, grad in of_parameters.items():
            grad = torch.zeros_like(dense[name]) if grad is None else grad
            torch.testing.assert_close(dense[name].detach(), grad, **close)
        count += 1
    assert count
