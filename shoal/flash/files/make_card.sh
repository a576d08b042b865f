#!/bin/sh
# make_card.sh BOARD ID IMAGE: an image out of what lies in this folder. `shoal flash image` runs it under fakeroot, so
# that files belong to whom their packages say, without being root; there is no loop device, no mount, no emulation.
#   packages        lines "FILE NAME" of Debian's packages     left-out   the beginnings of names that a card does without
#   ours.tar        the agent, its settings, all of card/      card.modules, card.links, card.init
# The same inputs give the same bytes: nothing has a time of its own, and ID (32 hexadecimal digits) is made from them.
set -eu
board=$1 id=$2 image=$3
export LC_ALL=C TZ=UTC SOURCE_DATE_EPOCH=1700000000 E2FSPROGS_FAKE_TIME=1700000000 MTOOLS_SKIP_CHECK=1
cmdline="fsck.repair=yes net.ifnames=0 panic=10 lsm=lockdown,capability,landlock,yama" # no policy of another is here
umask 022

# Since Debian 12 /bin, /sbin and /lib are links; older packages still have files there.
for place in root kernel here; do
  for name in bin lib sbin; do
    mkdir -p "$place/usr/$name"
    ln -s "usr/$name" "$place/$name"
  done
done
mkdir -p boot/EFI/BOOT boot/loader/entries data/upper data/work
mkdir -p first/bin first/data first/dev first/lower first/modules first/proc first/root first/sys

while read -r file name; do
  to=root
  while read -r start; do case $name in "$start"*) to= ;; esac done <left-out
  case $name in linux-image-* | raspi-firmware_* | systemd-boot-efi_*) to=kernel ;; esac
  case $name in *_all.deb | *_arm64.deb) ;; *) to=here ;; esac
  [ -n "$to" ] || continue
  dpkg-deb --fsys-tarfile "$file" | tar -x -p -C "$to" --keep-directory-symlink --wildcards \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
    --exclude='./usr/share/info/*' --exclude='./usr/share/bash-completion/*' --exclude='./usr/lib/modules/*/kernel/sound/*'
done <packages

# Of Broadcom's radios those of the Raspberry Pis.
find root/usr/lib/firmware -name '*fmac*' ! -name '*fmac43430*' ! -name '*fmac43455*' -delete 2>/dev/null || true

# What maintainer scripts would have done.
cp root/usr/share/base-passwd/passwd.master root/etc/passwd
cp root/usr/share/base-passwd/group.master root/etc/group
awk -F: '{ print $1 ":*:19000:0:99999:7:::" }' root/etc/passwd >root/etc/shadow
chmod 640 root/etc/shadow
chgrp 42 root/etc/shadow
: >root/etc/machine-id
mkdir -p root/boot/firmware root/data
chmod 700 root/data data
tar -x -p -f ours.tar -C root --no-same-owner
printf '127.0.0.1 localhost\n127.0.1.1 %s\n::1 localhost\n' "$(cat root/etc/hostname)" >root/etc/hosts
while read -r path target; do
  if [ -e "root/$path" ] || [ -L "root/$path" ]; then continue; fi
  mkdir -p "root/$(dirname "$path")"
  ln -s "$target" "root/$path"
done <card.links

# What Python compiles at a first import, which takes an emulated board half a minute: by the card's own Python or, on a
# computer of another architecture, by the same one for that. Its library is the card's, and bytes are the same anywhere.
find root -name '*.py' -exec touch -h -d @$SOURCE_DATE_EPOCH {} +
tools=root
[ "$(dpkg --print-architecture)" = arm64 ] || tools=here
python=$(ls -d "$tools"/usr/bin/python3.* 2>/dev/null) || {
  echo "the lock has no Python for this computer (an older one, or another's): remove it, and it is written anew" >&2
  exit 1
}
libraries=$(dirname "$tools"/usr/lib/*/libc.so.6)
env -u LD_PRELOAD -u LD_LIBRARY_PATH PYTHONHOME="$PWD/root/usr" PYTHONHASHSEED=0 "$libraries"/ld-linux-*.so.* \
  --library-path "$libraries" "$python" -B -S -m compileall -q -o 2 --invalidation-mode timestamp \
  -s "$PWD/root" -p / root/usr/lib/python3.* root/opt/shoal/lib >compiled.log || {
  cat compiled.log >&2
  exit 1
}

# The kernel's modules that a card carries, and its first file system with those that lead to the root.
version=$(ls kernel/usr/lib/modules)
depmod -b kernel "$version"
needed() {
  for name in "$@"; do
    modprobe -d "$PWD/kernel" -S "$version" --show-depends "$name" 2>/dev/null | awk '$1 == "insmod" { print $2 }'
  done | awk '!seen[$0]++'
}
to=root/usr/lib/modules/$version
mkdir -p "$to"
cp kernel/usr/lib/modules/"$version"/modules.builtin* kernel/usr/lib/modules/"$version"/modules.order "$to/"
# shellcheck disable=SC2046 # names of modules are words
needed $(cat card.modules) | while read -r file; do
  place=$to/${file#*/modules/"$version"/}
  mkdir -p "$(dirname "$place")"
  cp "$file" "$place"
done
depmod -b root "$version"
# shellcheck disable=SC2046
needed $(head -n 1 card.modules) | while read -r file; do
  name=$(basename "$file" .xz)
  case $file in *.xz) xz -d -c "$file" >"first/modules/$name" ;; *) cp "$file" "first/modules/$name" ;; esac
  echo "$name" >>first/modules/order
done
cp root/usr/bin/busybox first/bin/busybox
cp card.init first/init
chmod 755 first/init
find first root data -exec touch -h -d @$SOURCE_DATE_EPOCH {} +
(cd first && find . | sort | cpio --quiet --reproducible -o -H newc -R 0:0 | gzip -6 -n) >boot/initrd.img

# The boot partition: UEFI starts systemd-boot; a Raspberry Pi's own firmware reads config.txt.
cp kernel/boot/vmlinuz-"$version" boot/vmlinuz
echo "Shoal, $board, Linux $version" >boot/shoal-card.txt
cp kernel/usr/lib/systemd/boot/efi/systemd-bootaa64.efi boot/EFI/BOOT/BOOTAA64.EFI
echo "timeout 0" >boot/loader/loader.conf
printf 'title Shoal\nlinux /vmlinuz\ninitrd /initrd.img\noptions %s\n' "$cmdline" >boot/loader/entries/shoal.conf
case $board in
rpi* | zero2w)
  # start4 and fixup4 are for the Pi 4; the variants with a camera (x), for debugging (db) and cut down (cd) stay out.
  for name in bootcode.bin start.elf start4.elf fixup.dat fixup4.dat; do cp "kernel/usr/lib/raspi-firmware/$name" boot/; done
  cp kernel/usr/lib/linux-image-"$version"/broadcom/*.dtb boot/
  printf 'arm_64bit=1\nenable_uart=1\nupstream_kernel=1\nkernel=vmlinuz\ninitramfs initrd.img followkernel\n' >boot/config.txt
  echo "console=ttyS1,115200 console=tty0 $cmdline" >boot/cmdline.txt
  ;;
esac
find boot -exec touch -d @$SOURCE_DATE_EPOCH {} +

# 4 MiB free, 192 MiB FAT, a root that just holds its files, and what changes: the board grows that. Sizes in MiB.
fat=192 kept=64
size=$(($(du -s -m --apparent-size root | cut -f 1) * 9 / 8 + 32))
truncate -s $((4 + fat + size + kept))M "$image"
printf 'label: dos\nlabel-id: 0x%.8s\nstart=8192, size=%d, type=c, bootable\n' "$id" $((fat * 2048)) >table
printf 'start=%d, size=%d, type=83\n' $((8192 + fat * 2048)) $((size * 2048)) \
  $((8192 + (fat + size) * 2048)) $((kept * 2048)) >>table
sfdisk -q "$image" <table
mkfs.vfat --invariant -F 32 -s 4 -n SHOAL --offset=8192 "$image" $((fat * 1024)) >mkfs.log
mcopy -s -m -i "$image@@4M" boot/* ::

# filled NAME START SIZE OPTIONS: a partition with the files of a folder, and what of it a card has to be written with:
# all but the blocks that are free. (Holes of the image would not do: some are zeros that it counts on.)
filled() {
  uuid=$(printf '%s %s' "$id" "$1" | sha256sum | sed 's/\(.\{8\}\)\(.\{4\}\).\(.\{3\}\).\(.\{3\}\)\(.\{12\}\).*/\1-\2-4\3-8\4-\5/')
  offset=$(($2 * 1048576))
  # shellcheck disable=SC2086 # options are words
  mke2fs -q -F -t ext4 -L "shoal-$1" -b 4096 -U "$uuid" $4 -d "$1" \
    -E "offset=$offset,hash_seed=$uuid,lazy_itable_init=0,lazy_journal_init=0" "$image" "$3M" 2>mke2fs.log || {
    cat mke2fs.log >&2
    exit 1
  }
  {
    echo 'set_inode_field /lost+found crtime @1700000000'
    find "$1" -printf '/%P\n' | while read -r path; do
      for field in atime ctime mtime crtime; do echo "set_inode_field \"$path\" $field @$SOURCE_DATE_EPOCH"; done
    done
  } >fields
  debugfs -w -f fields "$image?offset=$offset" >debugfs.log 2>&1
  dumpe2fs "$image?offset=$offset" 2>/dev/null | sed -n 's/^  Free blocks: //p' | tr -d ' ' | tr ',' '\n' |
    awk -F- -v base=$((offset / 4096)) 'NF { print $1 + base, ($2 == "" ? $1 : $2) + base }' >>free
}
: >free
filled root $((4 + fat)) "$size" "-m 0 -O ^has_journal"
filled data $((4 + fat + size)) "$kept" "-m 1"

# The list of what is written, for bmaptool; its checksum counts itself as zeros.
blocks=$(($(stat -c %s "$image") / 4096))
awk -v at=0 -v blocks="$blocks" '
  { if ($1 > at) print at, $1 - 1; at = $2 + 1 } END { if (at < blocks) print at, blocks - 1 }' free >mapped
zeros=$(printf '%064d' 0)
{
  printf '<?xml version="1.0" ?>\n<bmap version="2.0">\n<ImageSize>%s</ImageSize>\n<BlockSize>4096</BlockSize>\n' $((blocks * 4096))
  printf '<BlocksCount>%s</BlocksCount>\n' "$blocks"
  printf '<MappedBlocksCount>%s</MappedBlocksCount>\n' "$(awk '{ n += $2 - $1 + 1 } END { print n }' mapped)"
  printf '<ChecksumType>sha256</ChecksumType>\n<BmapFileChecksum>%s</BmapFileChecksum>\n<BlockMap>\n' "$zeros"
  while read -r first last; do
    sum=$(dd if="$image" bs=4096 skip="$first" count=$((last - first + 1)) status=none | sha256sum)
    printf '<Range chksum="%s">%s-%s</Range>\n' "${sum%% *}" "$first" "$last"
  done <mapped
  printf '</BlockMap>\n</bmap>\n'
} >card.bmap
sum=$(sha256sum card.bmap)
sed -i "s/$zeros/${sum%% *}/" card.bmap
