"""Models of real packages, which are installed in an environment of their own: `make test-packages`."""
