#!/bin/sh
# Remove Shoal from this board: `uninstall.sh` leaves its settings and state, `uninstall.sh --purge` nothing.
set -eu
[ "$(id -u)" = 0 ] || { echo "error: only root may remove it: sudo $0" >&2; exit 2; }
/opt/shoal/setup.sh stop
rm -rf /opt/shoal /usr/bin/shoal
rm -f /usr/lib/systemd/system/shoal-device.service /usr/lib/sysusers.d/shoal.conf /usr/lib/tmpfiles.d/shoal.conf
if [ "${1:-}" = --purge ]; then rm -rf /etc/shoal /var/lib/shoal; fi
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
