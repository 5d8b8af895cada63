# Tables in the form of the OSU micro-benchmarks over RDMA: every byte checked, from memory of every kind,
# through windows of every kind, with both ranks started together or each by itself.
load

# table LINES ARGUMENT...: checks that the bench ends well, with this many sizes, all of them right.
table() {
    lines=$1
    shift
    run 120 "$BIN_PUSHGATE" bench "$@" --device cpu --qp verbs --ib-dev rxe0 -c -i 4 -x 1
    [ "$code" = 0 ] || fail "exit code $code"
    [ "$(grep -c '^[0-9].* Pass$' /tmp/out)" = "$lines" ] || fail "these are not $lines right sizes"
    grep -q '^# qp verbs, ' /tmp/out || fail "the queue pair was another"
}
# 64 KiB travel in two slices through a window of 64 KiB.
for buffers in 'H H' 'D D' 'H D' 'D H'; do
    # Unquoted, because the words are arguments.
    table 3 osu-bibw -d $buffers -m 16K:64K -W 4 --window-size 64K
done
table 6 osu-latency -d D D -m 32 --no-imm
table 3 osu-bw -d H D -m 256:1K
for window in staging bar; do
    table 1 osu-bw -d D D -m 64K:64K -W 8 --window "$window" --window-size 64K
done

code=0
_PUSHGATE_OSU_FLIP=3 run 120 "$BIN_PUSHGATE" bench osu-bw --device cpu --qp verbs --ib-dev rxe0 -c -m 4K:8K -i 2 -W 4
[ "$code" = 1 ] || fail "a wrong byte, and exit code $code"
grep -q '^4096 .* Fail$' /tmp/out || fail "a wrong byte was not found"
says '1 wrong bytes, the first at offset 3 of message 0'

# Each rank started by itself, as on two hosts.
export PUSHGATE_SECRET='the secret of two ranks'
alone="--device cpu --qp verbs --ib-dev rxe0 --rendezvous 10.9.0.1:7117 -c -i 4 -m 1K:4K -W 8"
timeout -k 2 "$(stretched 120)" "$BIN_PUSHGATE" bench osu-bibw $alone --rank 1 >/tmp/other 2>&1 &
run 120 "$BIN_PUSHGATE" bench osu-bibw $alone --rank 0
[ "$code" = 0 ] || fail "exit code $code"
wait $! || fail "rank 1 has failed: $(cat /tmp/other)"
[ "$(grep -c '^[0-9].* Pass$' /tmp/out)" = 3 ] || fail "these are not three right sizes"
timeout -k 2 "$(stretched 120)" "$BIN_PUSHGATE" bench osu-bibw $alone --rank 1 -x 3 >/tmp/other 2>&1 &
run 120 "$BIN_PUSHGATE" bench osu-bibw $alone --rank 0
[ "$code" = 1 ] || fail "exit code $code, of two that were started for different runs"
! wait $! || fail "rank 1 has not failed"
says 'rank 1 was started for another run'
dmesg_is_clean
