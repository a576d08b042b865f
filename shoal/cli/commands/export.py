"""Export a model for training on boards: check the graphs of each tier, and write artifact sets.

The exporter compares each graph with PyTorch.

Example: shoal export --models model.py --arch model --widths 1,0.5,0.25
"""

from fleet_protocol.allocator import lasting_objects
from shoal.cli.export_arguments import ExportArguments
from shoal.cli.grouped import grouped
from shoal.extras import needs


@grouped(ExportArguments)
def _export(options: ExportArguments) -> None:
    with needs("export"), lasting_objects():
        from shoal.cli.exporting import export
    export(options)
