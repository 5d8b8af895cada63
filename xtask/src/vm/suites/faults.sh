# Faults that end a run of the bench allreduce: it ends soon, says why, and leaves nothing behind.
roles() {
    grep -lz "^_PUSHGATE_ROLE=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3
}

# Starts a run over a device of its own that would go on for hours; returns when it is well into its
# iterations. `MAKE` is the function of lib.sh that makes the device, and `packets DEVICE` counts what it has sent.
start_long() {
    device=$1
    dummy "$2" "$3" && $MAKE "$device" "$2" || fail "no device $device"
    from=$(packets "$device")
    rm -f /tmp/code
    (
        code=0
        timeout -k 1 "$(stretched 180)" "$BIN_PUSHGATE" bench allreduce --json --device cpu --qp verbs --ib-dev "$device" \
            --ranks 2 --size 64K --iters 1000000 --recover 0 >/tmp/out 2>/tmp/err || code=$?
        echo "$code" >/tmp/code.part
        mv /tmp/code.part /tmp/code
    ) &
    until=$(($(now) + $(stretched 6000)))
    until [ $(($(packets "$device") - from)) -gt 2000 ]; do
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
    start_long "${MAKE}f$number" "f$number" "10.9.$((10 + number)).1/24"
    fault=$(now) what=$*
    # The command may wait for the device's users.
    timeout "$(stretched 60)" "$@" &
    ends_with "$words"
    wait $!
    if [ -e "/sys/class/infiniband/${MAKE}f$number" ] && [ -e "/sys/class/net/f$number" ]; then
        timeout "$(stretched 60)" rdma link delete "${MAKE}f$number" || fail "${MAKE}f$number can't be removed"
        timeout "$(stretched 60)" ip link delete "f$number" || fail "f$number can't be removed"
    fi
    gone "/sys/class/infiniband/${MAKE}f$number"
    gone "/sys/class/net/f$number"
}

# killed DEVICE LINK ADDRESS: checks that a rank that is killed is the one that is named.
killed() {
    start_long "$1" "$2" "$3"
    fault=$(now) what="rank 1 is killed"
    kill -9 "$(roles 1/)"
    ends_with 'rank 1 is lost'
    says 'was killed by signal 9'
    ! grep -q 'rank 0 is lost' /tmp/err || fail "the wrong rank"
    timeout "$(stretched 60)" rdma link delete "$1" || fail "$1 can't be removed"
}
