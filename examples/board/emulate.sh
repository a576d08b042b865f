#!/bin/sh
# emulate.sh CARD: an arm64 board with that card, on this terminal, until its supply is cut: Ctrl-A, then X.
set -eu
size=$(stat -c %s "$1")
[ "$size" -ge 2147483648 ] || truncate -s 2G "$1" # a card is larger than its image
exec qemu-system-aarch64 -M virt -cpu max,pauth=off,sve=off -smp 2 -m 1024 -accel tcg,thread=multi -nographic \
  -bios /usr/share/qemu-efi-aarch64/QEMU_EFI.fd -drive "if=none,id=card,file=$1,format=raw,cache=writethrough" \
  -device virtio-blk-pci,drive=card -device virtio-rng-pci -netdev user,id=net -device virtio-net-pci,netdev=net,romfile=
