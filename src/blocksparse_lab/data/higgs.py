"""HIGGS: collisions with and without a Higgs boson, in 28 features."""

from __future__ import annotations

from pathlib import Path

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import csv_table
from .table import Table, split

LOW_LEVEL = (
    "lepton_pT", "lepton_eta", "lepton_phi", "missing_energy_magnitude", "missing_energy_phi",
    *(f"jet_{jet}_{what}" for jet in range(1, 5) for what in ("pt", "eta", "phi", "btag")),
)  # fmt: skip
HIGH_LEVEL = ("m_jj", "m_jjj", "m_lv", "m_jlv", "m_bb", "m_wbb", "m_wwbb")
# Of the published file, which does not name them.
COLUMNS = ("label", *LOW_LEVEL, *HIGH_LEVEL)
FILES = ("higgs.csv", "HIGGS.csv", "HIGGS.csv.gz")


def load(data_dir: str | Path | None = None, seed: int = 0) -> Table:
    """The rows of a file, a fifth of each class to test on, drawn with the seed.

    Each feature is standardised over the training rows.

    Args:
        seed: of the draw.

    Source: Baldi, Sadowski, Whiteson, Searching for exotic particles in high-energy physics with deep learning (2014).
    """
    if data_dir is None:
        raise BlockSparseError.expected("higgs", "HIGGS.csv in a folder given by --data-dir", "none")
    path = files.first("higgs", data_dir, *(f"higgs/{name}" for name in FILES), *FILES)
    rows, labels, classes = csv_table.read(path, columns=COLUMNS)
    if rows.shape[1] != len(COLUMNS) - 1 or classes != ("0", "1"):
        got = f"{rows.shape[1]} and {', '.join(classes[:5])}"
        raise BlockSparseError.expected(str(path), f"{len(COLUMNS) - 1} features and labels 0 and 1", got)
    return split("higgs", rows, labels, classes, seed)
