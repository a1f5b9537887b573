"""The command line: what is typed becomes a call of the public interface, and its result becomes text or JSON."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; console scripts that were installed long ago call it here."""
    from autoaccum.cli import app

    return app.main(argv)
