# Boots systemd there, which runs a script as a service and ends with the script's status: $4 is the script's place in the folder
# given, $5 a file that gets what the script writes.
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 none sys/fs/cgroup
# No device but these: systemd takes what it finds.
mount -t tmpfs -o mode=755 none dev
for node in null zero full random urandom tty; do
    touch "dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mkdir dev/shm
mount -t tmpfs -o mode=1777 none dev/shm
ln -s /proc/self/fd dev/fd
touch said
mount --bind "$5" said
cat >etc/systemd/system/script.service <<UNIT
[Unit]
SuccessAction=exit-force
FailureAction=exit-force
FailureActionExitStatus=1
[Service]
Type=oneshot
TimeoutStartSec=300
ExecStart=/bin/sh -euc 'cd /; exec >>/said 2>&1; . "/given/$4"'
UNIT
exec chroot . /usr/bin/env -i container=pushgate PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    /lib/systemd/systemd --unit=script.service --log-level=warning --show-status=no
