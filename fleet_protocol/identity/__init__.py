"""Who somebody is in a fleet: enrolments, certificates, and the envelope around every message of
such a fleet.
"""
