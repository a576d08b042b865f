"""The update pipeline: intake, folding, screens, and the choice of a merge.

The section "Path of an update" of docs/architecture.md lists the modules that process an update, in
their order.
"""
