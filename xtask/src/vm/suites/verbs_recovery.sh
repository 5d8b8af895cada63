# Four seconds until a packet is sent again: the default, 67 ms, passes without any loss where cores are few.
export PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 PUSHGATE_ACK_TIMEOUT=20 PUSHGATE_PATH_TIMEOUT=30s
# An emulated machine takes seconds to register memory: the limit is not the subject.
export PUSHGATE_TIMEOUT=$(stretched 120000) PUSHGATE_RECOVER=$(stretched 60000)

# Over a cable, which goes down, loses packets and delays them: within one RDMA device no packet would see that. A path that is
# silent is found within the default of path-timeout. With a rendezvous the ranks' sockets are those of two hosts: they are reset, too.
cable va vb 10.9.30.1/24 10.9.30.2/24 && rxe rxea va && rxe rxeb vb || fail "no cable"
PUSHGATE_PATH_TIMEOUT=$(stretched 1000) chaos --seconds 30 --every 500ms --seed 7620 --link va,vb \
    --rank-ib-dev rxea --rank-ib-dev rxeb --rendezvous 127.0.0.1:7000
for kind in link-down netem cut; do
    case $last in *"\"$kind\":"*) ;; *) fail "its last line has no $kind" ;; esac
done
is_down() {
    [ "$(cat /sys/class/net/va/operstate)" = down ]
}
is_whole() {
    ! tc qdisc show | grep netem || fail "a link still loses packets"
    ! is_down || fail "a link is still down"
}
is_whole
# Ctrl-C in the middle of a fault puts the device right.
"$BIN_PUSHGATE" chaos --seconds 600 --every 100ms --seed 7620 --device cpu --link va --rank-ib-dev rxea --rank-ib-dev rxeb >/tmp/out 2>/tmp/err &
chaos=$! code=0
within 120 "va does not go down" is_down
kill -INT "$chaos"
wait "$chaos" || code=$?
[ "$code" = 130 ] || fail "exit code $code after Ctrl-C"
is_whole

before=$(counter rxe0 sent_pkts)
chaos --seconds 30 --every 1s --seed 64 --no-imm

run 900 "$TEST_NCCL" --ignored --test-threads 1 recovering::
[ "$code" = 0 ] || fail "the plugin over rxe0"
grep -q 'test result: ok. 2 passed' /tmp/out || fail "the tests did not run"
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
