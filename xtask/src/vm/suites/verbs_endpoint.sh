for qp in verbs verbs-no-imm; do
    # A name that is gone must not become a run of nothing, nor a setting one over `local`.
    count=$("$TEST_ENDPOINT" --list --format terse | grep -c ': test$')
    before=$(counter rxe0 sent_pkts)
    PROPTEST_CASES=20 PUSHGATE_TEST_QP=$qp PUSHGATE_TEST_IB_DEV=rxe0 run 120 "$TEST_ENDPOINT"
    [ "$code" = 0 ] || fail "over $qp"
    grep -q "test result: ok. $count passed; 0 failed; 0 ignored" /tmp/out || fail "not $count tests passed"
    sleep 0.05
    [ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
done
