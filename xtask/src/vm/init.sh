#!/bin/busybox sh
# The guest's first program, in the initramfs: loads the modules, mounts the host's root file system and
# switches to it. Its output goes to the console's log.
/bin/busybox mkdir -p /proc /sys /dev /root /host
/bin/busybox --install -s /bin
export PATH=/bin
. /vm/settings

fail() {
    echo "pushgate-vm: $*"
    poweroff -f
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
# By this line the host recognises a kernel that panicked by itself, before it.
echo "pushgate-vm starts user space"

while read -r module options; do
    # Unquoted, because a module may have several options, or none.
    insmod "/vm/modules/$module" $options || fail "cannot load the module $module"
done </vm/modules/list

# cache=loose assumes that the host changes nothing meanwhile. Without it every page of a program would be
# read again for each process.
common=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "ro,$common,cache=loose" root /root || fail "cannot mount the host's root file system"
mount --bind /root /host || fail "cannot mount the host's root file system twice"

mount -t proc proc /root/proc || fail "no proc"
mount -t sysfs sys /root/sys || fail "no sys"
mount -t debugfs debug /root/sys/kernel/debug
mount -t devtmpfs dev /root/dev || fail "no dev"
mkdir -p /root/dev/shm /root/dev/pts
mount -t devpts -o mode=620,ptmxmode=666 pts /root/dev/pts
for folder in /tmp /run /var/tmp /dev/shm; do
    if [ -d "/root$folder" ]; then
        mount -t tmpfs -o mode=1777 tmpfs "/root$folder" || fail "no tmpfs over $folder"
    fi
done

# The repository may lie below one of these folders.
while read -r folder; do
    if [ ! -d "/root$folder" ]; then
        mkdir -p "/root$folder" && mount --bind "/host$folder" "/root$folder" || fail "cannot mount $folder"
    fi
done </vm/visible
# Cargo tells tests to write there (CARGO_TARGET_TMPDIR).
if [ -d "/root$TARGET/tmp" ]; then
    mount -t tmpfs tmpfs "/root$TARGET/tmp"
fi
umount /host

mkdir -p /root/run/share /root/run/lock
mount -t 9p -o "rw,$common,cache=none" share /root/run/share || fail "cannot mount the shared folder"
cp -r /vm /root/run/vm && cp /bin/busybox /root/run/vm/busybox || fail "cannot copy what runs next"
# The host's shell, because busybox's shell would use its own ip and not iproute2's.
exec switch_root /root /bin/sh /run/vm/stage2.sh
fail "cannot go over to the host's root file system"
