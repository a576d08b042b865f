#!/bin/sh
# The command line of a board: shoal device run, doctor and predict.
# As `launch` starts the agent, so that what this compiles is what it reads.
export PYTHONOPTIMIZE=2
python=$(dirname "$(readlink -f "$0")")/python
if [ ! -x "$python" ]; then
  echo "error: $(readlink "$python") is gone, for which this runtime was made (a newer system?): make it anew, with the" \
    "first two numbers of $(python3 --version 2>&1) as \`python\` in flash.toml" >&2
  exit 2
fi
exec "$python" -m device_runtime "$@"
