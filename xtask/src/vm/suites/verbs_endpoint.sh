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

for qp in verbs verbs-no-imm; do
    before=$(counter rxe0 sent_pkts)
    PROPTEST_CASES=20 PUSHGATE_TEST_QP=$qp PUSHGATE_TEST_IB_DEV=rxe0 run 600 "$TEST_ENDPOINT" "$@"
    [ "$code" = 0 ] || fail "over $qp"
    ran | diff /tmp/expected - || fail "over $qp other tests passed (right) than there are (left)"
    sleep 0.05
    [ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
done

# RDMA devices' own memory, where they have any.
if [ -n "${TEST_PUSHGATE_PROXY:-}" ]; then
    run 60 "$TEST_PUSHGATE_PROXY" --ignored --exact \
        link::verbs::nic::tests::real_devices_give_memory_or_say_that_they_have_none
    grep -q 'test result: ok. 1 passed; 0 failed; 0 ignored' /tmp/out || fail "the device's memory"
else
    echo "SKIPPED: the unit tests of pushgate-proxy are not built for the suite verbs-endpoint" |
        tee -a "$PUSHGATE_SKIP_LOG"
fi
