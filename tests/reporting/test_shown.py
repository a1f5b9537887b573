"""What results show of themselves."""

from __future__ import annotations

from autoaccum.reporting.shown import as_line, as_table, sizes_text


def test_what_is_shown_in_html_is_escaped() -> None:
    assert as_table("A<b>", {"<x>": "1 < 2"}) == (
        "<table><caption>A&lt;b&gt;</caption><tr><th>&lt;x&gt;</th><td>1 &lt; 2</td></tr></table>"
    )
    assert as_line("A", {}) == "A()"


def test_sizes_in_a_row_are_counted() -> None:
    assert sizes_text((3, 3, 2, 3)) == "2 x 3 + 2 + 3"
    assert sizes_text(()) == ""
