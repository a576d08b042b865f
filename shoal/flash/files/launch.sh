#!/bin/sh
# launch RELEASES ARGUMENTS...: become the runtime whose turn it is. No release replaces this file.
#
# RELEASES/record is one line, which is replaced at once: PHASE NUMBER BEFORE STARTS WHAT. Its phases and who moves it
# from one to another stand in device_runtime/agent/releases.py. Here:
#
#   running   NUMBER runs (0: what this board was made with)
#   fetched   NUMBER is unpacked from the file WHAT and tested, then it is on trial, or has failed and BEFORE runs
#   trial     NUMBER runs, but at its fourth start: then it has failed and BEFORE runs
#   failed    BEFORE runs
set -u
export PYTHONOPTIMIZE=2 # what is for developers takes 3.6 MB
releases=$1
shift
base=$(dirname "$(readlink -f "$0")")
phase=running number=0 before=0 starts=0 what=
if [ -r "$releases/record" ]; then read -r phase number before starts what <"$releases/record"; fi
case $phase in running | fetched | trial | failed) ;; *) phase=running number=0 before=0 ;; esac # a damaged card

keep() { # what a power cut leaves is the old line or the new one
  printf '%s\n' "$*" >"$releases/record.new" && sync "$releases/record.new" &&
    mv -f "$releases/record.new" "$releases/record" && sync "$releases"
}
fail() {
  phase=failed
  keep failed "$number" "$before" 0 "$*"
}
said() { # the first error of a chain of them says what is wrong, and the last lines are advice; else the last line
  printf '%s\n' "${1:-it printed nothing}" | sed -n '/^[A-Za-z_.]*Error: /p; $p' | head -n 1 | cut -c 1-500
}
unpack() { # into a folder of its own; only files, only below lib, at most 1 GiB
  fresh=$releases/$number.new why="there is no room for it on this board"
  rm -rf "$fresh" "${releases:?}/$number"
  mkdir -p "$fresh/bin" || return
  why="it cannot be read"
  tar --numeric-owner -tvzf "$what" >"$fresh/list" || return
  # Owners by number: the name of one could look like a path below lib.
  why="it has something else than files below lib, or more than 1 GiB"
  awk '!/^-/ || $6 !~ /^lib\// || /\/\.\.(\/|$)/ { bad = 1 } { size += $3 } END { exit bad || size > 2^30 }' \
    "$fresh/list" || return
  why="there is no room for it on this board"
  tar -xzf "$what" -C "$fresh" --no-same-owner || return
  ln -s "$(readlink -f "$base/python")" "$fresh/bin/python" && cp "$base/../pyvenv.cfg" "$fresh/" || return
  for test in "-m device_runtime --help" "-m device_runtime.self_test"; do
    # shellcheck disable=SC2086  # words
    why=$(timeout 300 "$fresh/bin/python" $test 2>&1) || {
      why="its self-test failed: $(said "$why")"
      return 1
    }
  done
  mv "$fresh" "$releases/$number" && sync
}

file=
if [ "$phase" = fetched ]; then
  file=$what
  if [ "$starts" -ge 3 ]; then
    fail "its self-test took this board down $starts times"
  else
    keep fetched "$number" "$before" $((starts + 1)) "$what"
    if unpack; then
      phase=trial starts=0
    else
      fail "$why"
    fi
  fi
fi
if [ "$phase" = trial ]; then
  if [ "$starts" -ge 3 ]; then
    fail "it ended $starts times before the fleet had heard it"
  else
    keep trial "$number" "$before" $((starts + 1))
  fi
fi
case $phase in
running | trial) now=$number ;;
*) now=$before ;;
esac
[ -z "$file" ] || rm -f "$file" # which the record names no more
case $phase in
running | failed)
  for old in "$releases"/[0-9]*; do
    case ${old##*/} in "$now" | "$before") ;; *) rm -rf "$old" ;; esac
  done
  ;;
esac
python=$releases/$now/bin/python
[ -x "$python" ] || python=$base/python
if [ ! -x "$python" ]; then # a link to what is not there any more
  echo "error: $(readlink "$python") is gone, for which this runtime was made (a newer system?): make it anew, with the" \
    "first two numbers of $(python3 --version 2>&1) as \`python\` in flash.toml" >&2
  exit 2
fi
export SHOAL_RELEASES="$releases"
exec "$python" -m device_runtime "$@"
