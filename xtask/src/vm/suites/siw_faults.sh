# What goes wrong over software iWARP: links that end, ranks that are killed, links that break and are replaced.
MAKE=siw
# The device counts nothing. Its packets go over `lo`, for both ends are of this guest.
packets() {
    read -r count </sys/class/net/lo/statistics/tx_packets
    echo "$count"
}

fault 'its port is down' ip link set f1 down
fault 'its address was removed' ip address delete 10.9.12.1/24 dev f2
killed siwf3 f3 10.9.13.1/24
ip link delete f3

dummy s0 10.9.8.1/24
siw siw0 s0
export PUSHGATE_QP=verbs PUSHGATE_IB_DEV=siw0
# An emulated machine takes seconds to register memory: the limit is not the subject.
export PUSHGATE_TIMEOUT=$(stretched 120000) PUSHGATE_RECOVER=$(stretched 60000) PUSHGATE_PATH_TIMEOUT=30s
chaos --seconds 20 --every 500ms --seed 7620

# The NCCL plugin under its caller.
run 900 "$TEST_NCCL" --ignored --test-threads 1 recovering::
[ "$code" = 0 ] || fail "links of the plugin that break"
grep -q 'test result: ok. 2 passed' /tmp/out || fail "the tests did not run"
run 900 "$TEST_NCCL" --test-threads 1 ranks_as_processes_get_every_byte a_peer_that_is_killed \
    p7_connections_closed_with_messages_in_flight
[ "$code" = 0 ] || fail "the plugin over siw0"
grep -q 'test result: ok. 3 passed' /tmp/out || fail "the tests did not run"
without siw0 s0
! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
