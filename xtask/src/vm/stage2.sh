# The guest's first program once the host's root file system is /: sets up the network and the RDMA devices,
# runs the job with its output on the virtio port, and powers off.
. /run/vm/settings
. /run/vm/lib.sh
export PATH="$CARGO_BIN:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export HOME=/root LANG=C.UTF-8 RUST_BACKTRACE=1 VM_GUEST
export PUSHGATE_SKIP_LOG=/run/out/skips.txt
# Makes modprobe find other modules of the same kernel, whether a person or the kernel asks for them.
export MODPROBE_OPTIONS="-d $KERNEL_DIR"
share=/run/share/$VM_GUEST

off() {
    /run/vm/busybox poweroff -f
}

fail() {
    echo "pushgate-vm: $*"
    off
}

mkdir -p /run/out /run/both
mount --bind "$share/out" /run/out || fail "no /run/out"
mount --bind /run/share/both /run/both || fail "no /run/both"
echo /run/vm/modprobe >/proc/sys/kernel/modprobe
echo "guest$VM_GUEST" >/proc/sys/kernel/hostname
ulimit -l unlimited
ulimit -n 65536

ip link set lo up
dummy d0 10.9.0.1/24 && rxe rxe0 d0 || fail "no soft-RoCE device rxe0"
dummy d1 10.9.1.1/24 && rxe rxe1 d1 || fail "no soft-RoCE device rxe1"
if [ "$GUESTS" = 2 ]; then
    export VM_GUEST_IP=10.9.9.$VM_GUEST VM_PEER_IP=10.9.9.$((3 - VM_GUEST))
    ip link set eth0 name n0 mtu 4200 && ip address add "$VM_GUEST_IP/24" dev n0 && ip link set n0 up ||
        fail "no link n0"
    rxe rxen0 n0 || fail "no soft-RoCE device rxen0"
    # Waits until both guests are there; the host gives up if that takes too long.
    : >"/run/both/.up.$VM_GUEST"
    until [ -e "/run/both/.up.$((3 - VM_GUEST))" ]; do sleep 0.05; done
fi

port=
until [ -c "$port" ]; do port=$(echo /dev/vport*p1); done
# The port can be opened only once, and opening /dev/stdout would open it again.
mkfifo /run/vm/output
/run/vm/busybox cat /run/vm/output >"$port" &
copier=$!
: >"$share/started"
(cd "$ROOT" && exec /bin/sh /run/vm/job) </dev/null >/run/vm/output 2>&1
code=$?
# A process that still holds the pipe was left behind by the job, and is not waited for.
tries=0
while kill -0 "$copier" 2>/dev/null && [ "$tries" -lt 20 ]; do
    tries=$((tries + 1))
    sleep 0.05
done
echo "$code" >"$share/status"
off
