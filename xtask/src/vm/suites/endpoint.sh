# Tests that concern only the queue pair `local` and use `local` whatever PUSHGATE_TEST_QP says. They run on
# the host; here they would count as tests over RDMA.
local_only='
p3::p3_a_put_out_of_a_region_reaches_host_and_device_before_its_signal
p3::p3_a_relay_goes_by_the_longest_stretch_of_the_landing_ring
p4::p4_p5_sends_out_of_a_region_wait_for_room_in_the_landing_ring
p7::p7_p8_where_the_peer_cannot_read_a_region_send_is_refused_with_a_sentence
p8::p8_a_region_stays_until_nobody_reads_what_goes_out_of_it
p8::p8_a_sender_that_names_memory_it_does_not_have_is_refused_and_hurts_nobody_else
p8::p8_a_turn_ends_when_the_engine_has_copied_enough'

# tests PROGRAM ARGUMENT...: the names of the program's tests, sorted.
tests() {
    "$@" --list --format terse | sed -n 's/: test$//p' | sort
}

# ran: the names of the tests that passed, sorted, by the output of the last run.
ran() {
    sed -n 's/^test \(.*\) \.\.\. ok$/\1/p' /tmp/out | sort
}

set -- --include-ignored --exact
tests "$TEST_ENDPOINT" >/tmp/all
for name in $local_only; do
    grep -qxF "$name" /tmp/all || fail "the suite has no test $name: mend the list of those of local alone"
    set -- "$@" --skip "$name"
    echo "not over RDMA, because it concerns the queue pair local: $name"
done
printf '%s\n' $local_only | sort | comm -23 /tmp/all - >/tmp/expected
[ "$(wc -l </tmp/expected)" -gt 40 ] || fail "so few tests: $(cat /tmp/expected)"

# over DEVICE QP RDMA_CM OPTION...: the suite over a device; QP as PUSHGATE_TEST_QP has it; with rdma_cm `on` or `off`; libtest's
# options.
over() {
    device=$1 qp=$2 cm=$3
    shift 3
    PROPTEST_CASES=20 PUSHGATE_TEST_QP=$qp PUSHGATE_TEST_RDMA_CM=$cm PUSHGATE_TEST_IB_DEV=$device run 600 "$TEST_ENDPOINT" "$@"
    [ "$code" = 0 ] || fail "$qp over $device, rdma_cm $cm"
    ran | diff /tmp/expected - || fail "over $device other tests passed (right) than there are (left)"
}
# over_rxe QP RDMA_CM OPTION...: over rxe0, by whose counters packets went.
over_rxe() {
    before=$(counter rxe0 sent_pkts)
    over rxe0 "$@"
    sleep 0.05
    [ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
}
