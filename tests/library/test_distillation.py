"""`bs.sparsity.Distillation`: each loss and agreement, and how outputs are recognized."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.sparsity import distillation


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["kl", "probabilities", "binary", "cosine", "mse"])
def test_each_loss_is_zero_for_equal_outputs_only(kind):
    x = torch.rand(6, 5).softmax(1) if kind != "kl" else torch.randn(6, 5)
    model, other = nn.Identity(), nn.Softmax(1)
    equal = bs.sparsity.Distillation(model, model, output=kind)(x)
    assert abs(float(equal)) < 1e-5
    assert float(bs.sparsity.Distillation(model, other, output=kind)(x)) > 1e-4


@pytest.mark.parametrize("kind", ["kl", "probabilities", "binary", "cosine", "mse"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)], ids=str)
def test_each_loss_compares_two_dtypes(kind, dtypes):
    x = torch.rand(6, 5).softmax(1)
    loss, score = (
        (f)(x.to(dtypes[0]), x.to(dtypes[1]), kind) for f in (distillation.compare, distillation.output_agreement)
    )
    assert abs(float(loss)) < 1e-3
    assert score > 0.99


def test_the_agreement_on_a_constant():
    target = torch.full((4, 1), 2.0)
    assert distillation.output_agreement(target, target, "mse") == 1
    assert distillation.output_agreement(target + 1, target, "mse") == 0.75


@pytest.mark.parametrize(("names", "expected"), [(("first", "second"), 0.75), (("logits", "hidden"), 1.0)])
def test_the_agreement_is_that_of_the_worst_output_or_of_logits(names, expected):
    class Model(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift = shift

        def forward(self, x):
            return dict(zip(names, (x, torch.full((4, 1), 2.0 + self.shift)), strict=True))

    judge = bs.sparsity.Distillation(Model(0.0), Model(1.0))
    x = torch.randn(4, 3)
    assert judge.agreement(judge.run_student(x), judge.run_teacher(x)) == expected


def test_outputs_are_recognized():
    x = torch.randn(6, 5)
    assert distillation.output_kind("logits", x) == "kl"
    assert distillation.output_kind("output", x) == "mse"
    assert distillation.output_kind("output", x.softmax(1)) == "probabilities"
    assert distillation.output_kind("output", x.log_softmax(1)) == "kl"
    assert distillation.output_kind("output", x.sigmoid()) == "binary"
    assert distillation.output_kind("output", F.normalize(x)) == "cosine"


def test_the_fields_of_a_dataclass_are_outputs():
    @dataclass
    class Output:
        logits: torch.Tensor
        count: int = 1

    x = torch.randn(6, 5)
    assert distillation.output_tensors(Output(x)) == {"logits": x}


def test_logits_without_a_softmax_are_compared_by_their_squares():
    assert distillation.output_kind("logits", torch.randn(6, 1)) == "mse"
    assert distillation.output_kind("logits", torch.randn(2, 5, 4, 4)) == "mse"
    teacher = nn.Linear(4, 5)
    teacher.config = SimpleNamespace(problem_type="multi_label_classification")
    assert distillation.output_kind("logits", torch.randn(6, 5), teacher) == "mse"
    teacher.config.problem_type = None
    assert distillation.output_kind("logits", torch.randn(6, 5), teacher) == "kl"


def test_hidden_layers_are_compared():
    teacher = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    student = bs.sparsify(teacher, 0.5, 4, force=True)
    x = torch.randn(8, 16)
    plain, hidden = (bs.sparsity.Distillation(teacher, student, hidden=weight)(x) for weight in (0.0, 1.0))
    errors = [
        (a - b).square().mean() / b.square().mean()
        for a, b in ((student[0](x), teacher[0](x)), (student(x), teacher(x)))
    ]
    torch.testing.assert_close(hidden - plain, sum(errors) / 2)
    other = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    with pytest.raises(bs.BlockSparseError, match="teacher: expected a layer"):
        bs.sparsity.Distillation(other, student, hidden=1.0)(x)


def test_a_whole_batch_as_one_argument_is_refused():
    model = nn.Linear(16, 4)
    with pytest.raises(bs.BlockSparseError, match=r"batch: expected the model's arguments one by one"):
        bs.sparsity.Distillation(model, model)((torch.randn(8, 16), torch.zeros(8)))
