# SPDX-License-Identifier: MIT OR Apache-2.0
# Enters a small Debian. Runs in namespaces of its own, so mounts and processes end with it: $1 is the root's folder, $2 an empty
# folder, $3 a folder that the guest sees as /given, $4 the script in it.
mount --make-rprivate /
mount -t tmpfs -o size=3G none "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" none "$2/root"
cd "$2/root"
mkdir -p given
mount --bind "$3" given
mount -o remount,bind,ro given
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none dev/shm
exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    sh -euc 'cd /; ip link set lo up; . "/given/$1"' sh "$4"
