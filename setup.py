"""What setuptools has kept of an earlier build in this folder would be installed, too: modules that are no more."""

import shutil

from setuptools import setup

shutil.rmtree("build/lib", ignore_errors=True)
setup()
