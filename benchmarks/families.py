"""Check that families of models from transformers, timm and peft compute the same after they are made block-sparse.

    python benchmarks/families.py                       all families that are not in the table yet
    python benchmarks/families.py --only bert,llama     these families, even if they are in the table
    python benchmarks/families.py --again               all families

Each family is a small model with random weights, half of whose blocks `sparsify` keeps. The sparse model must compute
the same as its densified form, and each weight must get a gradient if the dense one does. Writes families.json and
families.md into docs/results after each family. The exit status is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blocksparse as bs
from blocksparse.checkpoint import read_json
from blocksparse.nn.module import BlockSparseModule, Weight
from blocksparse.surgery.prunable import survey
from blocksparse_lab.bench import report
from blocksparse_lab.bench.case import relative_error
from family_models import FAMILIES

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BOUND = 1e-4  # largest relative error, in float32 through whole models
GRADIENT_BOUND = 1e-3
SEED, DENSITY, BLOCK = 0, 0.5, 16
LIBRARIES = ("torch", "transformers", "timm", "peft")


@dataclass(frozen=True)
class Row:
    """The result of one family.

    Args:
        name, model: the family and the class of its model.
        taken: number of weights that became block-sparse.
        left: number of other weights, by reason.
        error: largest relative error of an output.
        gradients: number of weights whose gradient agrees with that of the dense weight, or is missing in both.
        failed: what went wrong, if anything.
        refused: why there is nothing to try, if so.
    """

    name: str
    model: str = ""
    taken: int = 0
    left: Mapping[str, int] | None = None
    error: float = math.nan
    gradients: int = 0
    failed: str = ""
    refused: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is nothing to try, or outputs and gradients agree."""
        return not self.failed and (bool(self.refused) or (self.error <= BOUND and self.gradients == self.taken))


def content(rows: Iterable[Row]) -> dict[str, Any]:
    """Return rows for JSON, without default values and with each reason once."""
    defaults = asdict(Row(""))
    short = [{name: value for name, value in asdict(row).items() if value != defaults[name]} for row in rows]
    reasons = list(dict.fromkeys(reason for row in short for reason in row.get("left", ())))
    for row in short:
        if "left" in row:
            row["left"] = {str(reasons.index(reason)): count for reason, count in row["left"].items()}
    return {"reasons": reasons, "families": short}


def parse_rows(content: Mapping[str, Any]) -> list[Row]:
    """Return the rows that `content` was made of."""
    rows = []
    for row in content["families"]:
        left = row.get("left")
        named = left and {content["reasons"][int(nth)]: count for nth, count in left.items()}
        rows.append(Row(**row | {"left": named}))
    return rows


def try_family(name: str) -> Row:
    """Build the family's model, make it block-sparse, and compare."""
    torch.manual_seed(SEED)
    made = ""
    try:
        model, inputs = FAMILIES[name]()
        made = type(model).__name__
        redraw(model)
        result = compare(model.eval(), inputs)
    except ModuleNotFoundError as error:
        return Row(name, made, refused=f"{error}")
    except Exception as error:  # any error of any library goes into the table
        line = next(iter(str(error).splitlines()), "")[:200]
        return Row(name, made, failed=f"{type(error).__name__}: {line}")
    return Row(name, made, **result)


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    """Draw all parameters again, so that every layer matters: some families start with scales and weights near 0."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1 / math.sqrt(max(parameter[0].numel(), 1)))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def compare(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Make a model block-sparse; return the fields of its row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.SparsityWarning)  # the table lists what is missed
        sparse = bs.sparsify(model, DENSITY, BLOCK, scope="layer", force=True)
    taken = [module for module in sparse.modules() if isinstance(module, BlockSparseModule)]
    reasons = [reason for _, reason in survey(model, BLOCK) if reason is not None]
    dense = bs.densify(sparse)
    outputs, of_dense = run_model(sparse, inputs), run_model(dense, inputs)
    if len(outputs) != len(of_dense) or not any(bool(y.any()) for y in outputs):
        raise bs.BlockSparseError.expected("outputs", f"{len(of_dense)}, not all of them 0", len(outputs))
    error = max(output_error(ours, expected) for ours, expected in zip(outputs, of_dense, strict=True))
    return {
        "taken": len(taken),
        "left": dict(Counter(map(shorten, reasons)).most_common()),
        "error": error,
        "gradients": count_correct_gradients(sparse, dense),
    }


def shorten(reason: str) -> str:
    """Shorten a reason for the table.

    >>> shorten("tied to model.embedding.weight")
    'tied to an embedding or another layer'
    """
    return "tied to an embedding or another layer" if reason.startswith("tied to ") else reason


def run_model(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the floating-point outputs after a backward pass through random weights of them."""
    torch.manual_seed(SEED)  # for models that draw masks
    model.zero_grad()
    outputs = list(float_tensors(model(**inputs)))
    generator = torch.Generator().manual_seed(SEED)
    loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs if y.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return [y.detach() for y in outputs]


def float_tensors(value: Any) -> Iterable[Tensor]:
    """Yield the floating-point tensors in nested outputs."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from float_tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from float_tensors(each)


def output_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative l2 error; infinite if shapes differ or a number is not finite."""
    if result.shape != expected.shape or not result.isfinite().all() or not expected.isfinite().all():
        return math.inf
    return relative_error(result, expected.double())


def count_correct_gradients(sparse: nn.Module, dense: nn.Module) -> int:
    """Return the number of block-sparse weights whose gradient agrees with the dense weight's, or is missing in both.

    Products of gradient and weight are compared, as they do not depend on how either is stored.
    """
    of_dense, pairs = dict(dense.named_parameters()), []
    for name, module in sparse.named_modules():
        if isinstance(module, BlockSparseModule):
            weight = of_dense[name if isinstance(module, Weight) else f"{name}.weight"]
            pairs.append((gradient_product(module.values), gradient_product(weight)))
    most = max((ours[1] for ours, _ in pairs if ours is not None), default=0.0)
    good = 0
    for ours, theirs in pairs:
        if ours is None or theirs is None:
            good += ours is None and theirs is None
        else:  # if attention weights are all equal, gradients are rounding errors
            good += abs(ours[0] - theirs[0]) <= max(GRADIENT_BOUND * ours[1], 1e-6 * most)
    return good


def gradient_product(parameter: Tensor) -> tuple[float, float] | None:
    """Return the sum of gradient times parameter, and the product of their norms; None without a gradient."""
    if parameter.grad is None:
        return None
    grad, value = parameter.grad.double(), parameter.detach().double()
    return float((grad * value).sum()), float(grad.norm() * value.norm())


HEAD = ("family", "model", "block-sparse weights", "weights left dense", "error", "correct gradients", "result")
CAPTION = """# Families of models

{tried} families were tried, and {passed} pass. Each is a small model with random weights, made block-sparse at density
{density:g} in blocks of {block} x {block}. A family passes if its outputs equal those of the densified model to a
relative error of {bound:g}, and if every block-sparse weight gets the gradient of the dense one.

Embeddings are looked up and not multiplied, so they stay dense. "Other modules" and "3-D weights" belong to classes
that the library does not know. `bs.report` gives the reason for each weight. RWKV needs `rescale_every=0`, because it
would divide its weights in place.

`python benchmarks/families.py` makes this table, here with {versions}."""
# Kinds of weights that stay dense, by a pattern of their reason.
KINDS = {
    ".*looked up": "embeddings",
    ".*stack of weights": "3-D weights",
    ".*no block-sparse counterpart|Linear may": "other modules",
    "[0-9]+ groups": "grouped convolutions",
    "tied to": "tied weights",
    "an adapter": "adapters",
}


def describe(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Return a caption, and a table with a row for each family."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES if find_spec(name))
    tried, passed = sum(not row.refused for row in rows), sum(row.passed for row in rows)
    caption = CAPTION.format(versions=versions, tried=tried, passed=passed, density=DENSITY, block=BLOCK, bound=BOUND)
    return caption, report.markdown(HEAD, [_cells(row) for row in rows], text=len(HEAD))


def _cells(row: Row) -> tuple[str, ...]:
    kinds: Counter[str] = Counter()
    for reason, count in (row.left or {}).items():
        kinds[next((kind for words, kind in KINDS.items() if re.match(words, reason)), reason)] += count
    left = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
    verdict = row.failed or row.refused or ("passes" if row.passed else "FAILS")
    error, gradients = (f"{row.error:.1e}", f"{row.gradients} of {row.taken}") if row.taken else ("", "")
    return row.name, row.model, f"{row.taken}", left, error, gradients, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--again", action="store_true", help="also families that are in the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="output folder")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise SystemExit(f"families: --only: expected names out of {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    path = options.out / "families.json"
    rows = {row.name: row for row in parse_rows(read_json(path))} if path.is_file() else {}
    for name in chosen:
        if name in rows and rows[name].passed and not options.again and not options.only:
            continue
        row = rows[name] = try_family(name)
        print(f"{name:24} {row.taken:4} weights, error {row.error:.1e}  {row.failed or row.refused or row.passed}")
        ordered = [rows[each] for each in FAMILIES if each in rows]
        report.write(path, content(ordered), *describe(ordered))
    return int(not all(row.passed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
