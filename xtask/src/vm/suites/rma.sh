# "$@" of `suite` selects tests. GPU memory and the speed do the same over any transport, and were tried on the host, as was the
# whole suite over TCP. A wrong setting must not run over `local`, and a wrong name must not run nothing unnoticed.
suite() { # NAME TEST-OR-OPTION...
    name=$1
    shift
    set -- "$@" --skip gpu_ --skip speed_
    "$TEST_RMA" --list --format terse "$@" | sed -n 's/: test$//p' | grep -v 1_gib | sort >/tmp/expected
    [ -s /tmp/expected ] || fail "no tests"
    run 600 "$TEST_RMA" --test-threads 1 "$@"
    [ "$code" = 0 ] || fail "over $name"
    sed -n 's/^test \(.*\) \.\.\. ok$/\1/p' /tmp/out | sort | diff /tmp/expected - || fail "not all tests passed over $name"
}
before=$(counter rxe0 sent_pkts)
# Four seconds until a packet is sent again, for the reason that nccl.sh names; so does the time after which a path counts as
# silent.
export PUSHGATE_PATH_TIMEOUT=30s
(
    export PUSHGATE_QP=verbs PUSHGATE_IB_DEV=rxe0 PUSHGATE_ACK_TIMEOUT=20
    suite rxe0
)
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
export PUSHGATE_QP=tcp PUSHGATE_HOST=10.9.0.1
suite tcp p7_
