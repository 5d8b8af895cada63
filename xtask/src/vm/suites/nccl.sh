# "$@" selects tests. A wrong name must not run nothing unnoticed, and a wrong setting must not run over
# `local`. What NCCL takes of the plugin besides its network is the same over any transport. Links of `local` queue pairs that
# break were tried on the host, and so were the tests that choose their own transport, `local` or TCP.
set -- "$@" --skip taken:: --skip devices:: --skip recovering:: --skip over_local --skip over_tcp --skip without_ --skip no_setting \
    --skip a_wrong_setting --skip a_table
"$TEST_NCCL" --list --format terse "$@" | sed -n 's/: test$//p' | sort >/tmp/expected
[ -s /tmp/expected ] || fail "no tests"
before=$(counter rxe0 sent_pkts)
# Four seconds until a packet is sent again: the default, 67 ms, passes without any loss where cores are few. So does the
# time after which a path counts as silent.
PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 PUSHGATE_ACK_TIMEOUT=20 PUSHGATE_PATH_TIMEOUT=30s run 900 "$TEST_NCCL" --include-ignored --test-threads 1 "$@"
[ "$code" = 0 ] || fail "over rxe0"
sed -n 's/^test \(.*\) \.\.\. ok$/\1/p' /tmp/out | sort | diff /tmp/expected - || fail "not all tests passed"
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
