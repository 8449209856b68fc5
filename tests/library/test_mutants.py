"""The list of mutants still fits the code and the tests."""

from __future__ import annotations

import pytest

from mutants import ROOT, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_its_tests(mutant):
    text = (ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text
    assert mutant.tests
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_a_mutant_whose_text_is_not_there_once_is_refused():
    text = (ROOT / MUTANTS[0].file).read_text()
    for other in (text.replace(MUTANTS[0].find, ""), text + MUTANTS[0].find):
        with pytest.raises(ValueError, match="expected once"):
            MUTANTS[0].applied(other)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
