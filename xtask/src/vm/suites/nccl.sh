# "$@" chooses among the tests. A name that is gone must not become a run of nothing, nor a setting one over `local`.
count=$("$TEST_NCCL" --list --format terse "$@" | grep -c ': test$')
before=$(counter rxe0 sent_pkts)
PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 run 300 "$TEST_NCCL" --test-threads 1 "$@"
[ "$code" = 0 ] || fail "over rxe0"
grep -q "test result: ok. $count passed; 0 failed; 0 ignored" /tmp/out || fail "not $count tests passed"
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
