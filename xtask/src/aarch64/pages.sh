#!/busybox sh
# The first program of the guest with pages of 64 KiB: runs the jobs of /list, one after the other.
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sys /sys
/busybox mount -t devtmpfs dev /dev
/busybox mkdir /dev/shm /dev/pts
/busybox mount -t tmpfs -o mode=1777 tmpfs /dev/shm
/busybox mount -t tmpfs -o mode=1777 tmpfs /tmp
/busybox mount -t devpts pts /dev/pts
# Tests start sleep, true and the like.
/busybox mkdir /bin
/busybox --install -s /bin
export PATH=/bin
/busybox ifconfig lo 127.0.0.1 up
echo "pages: $(/busybox sed -n '/KernelPageSize/{s/[^0-9]//g;p;q}' /proc/self/smaps)"
cd /tmp
while read -r name arguments; do
    # Unquoted: several words.
    PROPTEST_CASES=16 /jobs/$name $arguments </dev/null
    echo "pages: $name ends with $?"
done </list
/busybox poweroff -f
