"""A table of figures as Markdown, comma-separated values and plots, and the page of all tables."""

from reproduction.report.cells import claim_cells, duration_text, figure_cells
from reproduction.report.index import write_index
from reproduction.report.markdown import as_markdown
from reproduction.report.writing import Written, write_table

__all__ = ["Written", "as_markdown", "claim_cells", "duration_text", "figure_cells", "write_index", "write_table"]
