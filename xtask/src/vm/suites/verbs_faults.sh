# A vCPU that gets no core for 67 ms, the default, is no fault: soft-RoCE sends again, which it does not always survive.
export PUSHGATE_ACK_TIMEOUT=20
MAKE=rxe
packets() {
    counter "$1" sent_pkts
}

fault 'its port is down' ip link set f1 down
fault 'its address was removed' ip address delete 10.9.12.1/24 dev f2
fault 'its device or network interface was removed' ip link delete f3
# `rdma link delete` is no fault: it waits until the last user has closed the device.

killed rxef4 f4 10.9.14.1/24

# What cannot work ends at once, with a sentence.
wrong() {
    words=$1
    shift
    run 60 "$BIN_PUSHGATE" bench allreduce --json --device cpu --ranks 2 --size 64K --qp verbs "$@"
    [ "$code" = 1 ] || [ "$code" = 2 ] || fail "exit code $code"
    says "$words"
}
wrong 'RDMA device nosuch is not there; this host has rxe0, rxe1' --ib-dev nosuch
wrong 'ib-port is 7, but rxe0 has ports 1 to 1' --ib-dev rxe0 --ib-port 7
wrong 'port 1 of rxe0 has no address at gid-index 200' --ib-dev rxe0 --gid-index 200
wrong 'window-size is 16777216, but rxe0 sends at most 8388608 bytes' --ib-dev rxe0 --window-size 16M
ip link set d1 down
wrong 'port 1 of rxe1 is down; bring its network interface up' --ib-dev rxe1
ip link set d1 up

# Without libibverbs: only this shell's mounts change, so the rest of the guest still has the library.
library=$(ldconfig -p | awk '/libibverbs\.so\.1 / { print $NF; exit }')
unshare -m /bin/sh -eu -c "mount --bind /dev/null '$library'; exec sleep 6000" &
without=$!
trap 'kill $without' EXIT
until grep -q libibverbs "/proc/$without/mounts"; do sleep 0.05; done
hidden() {
    run 60 nsenter -m -t "$without" "$BIN_PUSHGATE" bench allreduce --json --device cpu --ranks 2 --size 64K --qp "$1"
}
hidden verbs
[ "$code" = 1 ] || fail "exit code $code"
says 'cannot open libibverbs.so.1, the library of RDMA verbs'
says 'install the package libibverbs1'
hidden local
[ "$code" = 0 ] || fail "exit code $code"
tail -n 1 /tmp/out | grep -qF '"verified":true,' || fail "qp = local needs libibverbs"

! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
