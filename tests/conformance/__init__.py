"""Conformance: worked examples of the methods, run through the product's own code.

A file of worked examples is a JSON object with a list ``vectors``; each entry has an ``id``, whose
part before the first hyphen says what is computed, ``inputs`` and ``expected``. ``python -m
tests.conformance FILE.json`` prints a line for each entry. There is one module for each method;
they only build small models, call the product and compare.
"""

from tests.conformance.entry import Check, Entry, NotApplicableError, read_entries
from tests.conformance.suite import Outcome, run_entry, run_file

__all__ = [
    "Check",
    "Entry",
    "NotApplicableError",
    "Outcome",
    "read_entries",
    "run_entry",
    "run_file",
]
