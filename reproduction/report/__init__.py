"""A table of figures as Markdown, comma-separated values, JSON and plots."""

from __future__ import annotations

from reproduction.report.cells import figure_cells
from reproduction.report.markdown import as_markdown
from reproduction.report.values import as_csv, plain
from reproduction.report.writing import Written, write_table

__all__ = ["Written", "as_csv", "as_markdown", "figure_cells", "plain", "write_table"]
