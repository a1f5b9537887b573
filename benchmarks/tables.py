"""Reads what ``results.py`` has written: the tables of a benchmark, the day they were measured and the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MEASURED = re.compile(r"^Measured on (\d{4}-\d\d-\d\d): (.*)\.$", re.MULTILINE)
FIRST_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One page of benchmarks/results/."""

    name: str
    text: str
    """All of the page."""
    parts: tuple[tuple[tuple[str, ...], ...], ...]
    """Its tables as rows of cells, of which the first row is the header."""
    date: str
    machine: str
    """Processor, cores, memory, accelerator, system and versions, as the page tells them."""

    @property
    def place(self) -> str:
        """What figures of this page have to be read with: the day, the processor and its cores."""
        processor, cores = self.machine.replace("(R)", "").split(", ")[:2]
        return f"{self.date}, {processor}, {cores.split(' (')[0]}"

    @property
    def accelerator(self) -> str:
        """Its name, or "no GPU"."""
        return self.machine.split(", ")[3]

    def rows(self, part: int = 0) -> list[dict[str, str]]:
        """Return the rows of a table, each cell by its column's name."""
        header, *rows = self.parts[part]
        return [dict(zip(header, row, strict=True)) for row in rows]

    def pairs(self) -> dict[str, str]:
        """Return a table of two columns without names: what the second says of the first."""
        return dict(row[:2] for row in self.parts[0][1:])  # type: ignore[misc]


def read(name: str, directory: Path) -> Table | None:
    """Return the table of that name, or the one of a quick run of it; None where nothing was measured."""
    for path in (directory / f"{name}.md", directory / f"{name}_quick.md"):
        if path.exists():
            text = path.read_text()
            [(date, machine)] = MEASURED.findall(text)
            return Table(name=name, text=text, parts=_parts(text), date=date, machine=machine)
    return None


def _parts(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the tables among the lines of a page."""
    parts: list[list[tuple[str, ...]]] = []
    is_inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_inside = False
            continue
        if not is_inside:
            parts.append([])
            is_inside = True
        cells = tuple(cell.strip() for cell in line[1:-1].split("|"))
        if set(cells) != {"---"}:  # what sets the header apart
            parts[-1].append(cells)
    return tuple(tuple(part) for part in parts)


def number(cell: str) -> float:
    """Return the first number of a cell: 24602 of "24,602 windows", 1.5e-7 of "1.5e-07, no step"."""
    [found] = FIRST_NUMBER.findall(cell)[:1]
    return float(found.replace(",", ""))
