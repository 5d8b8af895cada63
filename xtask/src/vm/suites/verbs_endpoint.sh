over_rxe verbs off "$@"
over_rxe verbs-no-imm off "$@"

# RDMA devices' own memory, where they have any.
if [ -n "${TEST_PUSHGATE_LINK_VERBS:-}" ]; then
    run 60 "$TEST_PUSHGATE_LINK_VERBS" --ignored --exact \
        nic::tests::real_devices_give_memory_or_say_that_they_have_none
    grep -q 'test result: ok. 1 passed; 0 failed; 0 ignored' /tmp/out || fail "the device's memory"
else
    echo "SKIPPED: the unit tests of pushgate-link-verbs are not built for the suite verbs-endpoint" |
        tee -a "$PUSHGATE_SKIP_LOG"
fi
