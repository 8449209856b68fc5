"""Probe a language model of bytes for sentiment: a sparse linear classifier of its state after a text.

The protocol is that of Radford, Jozefowicz and Sutskever, "Learning to Generate Reviews and Discovering Sentiment"
(2017), which "GPU Kernels for Block-Sparse Weights" (Gray, Radford and Kingma, 2017) also uses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blocksparse.errors import BlockSparseError

from ..data.reviews import Labelled, Splits, encode
from .text_features import STATES, CachedFeatures, Progress, digest, features

__all__ = [
    "STATES", "Baseline", "CachedFeatures", "Probe", "Result", "Unit",
    "baseline", "digest", "encode", "evaluate", "features", "picture", "probe", "single_unit",
    "sklearn_version", "standardized",
]  # fmt: skip

# Values of C in the order in which they are tried. The first of equally good ones, with the fewest features, is
# chosen.
STRENGTHS = tuple(2.0**k for k in range(-8, 1))
BASELINE_STRENGTHS = tuple(2.0**k for k in range(8))
SEED = 42


# -- the probe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A logistic regression with an L1 penalty.

    `strength` is its C, chosen by the validation accuracies in `tried`; `used` counts the nonzero `coefficients`
    `[width]`; `train`, `validation` and `test` are accuracies.
    """

    strength: float
    tried: dict[float, float]
    coefficients: np.ndarray
    intercept: float
    used: int
    train: float
    validation: float
    test: float
    converged: bool


def probe(
    parts: Sequence[np.ndarray],
    labels: Sequence[Sequence[int]],
    *,
    strengths: Sequence[float] = STRENGTHS,
    seed: int = SEED,
    progress: Progress | None = None,
) -> Probe:
    """Fit the protocol's sparse linear classifier on train, choose C on validation, and test once.

    Args:
        parts: features of train, validation and test, `[n, width]` each.
        labels: their labels, 0 or 1.
        strengths: values of C; the first of equally good ones is chosen.
    """
    strength, best, tried = _best_fit(parts, labels, strengths, "l1", seed, progress)
    train, validation, test = (float(best.score(part, label)) for part, label in zip(parts, labels, strict=True))
    used = int(np.count_nonzero(best.coef_))
    converged = bool(best.n_iter_.max() < best.max_iter)
    intercept = float(best.intercept_[0])
    return Probe(strength, tried, best.coef_[0], intercept, used, train, validation, test, converged)


@dataclass(frozen=True)
class Unit:
    """One unit alone as a classifier: inputs above `threshold`, fitted on train, get class `above`."""

    index: int
    coefficient: float
    threshold: float
    above: int
    train: float
    validation: float
    test: float


def single_unit(parts: Sequence[np.ndarray], labels: Sequence[Sequence[int]], coefficients: np.ndarray) -> Unit | None:
    """Return the unit with the largest coefficient as a classifier; None if all coefficients are zero."""
    index = int(np.argmax(np.abs(coefficients)))
    if coefficients[index] == 0:
        return None
    values = [np.asarray(part)[:, index] for part in parts]
    given = [np.asarray(label) for label in labels]
    threshold, above = _threshold(values[0], given[0])
    scores = [
        float(np.mean(np.where(value > threshold, above, 1 - above) == label))
        for value, label in zip(values, given, strict=True)
    ]
    return Unit(index, float(coefficients[index]), threshold, above, *scores)


def _threshold(values: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Return the threshold with the fewest errors, and the class above it."""
    order = np.argsort(values, kind="stable")
    values, labels = values[order].astype(np.float64), labels[order]
    # With the lowest n values below the threshold, zeros below and ones above are right.
    right = np.concatenate([[0], np.cumsum(1 - labels)]) + labels.sum() - np.concatenate([[0], np.cumsum(labels)])
    middles = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    # A threshold cannot lie between equal values.
    possible = np.concatenate([[True], values[1:] > values[:-1], [True]])
    ones = np.where(possible, right, -1)
    zeros = np.where(possible, len(labels) - right, -1)
    above = int(ones.max() >= zeros.max())
    return float(middles[np.argmax(ones if above else zeros)]), above


@dataclass(frozen=True)
class Baseline:
    """TF-IDF of words and pairs of words: C chosen on validation, and accuracies."""

    strength: float
    terms: int
    train: float
    validation: float
    test: float


def baseline(splits: Splits, *, seed: int = SEED) -> Baseline:
    """Fit a logistic regression on TF-IDF of words and pairs of words: the accuracy without pretraining."""
    _sklearn()
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), dtype=np.float64)
    parts: list[Labelled] = [splits.train, splits.validation, splits.test]
    try:
        train = vectorizer.fit_transform(parts[0].texts)
    except ValueError as error:
        raise BlockSparseError.expected(splits.name, "texts with words", error) from error
    terms = [train, vectorizer.transform(parts[1].texts), vectorizer.transform(parts[2].texts)]
    labels = [part.labels for part in parts]
    strength, best, _ = _best_fit(terms, labels, BASELINE_STRENGTHS, "l2", seed)
    scores = [float(best.score(x, label)) for x, label in zip(terms, labels, strict=True)]
    return Baseline(strength, len(vectorizer.vocabulary_), *scores)


def _best_fit(
    x: Sequence[Any],
    y: Sequence[Sequence[int]],
    strengths: Sequence[float],
    penalty: str,
    seed: int,
    progress: Progress | None = None,
) -> tuple[float, Any, dict[float, float]]:
    """Return the best strength on the validation part, its model fitted on train, and all accuracies."""
    sklearn = _sklearn()
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # scikit-learn 1.8 takes a ratio and warns about the penalty's name.
    named = tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 8)
    kind: dict[str, Any] = {"penalty": penalty} if named else {"l1_ratio": float(penalty == "l1")}
    models = {}
    tried: dict[float, float] = {}
    for strength in strengths:
        models[strength] = LogisticRegression(C=strength, solver="liblinear", random_state=seed, **kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` records it
            models[strength].fit(x[0], y[0])
        tried[strength] = float(models[strength].score(x[1], y[1]))
        if progress is not None:
            progress(len(tried), len(strengths))
    best = max(tried, key=lambda strength: tried[strength])  # the first of equally good ones
    return best, models[best], tried


def sklearn_version() -> str:
    """Return the version of scikit-learn, which fits the probe."""
    return str(_sklearn().__version__)


def _sklearn() -> Any:
    """Import scikit-learn, or raise how to install it."""
    try:
        import sklearn
    except ImportError as error:
        message = f"the probe needs scikit-learn ({error}): pip install scikit-learn"
        raise BlockSparseError(message) from error
    return sklearn


# -- all of it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Results of a model on labelled texts; `values` are those of the single unit after each test text."""

    splits: Splits
    of: str
    standardize: bool
    width: int
    probe: Probe
    unit: Unit | None
    values: np.ndarray | None
    baseline: Baseline | None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        probe = {name: value for name, value in vars(self.probe).items() if name not in ("coefficients", "tried")}
        used = np.flatnonzero(self.probe.coefficients)
        used = used[np.argsort(-np.abs(self.probe.coefficients[used]), kind="stable")]
        parts = {name: getattr(self.splits, name) for name in ("train", "validation", "test")}
        return {
            "data": self.splits.name,
            "classes": list(self.splits.classes),
            "texts": {name: len(part) for name, part in parts.items()},
            "of class 1": {name: sum(part.labels) for name, part in parts.items()},
            "text digests": {name: digest(*part.texts) for name, part in parts.items()},
            "of": self.of,
            "standardize": self.standardize,
            "width": self.width,
            "probe": {
                **probe,
                "test error": 1 - self.probe.test,
                "validation of each C": [[strength, score] for strength, score in self.probe.tried.items()],
                "coefficients": [[int(i), float(self.probe.coefficients[i])] for i in used],
            },
            "unit": None if self.unit is None else _finite(vars(self.unit)),
            "tf-idf baseline": None if self.baseline is None else vars(self.baseline),
        }


def evaluate(
    load: Callable[[], Any],
    splits: Splits,
    *,
    of: str = "cell",
    standardize: bool = False,
    cache: CachedFeatures | None = None,
    with_baseline: bool = False,
    batch: int = 128,
    chunk: int = 64,
    seed: int = SEED,
    progress: Callable[[str, int, int], None] | None = None,
) -> Result:
    """Run the whole protocol: features of each part, the probe, its best single unit.

    Args:
        load: returns the model; not called if all features are cached.
        splits: the texts.
        of: state that the probe sees, one of `STATES`; the protocol uses the last cell state.
        standardize: scale features to mean 0 and deviation 1 on the training part, so that the penalty does not prefer
            large ones; not in the protocol.
        cache: stores features.
        with_baseline: also fit the TF-IDF baseline.
        batch, chunk: as for `features`.
    """
    _sklearn()  # before the features, which may take hours
    if of not in STATES:
        raise BlockSparseError.expected("of", f"one of {', '.join(STATES)}", of)

    def reporter(what: str) -> Progress:
        return lambda done, total: progress(what, done, total) if progress is not None else None

    labelled = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    parts: list[np.ndarray] = []
    model = None
    for name, part in labelled.items():
        states = cache.load(part.texts) if cache is not None else None
        if states is None:
            model = model if model is not None else load()
            report = reporter(f"reading {splits.name}, {name}")
            states = features(model, part.texts, batch=batch, chunk=chunk, progress=report)
            if cache is not None:
                cache.save(part.texts, states)
        if of not in states:
            raise BlockSparseError.expected("of", f"one of {', '.join(states)} for a model without `outputs`", of)
        parts.append(states[of])
    if standardize:
        parts = standardized(parts)
    labels = [part.labels for part in labelled.values()]
    fitted = probe(parts, labels, seed=seed, progress=reporter("fitting the probe"))
    unit = single_unit(parts, labels, fitted.coefficients)
    values = None if unit is None else parts[2][:, unit.index]
    words = baseline(splits, seed=seed) if with_baseline else None
    return Result(splits, of, standardize, parts[0].shape[1], fitted, unit, values, words)


def standardized(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Scale features by the mean and deviation of the first part, the training part."""
    mean, deviation = parts[0].mean(0, dtype=np.float64), parts[0].std(0, dtype=np.float64)
    scale = np.where(deviation > 0, deviation, 1)  # constant features stay 0
    return [((part - mean) / scale).astype(np.float32) for part in parts]


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity by None."""
    # JSON has no infinity, the threshold of a unit that puts all texts into one class.
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in record.items()
    }


# -- the picture ---------------------------------------------------------------------------------------------------

# Distinct in grey and for colour-blind readers.
_COLORS = ("#d55e00", "#0072b2")


def picture(path: Path, result: Result, where: str) -> None:
    """Draw a histogram of the single unit per class, with its threshold, as a PNG; `where` describes the machine."""
    from blocksparse.topology.drawings.style import figure_and_axes, save

    unit, values, splits = result.unit, result.values, result.splits
    if unit is None or values is None:
        raise BlockSparseError.expected("result", "a unit to draw", "a probe whose coefficients are all zero")
    figure, axes = figure_and_axes((7.5, 4.4))
    given = np.asarray(splits.test.labels)
    # Extreme values would squeeze the rest.
    low, high = np.quantile(values, [0.001, 0.999])
    if not high > low:
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, min(60, max(12, len(values) // 25)))
    for label, color in enumerate(_COLORS):
        of = np.clip(values[given == label], low, high)
        name = f"{splits.classes[label]} ({len(of):,})"
        axes.hist(of, bins, color=color, alpha=0.25, lw=0)
        axes.hist(of, bins, color=color, histtype="step", lw=1.6, ls="-" if label else "--", label=name)
    if low < unit.threshold < high:
        axes.axvline(unit.threshold, color="0.2", lw=1)
        note = {"xytext": (4, -2), "textcoords": "offset points", "va": "top", "size": 8.5, "color": "0.2"}
        axes.annotate(
            f"threshold {unit.threshold:.3g}", (unit.threshold, 1), xycoords=("data", "axes fraction"), **note
        )
    axes.set(xlabel=f"unit {unit.index} after the text", ylabel="texts")
    axes.set_title(f"{splits.name}, test: unit {unit.index} alone, {100 * unit.test:.1f} % right", loc="left", size=11)
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    figure.supxlabel(where, size=7.5, color="0.4", x=0.01, ha="left")
    save(figure, path, 150)
