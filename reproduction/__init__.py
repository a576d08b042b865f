"""Reproduces tables of papers with this code, and tests their claims."""
