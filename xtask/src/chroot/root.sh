# SPDX-License-Identifier: MIT OR Apache-2.0
# The root of a small Debian, in namespaces of its own, so mounts and processes end with it: $1 is the root's folder, $2 an empty
# folder, $3 a folder that the guest sees as /given.
mount --make-rprivate /
mount -t tmpfs -o size=3G none "$2"
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" none "$2/root"
cd "$2/root"
mkdir -p given
mount --bind "$3" given
mount -o remount,bind,ro given
mount -t proc proc proc
