#!/bin/sh
# At every start, before the agent: what a card keeps may fill it, and an identity that was put on the boot partition moves away
# from there. Each step may be cut short by a lost supply and is then done at the next start.
set -eu
data=$(findmnt -n -o SOURCE /data)
case $data in
/dev/*) ;;
*)
  echo "nothing is kept on this card: see the first lines of its console; write it anew"
  exit 1
  ;;
esac
part=$(basename "$data")
disk=$(basename "$(dirname "$(readlink -f "/sys/class/block/$part")")")
read -r number <"/sys/class/block/$part/partition"
read -r start <"/sys/class/block/$part/start"
read -r size <"/sys/class/block/$part/size"
read -r whole <"/sys/class/block/$disk/size"
if [ $((whole - start - size)) -gt 2048 ]; then
  echo ', +' | sfdisk -q --no-reread --no-tell-kernel -N "$number" "/dev/$disk"
  partx -u -n "$number" "/dev/$disk"
fi
resize2fs "$data"

given=/boot/firmware/enrolment
if [ -e "$given" ]; then
  install -o shoal -g shoal -m 600 "$given" /etc/shoal/enrolment
  sync
  rm -f "$given"
fi
sync
