# Two devices over a cable: what goes from one to the other shows at both links. The tests know all devices of the guest, so this suite
# stands before those that leave devices behind, and leaves none itself.
cable va vb 10.9.30.1/24 10.9.30.2/24 && rxe rxea va && rxe rxeb vb || fail "no cable"
run 900 "$TEST_NCCL" --ignored --test-threads 1 devices::
[ "$code" = 0 ] || fail "over two devices"
grep -q 'test result: ok. 7 passed' /tmp/out || fail "the tests did not run"
! dmesg | grep -E 'BUG|Oops|WARNING:|blocked for more than' || fail "the kernel complains"
for device in rxea rxeb; do
    timeout "$(stretched 60)" rdma link delete "$device" || fail "$device can't be removed"
done
timeout "$(stretched 60)" ip link delete va || fail "the cable can't be removed"
