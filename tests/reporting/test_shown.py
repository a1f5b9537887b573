"""What results show of themselves."""

from __future__ import annotations

from autoaccum.reporting.lines import as_line, as_table


def test_what_is_shown_in_html_is_escaped() -> None:
    assert as_table("A<b>", {"<x>": "1 < 2"}) == (
        "<table><caption>A&lt;b&gt;</caption><tr><th>&lt;x&gt;</th><td>1 &lt; 2</td></tr></table>"
    )
    assert as_line("A", {}) == "A()"
