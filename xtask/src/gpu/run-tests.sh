#!/bin/sh
# Runs the tests of this bundle, one test program after the other, and ends with one line: how many programs
# passed and failed.
#
#   run-tests                    all
#   run-tests NAME ARGUMENT...   one, with arguments for it
cd "$(dirname "$0")" || exit 1
export _PUSHGATE_TEST_BUNDLE="$PWD" PUSHGATE_SKIP_LOG="${PUSHGATE_SKIP_LOG:-$PWD/skips.txt}"
if [ $# -gt 0 ]; then
    name=$1
    shift
    exec "tests/$name" "$@"
fi
: >"$PUSHGATE_SKIP_LOG"
passed=0 failed=0 skipped=0
for test in tests/*; do
    echo "==== ${test##*/}"
    before=$(wc -l <"$PUSHGATE_SKIP_LOG")
    if "$test"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    [ "$(wc -l <"$PUSHGATE_SKIP_LOG")" = "$before" ] || skipped=$((skipped + 1))
done
sort "$PUSHGATE_SKIP_LOG" | uniq -c
[ "$skipped" = 0 ] || echo "$skipped of them left something out, for the reasons above"
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
