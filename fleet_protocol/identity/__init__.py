"""Identities in a fleet: enrolments, certificates, and the envelope around every message."""
