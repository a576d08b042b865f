#!/bin/sh
# The command line of a board: shoal device run, doctor and predict.
# As `launch` starts the agent, so that what this compiles is what it reads.
export PYTHONOPTIMIZE=2
exec "$(dirname "$(readlink -f "$0")")/python" -m device_runtime "$@"
