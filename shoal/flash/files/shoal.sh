#!/bin/sh
# The command line of a board: shoal device run, shoal device doctor.
exec "$(dirname "$(readlink -f "$0")")/python" -m device_runtime "$@"
