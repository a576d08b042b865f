"""Removes an earlier build first, whose deleted modules setuptools would install as well."""

import shutil

from setuptools import setup

shutil.rmtree("build/lib", ignore_errors=True)
setup()
