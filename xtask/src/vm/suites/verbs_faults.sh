roles() {
    grep -lz "^_PUSHGATE_ROLE=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3
}

# Starts a run over a device of its own that would go on for hours; returns when it is well into its
# iterations.
start_long() {
    device=$1
    dummy "$2" "$3" && rxe "$device" "$2" || fail "no device $device"
    rm -f /tmp/code
    (
        code=0
        timeout -k 1 "$(stretched 180)" "$EXAMPLE_ALLREDUCE" --json --device cpu --qp verbs --ib-dev "$device" \
            --ranks 2 --size 64K --iters 1000000 --recover 0 >/tmp/out 2>/tmp/err || code=$?
        echo "$code" >/tmp/code.part
        mv /tmp/code.part /tmp/code
    ) &
    until=$(($(now) + $(stretched 6000)))
    until [ "$(counter "$device" sent_pkts)" -gt 2000 ]; do
        [ ! -e /tmp/code ] || fail "it ended early: $(cat /tmp/err)"
        [ "$(now)" -lt "$until" ] || fail "it never came into its iterations"
        sleep 0.1
    done
}

# ends_with WORDS: checks that the run ends within five seconds after `fault`, says why, and leaves nothing
# behind. The five seconds are a promise; a slow machine gets the same multiple of them.
ends_with() {
    until [ -e /tmp/code ]; do
        [ $(($(now) - fault)) -lt "$(stretched 6000)" ] || fail "it still runs a minute after: $what"
        sleep 0.02
    done
    took=$(($(now) - fault)) code=$(cat /tmp/code)
    echo "-- exit code $code ${took}0 ms after: $what"
    cat /tmp/err
    [ "$took" -le "$(stretched 500)" ] || fail "that was more than $(stretched 5) seconds"
    [ "$code" = 1 ] || fail "exit code $code"
    says "$1"
    ! grep -q panicked /tmp/err || fail "a panic"
    [ -z "$(roles .)" ] || fail "processes are left: $(roles .)"
}

# Time for what the device's users must close first.
gone() {
    until=$(($(now) + $(stretched 6000)))
    while [ -e "$1" ]; do
        [ "$(now)" -lt "$until" ] || fail "$1 is still there"
        sleep 0.1
    done
}

# fault WORDS COMMAND...: checks that a run that this command hits ends, and that its device can be removed
# then.
number=0
fault() {
    words=$1
    shift
    number=$((number + 1))
    start_long "rxef$number" "f$number" "10.9.$((10 + number)).1/24"
    fault=$(now) what=$*
    # The command may wait for the device's users.
    timeout "$(stretched 60)" "$@" &
    ends_with "$words"
    wait $!
    if [ -e "/sys/class/infiniband/rxef$number" ] && [ -e "/sys/class/net/f$number" ]; then
        timeout "$(stretched 60)" rdma link delete "rxef$number" || fail "rxef$number can't be removed"
        timeout "$(stretched 60)" ip link delete "f$number" || fail "f$number can't be removed"
    fi
    gone "/sys/class/infiniband/rxef$number"
    gone "/sys/class/net/f$number"
}

fault 'its port is down' ip link set f1 down
fault 'its address was removed' ip address delete 10.9.12.1/24 dev f2
fault 'its device or network interface was removed' ip link delete f3
# `rdma link delete` is no fault: it waits until the last user has closed the device.

start_long rxef4 f4 10.9.14.1/24
fault=$(now) what="rank 1 is killed"
kill -9 "$(roles 1/)"
ends_with 'rank 1 is lost'
says 'was killed by signal 9'
! grep -q 'rank 0 is lost' /tmp/err || fail "the wrong rank"
timeout "$(stretched 60)" rdma link delete rxef4 || fail "rxef4 can't be removed"

# What cannot work ends at once, with a sentence.
wrong() {
    words=$1
    shift
    run 60 "$EXAMPLE_ALLREDUCE" --json --device cpu --ranks 2 --size 64K --qp verbs "$@"
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
    run 60 nsenter -m -t "$without" "$EXAMPLE_ALLREDUCE" --json --device cpu --ranks 2 --size 64K --qp "$1"
}
hidden verbs
[ "$code" = 1 ] || fail "exit code $code"
says 'cannot open libibverbs.so.1, the library of RDMA verbs'
says 'install the package libibverbs1'
hidden local
[ "$code" = 0 ] || fail "exit code $code"
tail -n 1 /tmp/out | grep -qF '"verified":true,' || fail "qp = local needs libibverbs"

! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
