#!/bin/sh
# The command line of a board: shoal device run, doctor and predict.
exec "$(dirname "$(readlink -f "$0")")/python" -m device_runtime "$@"
