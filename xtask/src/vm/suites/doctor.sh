# `pushgate doctor`, where soft-RoCE is right and where it is wrong.
# A process that another test starts is no test.
set -- --ignored --skip looks_at_nccl
count=$("$TEST_DOCTOR" --list --format terse "$@" | grep -c ': test$')
[ "$count" -ge 8 ] || { echo "FAILED: $count tests"; exit 1; }
# Seen as it goes, should it be cut short; how it ended stands in its last lines.
"$TEST_DOCTOR" "$@" --test-threads 1 2>&1 | tee /tmp/said
rdma link delete rxedoc
ip link delete doc0
grep -q "^test result: ok. $count passed; 0 failed; 0 ignored" /tmp/said || exit 1
! dmesg | grep -E 'BUG|Oops|WARNING:' || exit 1
