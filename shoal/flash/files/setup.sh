#!/bin/sh
# setup.sh start|stop: what has to be done once Shoal's files lie on a board, and before they go.
set -eu
unit=shoal-device.service
case "${1:-}" in
start)
  /opt/shoal/bin/shoal --help >/dev/null # compiles what the agent imports; for the agent itself that folder is read-only
  if ! command -v systemctl >/dev/null; then
    echo "there is no systemd here; start it yourself: /opt/shoal/bin/shoal device run --config /etc/shoal/device.toml"
    exit 0
  fi
  systemd-sysusers shoal.conf
  systemd-tmpfiles --create shoal.conf
  systemctl enable -q "$unit"
  record=/var/lib/shoal/releases/record # what was installed by hand runs, and no release with a lower number
  if [ -e "$record" ]; then
    read -r _ number _ <"$record"
    echo "failed $number 0 0 Shoal was installed by hand" >"$record.new"
    chown shoal:shoal "$record.new"
    mv -f "$record.new" "$record"
  fi
  if [ ! -d /run/systemd/system ]; then exit 0; fi # in a chroot it starts with the system
  systemctl daemon-reload
  if [ -e /etc/shoal/device.toml ] && { [ -e /etc/shoal/enrolment ] || ! grep -q '^\[identity\]' /etc/shoal/device.toml; }; then
    systemctl restart --no-block "$unit"
  else
    echo "copy this board's file of \`shoal enroll\` to /etc/shoal/enrolment, then run: /opt/shoal/setup.sh start"
  fi
  ;;
stop)
  if [ -d /run/systemd/system ]; then systemctl disable -q --now "$unit"; fi
  ;;
esac
