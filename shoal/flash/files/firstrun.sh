#!/bin/sh
# First start of a Raspberry Pi OS of Debian 12, before anything else runs: name, account, Wi-Fi, and the unit that
# installs Shoal at the next start. `firstrun.sh ROOT` is for tests.
root=${1:-}
boot=$root/boot/firmware here=$root/boot/firmware/shoal
cp "$here/hostname" "$root/etc/hostname"
sed -i "s/^127\.0\.1\.1.*/127.0.1.1\t$(cat "$here/hostname")/" "$root/etc/hosts"
systemctl disable userconfig # it would wait for somebody at a keyboard
if [ -e "$here/user" ]; then
  user=$(cat "$here/user")
  id "$user" >/dev/null 2>&1 || useradd -m -s /bin/bash -G sudo "$user"
  mkdir -p "$root/home/$user/.ssh" "$root/etc/ssh/sshd_config.d"
  cp "$here/authorized_keys" "$root/home/$user/.ssh/authorized_keys"
  chmod 700 "$root/home/$user/.ssh"
  chmod 600 "$root/home/$user/.ssh/authorized_keys"
  chown -R "$user:" "$root/home/$user/.ssh"
  (umask 337 && echo "$user ALL=(ALL) NOPASSWD: ALL" >"$root/etc/sudoers.d/010_shoal")
  echo "PasswordAuthentication no" >"$root/etc/ssh/sshd_config.d/shoal.conf"
  systemctl enable ssh
fi
if [ -e "$here/wifi.nmconnection" ]; then
  (umask 077 && cp "$here/wifi.nmconnection" "$root/etc/NetworkManager/system-connections/")
  rfkill unblock wifi
  for state in "$root"/var/lib/systemd/rfkill/*:wlan; do if [ -e "$state" ]; then echo 0 >"$state"; fi; done
fi
cp "$here/first.service" "$root/etc/systemd/system/shoal-first.service"
systemctl enable shoal-first
sed -i 's/ systemd\.\(run\|unit=kernel\)[^ ]*//g' "$boot/cmdline.txt"
rm -f "$boot/firstrun.sh" "$here/wifi.nmconnection"
sync
