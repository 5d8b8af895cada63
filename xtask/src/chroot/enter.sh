# Runs a script there: $4 is its place in the folder given, and the rest of the arguments a command that runs the shell.
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none dev/shm
script=$4
shift 4
# A network of the user namespace in which the command runs the shell, if it does: the shell's root is root of that one alone.
exec "$@" unshare --net chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    sh -euc 'cd /; ip link set lo up; . "/given/$1"' sh "$script"
