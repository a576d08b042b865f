#!/bin/sh
# Install Shoal from the files beside this script; needs no network. `install.sh FOLDER` unpacks into a folder and starts
# nothing. Run it again, from a newer bundle, to replace what is there; the agent's state stays.
set -eu
umask 022
here=$(CDPATH= cd "$(dirname "$0")" && pwd)
root=${1:-}
fail() {
  echo "error: $1" >&2
  exit 2
}
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "only root may install: sudo $0"
(cd "$here" && sha256sum -c --quiet SHA256SUMS >&2) || fail "this bundle is damaged; copy it again"
[ "$(uname -m)" = @MACHINE@ ] ||
  fail "this bundle is for @MACHINE@, and this board is $(uname -m); set \`board\` in flash.toml to what it is"
python=$(python@PYTHON@ -c 'import os, sys; print(os.path.realpath(sys.executable), sys.maxsize > 2**32)' 2>/dev/null) ||
  fail "there is no Python @PYTHON@ here ($(python3 --version 2>&1)); write its first two numbers as \`python\` in flash.toml"
[ "${python#* }" = True ] || fail "this system is a 32-bit one, for which there is no onnxruntime; install a 64-bit system"
python=${python% *}
[ ! -e "$root/opt/shoal" ] || [ -e "$root/opt/shoal/setup.sh" ] || [ -e "$root/opt/shoal/bin/launch" ] ||
  fail "$root/opt/shoal has something else than a board's agent (a server?); move it, for it would be removed"
mkdir -p "$root/opt"
free=$(df -Pk "$root/opt" | awk 'NR == 2 { print $4 }')
[ "$free" -ge @KILOBYTES@ ] ||
  fail "$root/opt has $((free / 1024)) MiB free and needs $((@KILOBYTES@ / 1024)); make room, or take a larger card"

if [ -z "$root" ] && [ -x /opt/shoal/setup.sh ]; then /opt/shoal/setup.sh stop; fi
for kept in etc/shoal/device.toml etc/shoal/enrolment; do
  if [ -e "$root/$kept" ]; then cp -p "$root/$kept" "$root/$kept.old"; fi
done
rm -rf "$root/opt/shoal/lib" "$root/opt/shoal" # what shows whose it is goes last
for tree in runtime board; do tar -x -z -f "$here/$tree.tar.gz" -C "$root/" --no-same-owner; done
ln -sfn "$python" "$root/opt/shoal/bin/python"
printf 'home = %s\nversion = @PYTHON@\n' "$(dirname "$python")" >"$root/opt/shoal/pyvenv.cfg"
said=$(PYTHONOPTIMIZE=2 "$root/opt/shoal/bin/python" -m device_runtime.self_test 2>&1) ||
  fail "onnxruntime does not run on this board: $(printf '%s\n' "$said" | sed -n '/^[A-Za-z_.]*Error: /p; $p' | head -n 1) (a system without libstdc++: apt install libstdc++6)"
if [ -z "$root" ]; then /opt/shoal/setup.sh start; fi
echo "Shoal is installed; look with: $root/opt/shoal/bin/shoal device doctor --config $root/etc/shoal/device.toml"
