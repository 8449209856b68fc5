"""Measured figures of the documents, compared with committed results, as `docs/figures.toml` lists them.

    python tests/figures.py            lists what is wrong
    python tests/figures.py --write    makes docs/results/claims.md

A line of that list is `"text around {9.1} times" = "folder/result.md | words of the row | head of the column"` (by
default "measured"), or `"folder/result.json | path.to.0.number"`: each number in braces is in that cell, as the text
rounds it. Several numbers may have a list of references, one for each. The text, without links and code, is in the
document once. The page of claims is made of `docs/claims.md.in`, where such references stand in the text, each with
the digits to round to: {result.md | words of the row | head of the column | 2}, 2% for parts of one in percent, and
"2 unsigned" where words say the sign. "2 less" is a difference over seeds that is won if it is negative, "2 more" one
that is won if it is positive: its p stands behind it, and a verdict must agree.
{hours | experiment | contender; contender} says what was not run, and how long it would take.
"not recorded" instead of a reference needs these words in the section. `not_measured` lists texts around
settings, targets and sizes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from blocksparse_lab import experiments

ROOT = Path(__file__).parents[1]
NUMBER = r"(?<![\w.,-])[+-]?\d[\d,]*(?:\.\d+)?"
UNIT = r" ?(?:x|%|times|points?|bits per|bytes per|[kKMGT]i?B|[nmu]?s|seconds|minutes|hours|samples|tokens/s)(?![\w/])"
# A decimal fraction, or a number with a unit; but not a fraction that words before it make a setting.
FIGURE = re.compile(rf"{NUMBER}(?<=\d)(?={UNIT})|(?<![\w.,-])[+-]?\d[\d,]*\.\d+(?!\.?\w)")
SETTING = re.compile(
    r"(?:[Dd]ensity|torch|PyTorch|Triton|Python|rewire)(?: of| at)? (?:[\d.]+(?:, | and | or | / | to ))*$"
)
PERCENT = re.compile(r"%|points?\b")
PLACE = re.compile(r"\{([^{}]+ \| [^{}]+)\}")
TEMPLATE, CLAIMS = ROOT / "docs" / "claims.md.in", ROOT / "docs" / "results" / "claims.md"
BREAK = "\N{PILCROW SIGN}"
VERDICT = "won", "lost", "not shown"
VERDICTS = re.compile(r"\b(won|wins|lost|not shown)\b")
TESTED = re.compile(r"\(([\w ]+, )?p (< )?[\d.]+\)")  # what a difference is shown with
LEADING = re.compile(r"\b(won|lost|not shown|open|behind)\b")  # clauses of a verdict that its summary has


def plain(text: str) -> str:
    """A document in one line, without code and addresses."""
    text = re.sub(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", "` `", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|<[/!a-zA-Z][^>\n]*>", "]", text)
    return re.sub(r"\s+", " ", re.sub(r"\n\s*\n", f" {BREAK} ", text))


def apart(text: str) -> str:
    """The two numbers of a range are two, and the second is not negative."""
    return re.sub(r"(?<=\d)-(?=\d)", " ", text)


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in re.findall(NUMBER, apart(text))]


def agree(figure: str, value: float, in_percent: bool) -> bool:
    """Whether a figure is the value as it is rounded; of one without a sign words say it. Parts of one may be told in
    percent, where the text does."""
    most = 0.5 * 10.0 ** -len(figure.partition(".")[2]) * (1 + 1e-9)
    if figure[0] in "+-" and float(figure) * value < 0:
        return False
    return any(
        abs(abs(float(figure)) - abs(of)) <= most
        for of in (value, 100 * value if abs(value) <= 1 and in_percent else value)
    )


def cell(reference: str, root: Path) -> str:
    """What is where a reference leads."""
    name, row, column = [*reference.split(" | "), "measured"][:3]
    if not name.startswith(("docs/results/", "benchmarks/results/")):
        raise LookupError("no folder of results")
    text = (root / name).read_text()
    if name.endswith(".json"):
        found: Any = json.loads(text)
        for key in row.split("."):
            found = found[int(key) if isinstance(found, list) else key]
        return str(float(found))
    head: list[str] = []
    cells: dict[bool, list[str]] = {True: [], False: []}  # of rows whose first cell is the words, or that have them
    for line in text.splitlines():
        parts = [part.strip() for part in line[1:-1].split(" | ")] if line.startswith("|") else []
        if parts and row in line and column in head:
            cells[parts[0] == row].append(parts[head.index(column)])
        head = (head or parts) if parts else []
    found = cells[True] or cells[False]
    if len(found) != 1:
        raise LookupError(f"{len(found)} cells")
    return found[0]


def claims(template: str, root: Path = ROOT) -> str:
    """The page of claims, with the figures of the results where they are named."""

    def shown(place: re.Match[str]) -> str:
        *reference, how = place[1].split(" | ")
        if reference[0] == "hours":
            return f"not run, {hours(reference[1], how.split('; '), root)} h"
        digits, _, manner = how.partition(" ")
        folder = "" if reference[0].startswith("benchmarks/") else "docs/results/"
        text = cell(folder + " | ".join(reference), root)
        scale = 100 if digits.endswith("%") else 1
        signs = "+" if text.startswith("+") and manner != "unsigned" else ""
        parts = [scale * float(part) for part in numbers(text)[: 2 if "±" in text else 1]]
        if manner == "unsigned":
            parts[0] = abs(parts[0])
        told = [f"{part:{sign},.{digits.rstrip('%')}f}" for part, sign in zip(parts, [signs, ""], strict=False)]
        tested = re.search(r" \(.*\)$", text)
        judged = (tested[0] if tested else " (one seed)") if manner in ("less", "more") else ""
        return " ± ".join(told) + judged

    page = PLACE.sub(shown, template).replace("{runs that were not made}", "\n".join(not_made(root)))
    page = page.replace("{tested}", str(len(TESTED.findall(page))))
    for name, how in {"{other test}": by_the_other_test, "{lowest error}": by_the_lowest_error}.items():
        if name in page:
            page = page.replace(name, how(template, root))
    return page.replace("{overview}", "\n".join(overview(page)))


def by_the_other_test(template: str, root: Path) -> str:
    """Which of the differences that verdicts rest on change sides where runs of a seed are taken as pairs, or are not,
    other than in the tables."""
    known = {}
    for place in PLACE.findall(template):
        name, *words, _ = place.split(" | ")
        if difference(place, root) in VERDICT and name[:-3] in experiments.EXPERIMENTS:
            known[place] = f"`{name[:-3]}`", *judged(name[:-3], words, root)
    pairs = [(name, pair) for name, pair, *_ in known.values()]
    lost, found = [], []
    for place, (name, pair, title, text) in known.items():
        now = difference(place, root)
        # On machines of several instruction sets there are no pairs.
        p = None if "instruction set" in text else re.search(r"p (<? ?[\d.e-]+)\)$", text)
        if p and (float(p[1].strip("< ")) >= 0.05) != (now == "not shown"):
            of = f", {title}" if pairs.count((name, pair)) > 1 else ""
            (found if now == "not shown" else lost).append(f"{name} {pair}{of} (p {p[1]})")
    return f"{'; '.join(lost)} would not count, and {'; '.join(found)} would"


def judged(name: str, words: list[str], root: Path) -> tuple[str, str, str]:
    """Which two a difference is of, in what, and its cell by the other test."""
    of, runs = experiments.find(name), experiments.load(root / "docs" / "results" / f"{name}.json").runs
    column = next(column for column in of.columns if column.title in words)
    cells = column.cells(of.contenders, runs, not of.paired) or []
    one, text = next((one, text) for one, text in zip(runs, cells, strict=False) if one in words)
    return f"{one} against {column.against}", column.title.partition(", against")[0], text


def by_the_lowest_error(template: str, root: Path) -> str:
    """Which of the differences of errors after the last epoch would have another verdict by the lowest of any epoch."""
    others = []
    for place in dict.fromkeys(PLACE.findall(template)):
        lowest = place.replace("| last test error, against set |", "| lowest test error, against set |")
        verdicts = [difference(one, root) for one in (place, lowest)] if lowest != place else []
        if set(verdicts) <= set(VERDICT) and len(set(verdicts)) == 2:
            name, _, one, _ = place.split(" | ")
            text = cell(f"docs/results/{lowest.rpartition(' | ')[0]}", root)
            others.append(f"`{name[:-3]}` {one} ({text.replace(' (', ', ').strip(')')})")
    return "; ".join(others)


def overview(page: str) -> list[str]:
    """The lines of a table of all claims, each linked, with the first words of its verdict and of what else was won or
    lost."""
    lines = ["| claim | verdict |", "|---|---|"]
    for claim, verdict in re.findall(r"^### (.*)\n(?:(?!#).*\n)*?- \*\*Verdict\*\*: (.*)", page, re.MULTILINE):
        anchor = re.sub(r"[^\w -]", "", claim.lower()).replace(" ", "-")
        first, *others = (re.split("[:(]", clause)[0].strip() for clause in verdict.split("; "))
        told = "; ".join([first, *filter(LEADING.search, others)])
        lines.append(f"| [{claim}](#{anchor}) | {told} |")
    return lines


def not_made(root: Path = ROOT) -> list[str]:
    """The lines of a table of the runs of experiments that no result has, with the hours that they would take."""
    lines = ["| experiment | runs | hours |", "|---|---|---:|"]
    for name, of in experiments.EXPERIMENTS.items():
        runs = [f"{contender} ({count})" for contender in of.contenders if (count := lacking(name, contender, root))]
        lines += [f"| `{name}` | {'; '.join(runs)} | {hours(name, of.contenders, root)} |"] if runs else []
    return lines


def lacking(name: str, contender: str, root: Path) -> int:
    """How many runs of a contender no result has."""
    made = runs_made(name, root).get(contender, frozenset())
    return len(set(experiments.find(name).seeds) - made)


@cache
def runs_made(name: str, root: Path) -> dict[str, set[int]]:
    """The seeds of the runs that an experiment's result has of each contender; of one that was left out with a reason,
    all."""
    path = root / "docs" / "results" / f"{name}.json"
    if not path.exists():
        return {}
    of = experiments.load(path)
    made = {contender: {run.settings["seed"] for run in runs} for contender, runs in of.runs.items()}
    return made | {left.rpartition("-")[0]: set(experiments.find(name).seeds) for left in of.left_out}


def hours(name: str, contenders: Iterable[str], root: Path) -> str:
    """Those of the runs of contenders that no result has."""
    of = experiments.find(name)
    each = [of.hours(contender) for contender in contenders]
    if None in each:
        return "days of a GPU"
    total = sum(lacking(name, one, root) * (of.hours(one) or 0) for one in contenders)
    if not total:
        raise LookupError(f"{name}: no run of {', '.join(contenders)} is missing")
    return f"{max(0.1, total):.1f}"


def unfounded(template: str, root: Path = ROOT) -> list[str]:
    """The claims, and lines of tables, with a verdict that no difference in them has: won and lost want one with p
    below 0.05 and that sign, "not shown" one with a larger p."""
    faults = []
    claims = re.split(r"^(?=##)", template, flags=re.MULTILINE)
    rows = [line for line in template.splitlines() if line.startswith("|")]
    for text in [*claims, *rows]:
        found = {difference(place, root) for place in PLACE.findall(text)} - {"", "unsaid"}
        verdicts = re.findall(r"\*\*Verdict\*\*: (.*)", text) or [text.rstrip("| \n").rsplit(" | ", 1)[-1]]
        for clause in verdicts[0].split("; ") if found else ():
            told = {word.replace("wins", "won") for word in VERDICTS.findall(clause)}
            if told - found:
                faults.append(f"the verdict '{clause}' of '{text[:99]}...': its differences are {sorted(found)}")
    silent = [place for place in PLACE.findall(template) if difference(place, root) == "unsaid"]
    faults += [f"{{{place}}}: a difference with p is that of a verdict: end with 'less' or 'more'" for place in silent]
    return faults


def difference(place: str, root: Path) -> str:
    """Whether the difference that a reference is of was won, lost, or not shown to be one; "" of other references, but
    "unsaid" of one with p that does not say which sign wins."""
    *reference, how = place.split(" | ")
    manner = how.partition(" ")[2]
    if not reference[0].endswith(".md") or reference[0].startswith("benchmarks/"):
        return ""
    text = cell("docs/results/" + " | ".join(reference), root)
    p = re.search(r"\(.*p (<?) ?([\d.e-]+)\)$", text)
    if manner not in ("less", "more"):
        return "unsaid" if p else ""
    if not p:
        return "of one seed"
    if float(p[2]) >= 0.05:
        return "not shown"
    return "won" if (float(numbers(text)[0]) < 0) == (manner == "less") else "lost"


def wrong(name: str, entries: dict[str, Any], document: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the figures of a document."""
    text, faults = plain(document), []
    covered = [(found.start(), found.end()) for word in entries.get("not_measured", ()) for found in spans(word, text)]
    faults += [f"'{word}' is not there" for word in entries.get("not_measured", ()) if not spans(word, text)]
    for entry, given in entries.items():
        places = spans(entry, text) if entry != "not_measured" else []
        if entry != "not_measured" and len(places) != 1:
            faults.append(f"'{entry}' is there {len(places)} times")
        for place in places[:1]:
            covered.append((place.start(), place.end()))
            braces = apart(" ; ".join(re.findall(r"\{([^}]*)\}", entry)))
            figures = [(figure, before == "± ") for before, figure in re.findall(rf"(± )?({NUMBER})", braces)]
            section = text[max(0, text.rfind(f"{BREAK} #", 0, place.start())) :].split(f"{BREAK} #")[:2]
            of = [given] * len(figures) if isinstance(given, str) else given
            if not figures or len(of) != len(figures):
                faults.append(f"'{entry}' has {len(figures)} figures and {len(of)} references")
            elif given == "not recorded":
                faults += [f"'{entry}': its section does not say 'not recorded'"] * (given not in " ".join(section))
            else:
                pairs = zip(figures, of, strict=True)
                told = PERCENT.search(text[max(0, place.start() - 80) : place.end() + 30]) is not None
                faults += [f"'{entry}': {why}" for figure, place in pairs if (why := fault(*figure, place, told, root))]
    for found in FIGURE.finditer(text):
        setting = SETTING.search(text[: found.start()]) and not re.match(UNIT, text[found.end() :])
        if not setting and not any(a <= found.start() < b for a, b in covered):
            around = text[max(0, found.start() - 40) : found.end() + 30]
            faults.append(f"'{found.group()}' has no entry in docs/figures.toml: ...{around}...")
    return [f"{name}: {fault}" for fault in faults]


def spans(words: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(re.escape(re.sub(r"[{}]", "", words)), text))


def fault(figure: str, is_deviation: bool, reference: str, in_percent: bool, root: Path) -> str:
    """Why a figure is not what is where its reference leads, of "mean ± deviation" the one that it is."""
    try:
        text = cell(reference, root)
        found = [float(number) for number in numbers(text)]
        found = found[int(is_deviation) :][:1] if "±" in text else found
    except (LookupError, ValueError, TypeError, OSError) as error:
        return f"{reference}: {error}"
    right = any(agree(figure.replace(",", ""), value, in_percent) for value in found)
    return "" if right else f"{figure}, but {reference} has {found}"


def all_wrong() -> list[str]:
    """What is wrong with README and the pages of docs/, but for those that are results themselves."""
    listed = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
    results = [page for page in (ROOT / "docs" / "results").glob("*.md") if page.stem not in ("index", "speed")]
    pages = [ROOT / "README.md", TEMPLATE, *sorted(set((ROOT / "docs").rglob("*.md")) - set(results))]
    names = {str(page.relative_to(ROOT)): PLACE.sub("` `", page.read_text()) for page in pages}
    faults = [f"{name}: no such document" for name in listed if name not in names]
    if claims(TEMPLATE.read_text()) != CLAIMS.read_text():
        faults.append(f"{CLAIMS}: not what {TEMPLATE} and the results make, python tests/figures.py --write")
    faults += unfounded(TEMPLATE.read_text())
    return faults + [one for name, text in names.items() for one in wrong(name, listed.get(name, {}), text)]


if __name__ == "__main__":
    if "--write" in sys.argv:
        CLAIMS.write_text(claims(TEMPLATE.read_text()))
    raise SystemExit("\n".join(all_wrong()) or None)
