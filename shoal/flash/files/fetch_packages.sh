#!/bin/sh
# fetch_packages.sh SUITE MIRROR KEPT LOCK: the packages of a card, as lines "FILE NAME" in `packages`.
# LOCK has a line "SHA-256 NAME ADDRESS" for each. Where it is not there, apt chooses, by metadata that Debian's keys
# have signed, what the names in `wanted` take, and in `wanted-here` for the computer that makes the card, where it is of
# another architecture; KEPT holds what was fetched before.
set -eu
suite=$1 mirror=$2 kept=$3 lock=$4
keys=/usr/share/keyrings/debian-archive-keyring.gpg
export LC_ALL=C
fail() {
  echo "$1" | tr '\n' ' ' >&2
  exit 2
}
store=$kept/packages
mkdir -p "$store"
choose() { # ARCHITECTURE NAMES: add what these take to `chosen`
  apt=$kept/$suite-$1
  mkdir -p "$apt/lists/partial" "$apt/archives/partial"
  : >"$apt/status"
  sed "s|@FOLDER@|$apt|; s|@ARCHITECTURE@|$1|" apt.conf >"$apt/apt.conf"
  for part in "$mirror $suite" "$mirror-security $suite-security"; do
    echo "deb [signed-by=$keys] $part main non-free-firmware"
  done >"$apt/sources.list"
  if ! { APT_CONFIG=$apt/apt.conf apt-get -q update --error-on=any && APT_CONFIG=$apt/apt.conf xargs apt-get -qq --yes \
    --print-uris install <"$2"; } >>chosen 2>said; then
    fail "no packages of Debian $suite from $mirror; this needs a network, another --mirror, or a --lock whose packages are kept: $(grep '^E:' said | tail -n 2)"
  fi
}
if [ ! -e "$lock" ]; then
  [ -e "$keys" ] || fail "Debian's keys are not installed here: apt install debian-archive-keyring"
  : >chosen
  choose arm64 wanted
  here=$(dpkg --print-architecture)
  [ "$here" = arm64 ] || choose "$here" wanted-here
  awk -v quote="'" '$4 ~ /^SHA256:/ { gsub(quote, "", $1); print substr($4, 8), $2, $1 }' chosen | sort -u -k 2 >"$lock.new"
  mv "$lock.new" "$lock"
fi
awk 'NF != 3 || length($1) != 64 || $1 ~ /[^0-9a-f]/ || $2 ~ /\// { exit 1 }' "$lock" ||
  fail "$lock is no list of packages; remove it, and it is written anew"
while read -r digest name address; do
  [ -e "$store/$digest" ] || echo "$address $store/$digest.new SHA256:$digest"
done <"$lock" >missing
if [ -s missing ] && ! xargs -n 150 /usr/lib/apt/apt-helper -o APT::Sandbox::User= download-file <missing >said 2>&1; then
  fail "$(wc -l <missing) packages cannot be fetched; is there a network? $(grep '^E:' said | tail -n 2)"
fi
while read -r digest name address; do
  file=$store/$digest
  if [ -e "$file.new" ]; then
    cp "$file.new" "$file" # of a mirror that is a folder apt makes a link
    rm "$file.new"
  fi
  if ! echo "$digest  $file" | sha256sum -c --status; then
    rm -f "$file"
    fail "$name is not what its digest says; the file was removed, run this again"
  fi
  echo "$file $name"
done <"$lock" >packages
