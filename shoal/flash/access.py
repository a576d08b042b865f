"""How a card that is built reaches its Wi-Fi, and who may log in to it."""

from collections.abc import Iterator

from shoal.flash.settings import FlashConfig, Network
from shoal.flash.tree import Entry


def access_files(config: FlashConfig) -> Iterator[Entry]:
    """What ``[network]`` and ``[ssh]`` put on a card; nothing without them."""
    if config.network:
        yield Entry("etc/wpa_supplicant/wpa_supplicant-wlan0.conf", _wifi(config.network).encode(), 0o600)
    if config.ssh:
        user, home = config.ssh.user, f"home/{config.ssh.user}"
        yield Entry("usr/lib/sysusers.d/zz-shoal-ssh.conf", f'u {user} - "Operator" /{home} /bin/sh\n'.encode())
        yield Entry("usr/lib/tmpfiles.d/zz-shoal-ssh.conf", f"d /{home} 0755 {user} {user}\n".encode())
        yield Entry(f"{home}/.ssh/authorized_keys", "".join(f"{key}\n" for key in config.ssh.keys).encode())
        yield Entry("etc/sudoers.d/010_shoal", f"{user} ALL=(ALL) NOPASSWD: ALL\n".encode(), 0o440)


def _wifi(wifi: Network) -> str:
    """A configuration of wpa_supplicant; where a network has WPA3 beside WPA2, it takes what the radio can."""
    lines = [f"ssid={wifi.ssid.encode().hex()}", f"scan_ssid={int(wifi.hidden)}"]  # hexadecimal needs no quoting
    if wifi.password is None:
        lines += ["key_mgmt=NONE"]
    else:
        # What is quoted ends with the last quote of the line, so that a password may have some in it.
        lines += [f'psk="{wifi.password.get_secret_value()}"']
        lines += ["key_mgmt=SAE", "ieee80211w=2"] if wifi.wpa3 else ["key_mgmt=WPA-PSK SAE", "ieee80211w=1"]
    return f"country={wifi.country}\nnetwork={{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
