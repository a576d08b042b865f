#!/bin/sh
# Install Shoal from the folder of this script, and remove the folder: it holds the board's key where any computer can
# read it. What goes wrong is on the console and in error.txt beside this script. `first.sh FOLDER` is for install.sh.
set -eu
here=$(CDPATH= cd "$(dirname "$0")" && pwd)
work=$(mktemp -d /var/tmp/shoal.XXXXXX)
trap 'rm -rf "$work"' EXIT
tar -x -f "$here/shoal.tar" -C "$work"
if ! said=$("$work"/*/install.sh "$@" 2>&1); then
  echo "$said" | tee "$here/error.txt" >&2
  exit 1
fi
echo "$said"
rm -rf "$here"
sync
