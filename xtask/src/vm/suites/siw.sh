# Queue pairs over software iWARP, which rdma_cm connects: their suite, many connections at once, the bench allreduce.
dummy s0 10.9.8.1/24
siw siw0 s0

# The device sends messages as long as a WQE can say, so none is too long for it.
longest=p8::p8_over_rdma_no_message_out_of_a_region_is_longer_than_the_device_can_send
echo "not over software iWARP, which sends messages of any length: $longest"
grep -vxF "$longest" /tmp/expected >/tmp/expected.siw
mv /tmp/expected.siw /tmp/expected
# Without immediate data, for the device has none.
over siw0 verbs-no-imm auto "$@" --skip "$longest"

# Both ends of each have some ten descriptors.
ulimit -n 8192
PUSHGATE_TEST_IB_DEV=siw0 run 300 "$TEST_PUSHGATE_LINK_VERBS" --ignored --exact --nocapture \
    cm_tests::a_hundred_connections_that_both_ends_set_up_at_once_all_come_up
grep -q 'test result: ok. 1 passed; 0 failed; 0 ignored' /tmp/out || fail "a hundred connections"

for ranks in 2 4; do
    run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --qp verbs --ib-dev siw0 --ranks "$ranks" --size 4M --iters 1
    is_right verbs
done

without siw0 s0
