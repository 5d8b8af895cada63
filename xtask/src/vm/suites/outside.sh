# Functions shared by the suites of the kernel module.
dmesg_is_clean() {
    dmesg >/run/out/dmesg.txt
    pattern='WARNING|BUG|Oops|Call Trace|refcount|leak|general protection|Bad page|Bad rss|x86/PAT.*(conflict|err)'
    ! grep -E "$pattern" /run/out/dmesg.txt || fail "the kernel has something to say"
}

# Loads the module and binds it to every function.
load() {
    insmod "$KMOD_DIR/pushgate.ko"
    for slot in 10 11 12 13; do
        [ -e "/sys/bus/pci/devices/0000:00:$slot.0" ] || continue
        echo pushgate >"/sys/bus/pci/devices/0000:00:$slot.0/driver_override"
        echo "0000:00:$slot.0" >/sys/bus/pci/drivers_probe
    done
}

# A device outside of this machine, which has only the BAR's memory and the interrupt. Proxy and peer run
# here, as two ranks over soft-RoCE.
field() {
    sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$2" | tail -n 1
}
outside() {
    count=$1 bytes=$2 bursts=$3 bell=$4
    device=/dev/$(ls /sys/bus/pci/devices/0000:00:12.0/pushgate)
    export PUSHGATE_DEVICE=cpu PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 PUSHGATE_TIMEOUT=$(stretched 60000)
    PUSHGATE_WINDOW=bar PUSHGATE_WINDOW_DEV=$device PUSHGATE_RINGS=window PUSHGATE_WINDOW_SIZE=256K \
        timeout -k 2 "$(stretched 80)" "$EXAMPLE_OUTSIDE" --role proxy >/tmp/proxy.out 2>&1 &
    proxy=$!
    PUSHGATE_WINDOW_SIZE=256K timeout -k 2 "$(stretched 80)" "$EXAMPLE_OUTSIDE" --role peer --count "$count" \
        --bytes "$bytes" >/tmp/peer.out 2>&1 &
    peer=$!
    until grep -q '"ready":true' /tmp/proxy.out; do
        kill -0 "$proxy" || { cat /tmp/proxy.out; fail "the proxy has ended"; }
        sleep 0.05
    done
    code=0
    on_host "OFFSET=$(field offset /tmp/proxy.out)" "COUNT=$count" "BYTES=$bytes" "BURSTS=$bursts" \
        "BELL=$bell" "PATIENCE=$VM_PATIENCE" || code=$?
    cat /run/out/host.txt
    [ "$code" = 0 ] || { cat /tmp/proxy.out /tmp/peer.out; fail "the device outside has ended with $code"; }
    grep -q '"heard":1' /run/out/host.txt || fail "the device did not hear its peer"
    wait "$peer" || code=$?
    wait "$proxy" || code=$?
    cat /tmp/peer.out /tmp/proxy.out
    [ "$code" = 0 ] || fail "exit code $code"
    grep -q "\"status\":\"ok\",\"messages\":$count,\"wrong\":0,\"dropped\":0,\"rnr\":0}" /tmp/peer.out ||
        fail "not every byte came"
    grep -q "\"released\":$count,\"retired\":$count,\"dropped\":0,\"rnr\":0," /tmp/proxy.out ||
        fail "not every message was released and retired"
    interrupts=$(field interrupts /tmp/proxy.out)
}
