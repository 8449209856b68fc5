"""Count the patterns that make our texts hard to read; `make lint` fails above a few.

`python tests/english.py [PATH ...]` lists each place. CONTRIBUTING.md has the rules behind these patterns.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 9  # a few places in which the words are right

OPENING = re.compile(r"(Of|As|Those|What|The same)\b")
CLAUSE = re.compile(r"(?:^|[.!:] )(?:What|Who|That which|Where nothing)\b[^?.]*(?:\.|$)")
MANY = re.compile(r"\bas many(?: as\b| (?:in|of|for|at|by|with|and|or)\b|[.,;:)]|$)")
WORDS = re.compile(
    r"\b(told|tells|outlets?|anew|alike|elsewhere|remembered|wants?|(?:goes|go|went) on|as it lies)\b", re.I
)
USER_PAGES = ("README.md", "docs/start/", "docs/how_to/", "docs/help/")
LONGEST_SENTENCE = 30  # words
# Labels of committed results, from which this page is made, keep their names.
GENERATED = ("docs/results/prune-charlm.md",)


def main() -> None:
    listed = subprocess.run(["git", "ls-files", *sys.argv[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [place for name in listed.stdout.split() for place in patterns_in(name)]
    print(*found, sep="\n")
    if len(found) > LIMIT and not sys.argv[1:]:
        sys.exit(f"{len(found)} places with patterns of hard English, at most {LIMIT} are accepted: rewrite these")


def patterns_in(name: str) -> Iterator[str]:
    """Yield `file:line: pattern: text` for each match in one file."""
    path = ROOT / name
    if path == Path(__file__).resolve() or not path.exists() or name in GENERATED:
        return
    if path.suffix == ".py":
        texts = python_texts(path.read_text())
    elif path.suffix == ".md":
        texts = paragraphs(path.read_text())
    elif path.suffix in {".cpp", ".hpp"}:
        texts = ((i, line.split("//", 1)[1].strip(), False) for i, line in lines(path) if "//" in line)
    else:
        return
    for line, text, is_docstring in texts:
        checks = {"private word": WORDS, "'as many' without a noun": MANY, "relative clause as subject": CLAUSE}
        if is_docstring and OPENING.match(text):
            yield f"{name}:{line}: docstring opening: {text[:80]}"
        for pattern, expression in checks.items():
            for match in expression.finditer(text):
                yield f"{name}:{line}: {pattern}: {text[max(0, match.start() - 30) : match.end() + 50]}"
        if name.startswith(USER_PAGES):
            for sentence in re.split(r"(?<=[.!?:;])\s", text):
                if len(sentence.split()) > LONGEST_SENTENCE:
                    yield f"{name}:{line}: {len(sentence.split())} words: {sentence[:80]}"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    return enumerate(path.read_text().splitlines(), 1)


def python_texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, for the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(docstring.split()), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.strip("# "), False


def paragraphs(page: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of each paragraph, list item and table cell of a Markdown page, without its code."""
    page = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), page, flags=re.DOTALL)
    start, words = 1, ""
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if not line.strip() or re.match(r"\s*([-*|#>]|\d+\.)", line):
            yield from ((start, part.strip(), False) for part in words.split("|") if part.strip())
            start, words = number, ""
        words += " " + re.sub(r"^[-*#>\d.\s]+", "", line).strip()


if __name__ == "__main__":
    main()
