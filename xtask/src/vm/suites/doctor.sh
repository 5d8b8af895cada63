# `pushgate doctor`, where soft-RoCE is right and where it is wrong. Each test has a device of its own.
status=0
count=$("$TEST_DOCTOR" --list --format terse --ignored | grep -c ': test$')
timeout -k 2 100 "$TEST_DOCTOR" --ignored --test-threads 1 >/tmp/said 2>&1 || status=$?
cat /tmp/said
[ "$count" -ge 8 ] || { echo "FAILED: $count tests"; exit 1; }
grep -q "^test result: ok. $count passed; 0 failed; 0 ignored" /tmp/said || exit 1
! dmesg | grep -E 'BUG|Oops|WARNING:' || exit 1
exit "$status"
