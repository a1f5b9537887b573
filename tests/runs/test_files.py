"""Names of a directory are brought to the disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoaccum.runs.files import sync_directory


@pytest.mark.skipif(sys.platform == "win32", reason="has no such call")
def test_names_of_a_directory_that_is_gone_are_not_on_the_disk(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")
