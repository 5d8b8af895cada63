for imm in --no-imm=false --no-imm; do
    right rxe0 --ranks 4 --size 4M --iters 1 "$imm"
    # Receivers that post late, and then practically one receive at a time.
    right rxe0 --ranks 4 --size 128K --iters 1 "$imm" --receives 2 --slice 4K --late-ms 30
    stalled
done

# Shows that these checks can fail: the same runs with senders that ignore credit.
late="--json --out-of-place --device cpu --qp verbs --ib-dev rxe0 --ranks 4 --iters 1 --receives 2 --slice 4K --late-ms 30"
ungated() {
    before=$(rnr rxe0)
    # Unquoted, because the words are arguments.
    run 120 "$BIN_PUSHGATE_UNGATED" bench allreduce $late "$@"
    after=$(rnr rxe0)
}

# Without being told to ignore credit, that build is right.
ungated --size 128K
verified
[ "$before" = "$after" ] || fail "RNR in the build that can ignore credit: $before, then $after"

# A sender may happen to be late enough, so it gets ten tries.
breaks() {
    imm=$1
    for turn in 1 2 3 4 5 6 7 8 9 10; do
        # 64 messages a step: more than the rank's receives and the 16 that are reserved to wake it.
        _PUSHGATE_UNGATED=1 PUSHGATE_LOG=warn ungated --size 1M "$imm"
        if [ "$code" = 0 ]; then
            [ "$before" = "$after" ] || fail "all is right, it says, and RNR went from $before to $after"
            continue
        fi
        case $imm in
            # Without immediate data there are no receives to miss, and only the receiver can detect the
            # overrun.
            --no-imm)
                [ "$before" = "$after" ] || fail "RNR without immediate data: $before, then $after"
                says 'overrun: no receive was granted'
                says 'sent what was not granted'
                ;;
            # The receiver may have detected the overrun before its receives were used up.
            *)
                [ "$before" != "$after" ] && grep -q 'RNR retry counter exceeded' /tmp/err &&
                    grep -qF 'it had no receive posted (RNR)' /tmp/err || continue
                ;;
        esac
        return 0
    done
    fail "senders without credit broke nothing ($imm)"
}
breaks --no-imm=false
breaks --no-imm
