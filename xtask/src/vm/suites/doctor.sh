# Tests `pushgate doctor` with soft-RoCE in order and with faults. Left out: looks_at_nccl, which another test
# starts as a process of its own.
set -- --ignored --skip looks_at_nccl
count=$("$TEST_DOCTOR" --list --format terse "$@" | grep -c ': test$')
[ "$count" -ge 8 ] || { echo "FAILED: $count tests"; exit 1; }
# Shown while it runs, in case it is cut short; the last lines say how it ended.
"$TEST_DOCTOR" "$@" --test-threads 1 2>&1 | tee /tmp/said
rdma link delete rxedoc
ip link delete doc0
grep -q "^test result: ok. $count passed; 0 failed; 0 ignored" /tmp/said || exit 1
! dmesg | grep -E 'BUG|Oops|WARNING:' || exit 1
