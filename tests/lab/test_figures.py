"""Figures and verdicts in the prose of pages, compared with the committed results."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import results_table  # noqa: E402

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
UNITS = "times|points|bits|seconds|%|GiB"
SETTINGS = {"7 to 9 times", "10 %", "1 %", "a tenth", "3 and 55 points", "38 %"}  # of a range, and of no measurement
QUOTED = tomllib.loads((ROOT / "docs/quoted_figures.toml").read_text())
VERDICTS = QUOTED.pop("verdicts")["differences"]
PAGES = sorted(
    page for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if results_table.blocks(page.read_text())
)


def page_text(page: Path) -> str:
    """Return a page in one line, without code and emphasis."""
    return re.sub(r"\s+", " ", re.sub(r"```.*?```|\*\*", "", page.read_text(), flags=re.DOTALL))


def cell(name: str, row: str, column: str) -> str:
    (_, line) = results_table.select(name, [row], [column])
    return line[1]


def rounds_to(figure: str, measured: str) -> bool:
    """Check that a figure is the measured number, with its deviation, as it is rounded; words may give the sign.

    >>> rounds_to("8.4", "8.37x (8.36-8.48) onednn"), rounds_to("0.40", "-0.40 ± 0.01"), rounds_to("8.3", "8.37x")
    (True, True, False)
    """
    pairs = zip(figure.split(" ± "), re.findall(NUMBER, measured), strict=False)
    return all(
        abs(abs(float(of.replace(",", ""))) - abs(float(value.replace(",", ""))))
        <= 0.5001 * 10.0 ** -len(of.partition(".")[2])
        for of, value in pairs
    )


def verdict(difference: str, winning_sign: str) -> str:
    """Return the verdict of a difference over seeds: it needs a p below 0.05.

    >>> verdict("-0.08 ± 0.01 (p < 0.001)", "-"), verdict("+1.3 ± 0.7 (p 0.083)", "+"), verdict("-1.0", "-")
    ('Won', 'Not shown', 'one seed')
    """
    p = re.search(r"p (?:< )?([\d.]+)\)$", difference)
    if p is None:
        return "one seed"
    if float(p[1]) >= 0.05:
        return "Not shown"
    return "Won" if difference[0] == winning_sign else "Lost"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_name_committed_results(page):
    for name, rows, columns in results_table.blocks(page.read_text()):
        assert len(results_table.select(name, rows, columns)) > len(rows), name


@pytest.mark.parametrize(("page", "words"), [(page, words) for page in QUOTED for words in QUOTED[page]])
def test_quoted_figures_are_those_of_the_results(page, words):
    assert page_text(ROOT / page).count(words) == 1
    figure = re.search(rf"{NUMBER}(?: ± {NUMBER})?$", words)[0]
    assert rounds_to(figure, cell(*QUOTED[page][words])), cell(*QUOTED[page][words])


@pytest.mark.parametrize("page", ["README.md", "docs/results/index.md"])
def test_every_measured_figure_is_listed(page):
    text = page_text(ROOT / page)
    for words in [*QUOTED[page], *SETTINGS]:
        text = text.replace(words, "")
    assert re.findall(rf".{{20}}{NUMBER} (?:{UNITS})\b.{{9}}", text) == []


@pytest.mark.parametrize(("claim", "expected", "name", "row", "column", "winning_sign"), VERDICTS)
def test_verdicts_follow_from_the_differences(claim, expected, name, row, column, winning_sign):
    section = (ROOT / "docs/results/claims.md").read_text().split(f"\n### {claim}\n")[1].split("\n##")[0]
    assert f"**{expected}" in section or f"| {expected}" in section
    assert verdict(cell(name, row, column), winning_sign) == expected.rsplit(" | ")[-1].capitalize()


def test_missing_runs_are_listed(tmp_path):
    none_made = results_table.missing_runs((tmp_path,))
    assert ["`wikipedia-large`", "dense (1); small-world (1)", "days of a GPU"] in none_made
    assert ["`wikipedia-cell`", "dense (3); small-world (3)", "1.5"] in none_made
    assert 1 < len(results_table.missing_runs()) < len(none_made)


def test_unknown_rows_and_columns_are_named():
    with pytest.raises(LookupError, match="no row 'rigl'"):
        results_table.select("wikipedia-small", ["rigl"], [])
    with pytest.raises(LookupError, match="no column"):
        results_table.select("wikipedia-small", [], ["rigl"])
