# Tests of two agents; what needs no peer ran on the host.
"$TEST_PLUGIN_PUSHGATE" --list --format terse p6_ p8_memory | sed -n 's/: test$//p' | sort >/tmp/expected
[ "$(wc -l </tmp/expected)" -ge 4 ] || fail "so few tests: $(cat /tmp/expected)"
before=$(counter rxe0 sent_pkts)
_PUSHGATE_TEST_IB_DEV=rxe0 run 600 "$TEST_PLUGIN_PUSHGATE" --test-threads 1 p6_ p8_memory
[ "$code" = 0 ] || fail "over rxe0"
sed -n 's/^test \(.*\) \.\.\. ok$/\1/p' /tmp/out | sort | diff /tmp/expected - || fail "not all tests passed"
sleep 0.05
[ "$(counter rxe0 sent_pkts)" -gt $((before + 1000)) ] || fail "nothing went over rxe0"
