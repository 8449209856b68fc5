"""Each measured figure of the documents is in a committed result, and the check of that notices what is not."""

import pytest

import figures
from blocksparse_lab import experiments


def test_figures_are_those_of_committed_results():
    assert figures.all_wrong() == []


def test_the_page_of_claims_is_made_of_results(tmp_path):
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    table = "|  | dense | set |\n|---|---|---|\n| seeds | 3 | 5 |\n| error | -0.1416 ± 0.02 | 1234.5 |\n"
    (results / "a.md").write_text(table + "| more | +0.25 ± 0.11 (p 0.058) | +0.25 ± 0.19 (unpaired, p 0.041) |\n")
    (results / "b.md").write_text("|  | less | seeds |\n|---|---|---|\n| set | -0.25 | 1 |\n")
    template = (
        "{a.md | error | dense | 2}, {a.md | error | dense | 0% unsigned} %, {a.md | error | set | 0} of {x} words"
    )
    assert figures.claims(template, tmp_path) == "-0.14 ± 0.02, 14 ± 2 %, 1,234 of {x} words"
    judged = "{a.md | more | dense | 2 less}, {a.md | more | set | 1 more}, {b.md | set | less | 1 more}"
    assert figures.claims(judged, tmp_path) == "+0.25 ± 0.11 (p 0.058), +0.2 ± 0.2 (unpaired, p 0.041), -0.2 (one seed)"
    with pytest.raises(LookupError, match="0 cells"):
        figures.claims("{a.md | error | rigl | 2}", tmp_path)


def test_runs_that_were_not_made_are_listed(tmp_path):
    lines = figures.not_made(tmp_path)
    assert len(lines) == 2 + len(experiments.EXPERIMENTS)
    assert "| `wikipedia-large` | dense (1); small-world (1) | days of a GPU |" in lines
    assert "| `wikipedia-cell` | dense (3); small-world (3) | 1.5 |" in lines
    assert len(figures.not_made()) < len(lines)
    assert figures.claims("# A page\n\n{runs that were not made}\n", tmp_path).splitlines()[2:] == lines


def test_verdicts_are_those_of_the_differences(tmp_path):
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    cells = {
        "up": "+1.0 ± 0.1 (p 0.003)",
        "down": "-1.0 ± 0.1 (p < 0.001)",
        "even": "+0.1 ± 0.1 (p 0.2)",
        "one": "-1.0",
    }
    head = f"|  | {' | '.join(cells)} |\n|{'---|' * 5}\n"
    (results / "a.md").write_text(f"{head}| x | {' | '.join(cells.values())} |\n")
    lines = [
        (of, manner, verdict)
        for of, manner, verdict in [
            ("up", "more", "won: by far"), ("up", "less", "won"), ("down", "less", "open; won"),
            ("down", "more", "lost; not shown"), ("even", "more", "won"), ("even", "less", "not shown, yet"),
            ("one", "less", "won"), ("one", "less", "open"), ("up", "more", "not shown"), ("up", "less", "lost"),
            ("even", "more", "clearly won"), ("up", "less", "sparse wins"),
        ]
    ]  # fmt: skip
    rows = [f"| c | {{a.md | x | {of} | 1 {manner}}} | {verdict} |" for of, manner, verdict in lines]
    found = figures.unfounded("\n".join([*rows, "| g | 1.0 | won |"]), tmp_path)
    wrong = [("up", "less", "won"), ("down", "more", "not shown"), ("even", "more", "won"), ("one", "less", "won")]
    wrong += [("up", "more", "not shown"), ("even", "more", "clearly won"), ("up", "less", "sparse wins")]
    assert len(found) == len(wrong)
    for fault, (of, manner, verdict) in zip(found, wrong, strict=True):
        assert f"the verdict '{verdict}'" in fault
        assert f"{of} | 1 {manner}" in fault


def test_a_difference_says_which_sign_wins(tmp_path):
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (results / "a.md").write_text("|  | set |\n|---|---|\n| x | +0.1 ± 0.1 (p 0.2) |\n| y | +0.1 |\n")
    assert figures.unfounded("{a.md | x | set | 1 more} {a.md | y | set | 1 unsigned}", tmp_path) == []
    (fault,) = figures.unfounded("{a.md | x | set | 1}", tmp_path)
    assert "end with 'less' or 'more'" in fault


def test_verdicts_that_the_lowest_error_would_change(tmp_path):
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    rows = {
        "last": ["+2.0 ± 1.0 (p 0.02)", "-1.0 ± 2.0 (p 0.3)"],
        "lowest": ["+1.0 ± 3.0 (p 0.4)", "-0.5 ± 2.0 (p 0.6)"],
    }
    lines = [f"| {of} test error, against set | {' | '.join(cells)} |" for of, cells in rows.items()]
    (results / "a.md").write_text("\n".join(["|  | dense | fixed |", "|---|---|---|", *lines]) + "\n")
    template = "".join(f"{{a.md | last test error, against set | {one} | 1 more}}" for one in ("dense", "fixed"))
    assert figures.by_the_lowest_error(template, tmp_path) == "`a` dense (+1.0 ± 3.0, p 0.4)"


def test_the_overview_has_all_that_was_won_or_lost():
    page = "### A claim (2018)\n\n- **Verdict**: won, here; behind at equal steps (one seed); faster; lost: much\n"
    assert figures.overview(page)[2:] == [
        "| [A claim (2018)](#a-claim-2018) | won, here; behind at equal steps; lost |"
    ]


def test_what_is_wrong_is_noticed(tmp_path):
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    (results / "a.md").write_text("|  | dense | set |\n|---|---|---|\n| error, % | 3.14 ± 0.2 | 5 |\n")
    (results / "a.json").write_text('{"runs": [{"ratio": 9.14}]}')
    cell, path = "docs/results/a.md | error, % | dense", "docs/results/a.json | runs.0.ratio"
    text = "# A page\n\nAt density 0.1 an error of\n3.1 ± 0.2 %, and `code 9.9` [9.1 times](as.md) as fast.\n"

    def faults(entries, text=text):
        return "\n".join(figures.wrong("page", entries, text, tmp_path))

    good = {"of {3.1 ± 0.2} %": cell, "[{9.1} times]": path}
    assert faults(good) == ""
    assert "3.2, but docs/results/a.md" in faults({"of {3.2 ± 0.2} %": cell}, text.replace("3.1", "3.2"))
    assert "0.2, but docs/results/a.md" in faults(
        {"of {0.2} %": cell}, text.replace("3.1 ±", "0.2 ±").replace(" ± 0.2", "")
    )
    assert "3.1, but docs/results/a.md" in faults({"of {3.1 ± 3.1} %": cell}, text.replace("± 0.2", "± 3.1"))
    assert "9.2, but docs/results/a.json" in faults({"[{9.2} times]": path}, text.replace("9.1", "9.2"))
    negative = cell.replace("dense", "narrow")
    (results / "a.md").write_text("|  | dense | narrow |\n|---|---|---|\n| error, % | 3.14 ± 0.2 | -3.14 |\n")
    for sign, right in (("+", False), ("-", True), ("", True)):
        signed = faults(
            {f"of {{{sign}3.1}} %": negative, "[{9.1} times]": path}, text.replace("3.1 ± 0.2", f"{sign}3.1")
        )
        assert (signed == "") is right, sign
    (results / "b.json").write_text('{"part": 0.45}')
    part = {"are {45}": "docs/results/b.json | part"}
    assert "45, but docs/results/b.json" in "".join(figures.wrong("page", part, "These are 45 times", tmp_path))
    assert figures.wrong("page", part, "These are 45 %", tmp_path) == []
    assert "'0.2' has no entry" in faults(good, f"{text} At density 0.1, 0.2 times as fast.")
    assert faults(good, f"{text} At density 0.1, 0.2 it is fast.") == ""
    assert "'7.5' has no entry" in faults(good, f"{text} A loss < 1 took 7.5 s, not > 8.")
    assert "'9.1' has no entry" in faults({"of {3.1 ± 0.2} %": cell})
    assert "'{7} times' is there 0 times" in faults(good | {"{7} times": path})
    assert "0 cells" in faults(good | {"[{9.1} times]": cell.replace("dense", "rigl")})
    assert "ratios" in faults(good | {"[{9.1} times]": f"{path}s"})
    assert "no folder of results" in faults(good | {"[{9.1} times]": "README.md | 9.1"})
    assert "does not say" in faults(good | {"[{9.1} times]": "not recorded"})
    assert faults(good | {"[{9.1} times]": "not recorded"}, f"{text} By hand, not recorded.") == ""
