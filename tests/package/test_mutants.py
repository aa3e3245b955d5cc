"""The table of mutants fits the code, so that they can be tried at any time."""

from __future__ import annotations

from collections import Counter

from tests.mutants import ROOT, mutants


def test_each_mutant_changes_one_place_and_has_tests_nearby() -> None:
    table = [*mutants()]
    assert len(table) >= 40 and max(Counter(mutant.name for mutant in table).values()) == 1
    for mutant in table:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old and all((ROOT / tests).exists() for tests in mutant.near), mutant.name
