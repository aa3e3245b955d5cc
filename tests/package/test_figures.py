"""The house does not get larger to keep in mind: each figure has a ceiling, at what was measured last."""

from __future__ import annotations

from tests.package import figures


def test_few_modules_are_used_by_one_other() -> None:
    assert len(figures.used_once()) <= 89


def test_an_event_touches_few_files() -> None:
    touched = figures.touched_by_an_event()
    assert len(touched) <= 57, "\n".join(sorted(touched))


def test_a_late_pane_of_a_session_touches_few_files() -> None:
    touched = figures.touched_by_a_late_session()
    assert len(touched) <= 80, "\n".join(sorted(touched))


def test_the_product_has_few_lines() -> None:
    assert figures.lines() <= 71_480


def test_a_function_that_runs_is_seen() -> None:
    assert figures.files_of(lambda: figures.aion.Tumbling("1 minute")) >= {"aion/core/periodic.py"}
