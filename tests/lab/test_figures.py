"""Figures and verdicts in the prose of pages, compared with the committed results."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import results_table  # noqa: E402

NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?"
UNITS = r"(?:times|points|bits|seconds|GiB)\b|%"
# Ends of phrases with numbers that are settings, ranges, or results of other tests.
SETTINGS = {
    "6 to 9 times",
    "10 %",
    "1 %",
    "with 5 %",
    "38 %",
    "27 %",
    "95 %",
    "8 bits",
    "LSTM of 2.7 times",
    "less than 5 points",
    "2.08 to 2.22 times",
    "1.6 times",
}
QUOTED = tomllib.loads((ROOT / "docs/quoted_figures.toml").read_text())
ANSWERS = QUOTED.pop("answers")["differences"]
RESULTS = ROOT / "docs/results"
TOPICS = ("index", "text", "images", "sparse_training", "pruning")
PROSE = ["README.md", *(f"docs/results/{topic}.md" for topic in TOPICS)]  # pages whose prose quotes measured figures
PROSE += [
    f"docs/{path.parent.name}/{path.name}"
    for part in ("start", "how_to")
    for path in (ROOT / "docs" / part).glob("*.md")
]
PROSE.remove("docs/how_to/gpu_tuning.md")  # predictions
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


def section(page: str, heading: str) -> str:
    """Return the text of a section, each paragraph in one line."""
    text = re.split(rf"\n##+ {re.escape(heading)}\n", (RESULTS / page).read_text())[1].split("\n## ")[0]
    return re.sub(r"(?<=\S)\n(?=\w)", " ", text)


def answer(difference: str, winning_sign: str) -> str:
    """Return whether the sparse side of a difference over seeds wins: that needs a p below 0.05.

    >>> answer("-0.08 ± 0.01 (p < 0.001)", "-"), answer("+1.3 ± 0.7 (p 0.083)", "+"), answer("-1.0", "-")
    ('yes', 'no difference found', 'one seed')
    """
    p = re.search(r"p (?:< )?([\d.]+)\)$", difference)
    if p is None:
        return "one seed"
    if float(p[1]) >= 0.05:
        return "no difference found"
    return "yes" if difference[0] == winning_sign else "no"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_name_committed_results(page):
    for name, rows, columns in results_table.blocks(page.read_text()):
        assert len(results_table.select(name, rows, columns)) > len(rows), name


@pytest.mark.parametrize(("page", "words"), [(page, words) for page in QUOTED for words in QUOTED[page]])
def test_quoted_figures_are_those_of_the_results(page, words):
    assert page_text(ROOT / page).count(words) == 1
    figure = re.search(rf"{NUMBER}(?: ± {NUMBER})?$", words)[0]
    assert rounds_to(figure, cell(*QUOTED[page][words])), cell(*QUOTED[page][words])


@pytest.mark.parametrize("page", sorted(PROSE))
def test_every_measured_figure_is_listed(page):
    text = re.sub(r"- Published: .*?(?= - |$)", "", page_text(ROOT / page))  # figures of others
    listed = {text.index(words) + len(words) for words in QUOTED.get(page, ())}
    figures = re.finditer(rf"({NUMBER}(?: ± {NUMBER})?) (?:{UNITS})", text)
    unlisted = [figure for figure in figures if figure.end(1) not in listed]
    assert [
        text[max(0, f.start() - 30) : f.end()] for f in unlisted if not text[: f.end()].endswith((*SETTINGS,))
    ] == []


@pytest.mark.parametrize(("page", "heading", "words", "expected", "name", "row", "column", "winning_sign"), ANSWERS)
def test_answers_follow_from_the_differences(page, heading, words, expected, name, row, column, winning_sign):
    assert words in section(f"{page}.md", heading)
    assert answer(cell(name, row, column), winning_sign) == expected


def test_the_overview_gives_the_answers_of_its_sections():
    index = (RESULTS / "index.md").read_text()
    rows = re.findall(r"\| \*\*(\w+)\*\*: [^|]* \| \[[^]]*\]\((\w+\.md)#([\w-]+)\)", index)
    assert len(rows) > 10
    for first_word, page, anchor in rows:
        headings = re.findall(r"^##+ (.*)$", (RESULTS / page).read_text(), re.MULTILINE)
        (heading,) = [one for one in headings if re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") == anchor]
        assert section(page, heading).lstrip().startswith(f"**{first_word}"), heading


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
