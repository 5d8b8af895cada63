node=$((VM_GUEST - 1))
# Four seconds until a packet is sent again. The default, 67 ms, passes here without any loss, and soft-RoCE
# does not survive every retransmission.
patience=20
# After how long a path counts as silent. The default, 1 s, passes too where cores are few.
silence=30s

# The guests reach each other, so their ranks need a secret.
export PUSHGATE_SECRET='the secret of two guests'

# How much the transport had to send again or received twice.
again() {
    sleep 0.05
    echo $(($(counter rxen0 duplicate_request) + $(counter rxen0 out_of_seq_request) + $(counter rxen0 completer_retry_err)))
}

# Starts the bench allreduce over both guests, two ranks in each.
start() {
    before=$(rnr rxen0)
    run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --qp verbs --ib-dev rxen0 --ack-timeout "$patience" --path-timeout "$silence" \
        --ranks 4 --nodes 2 --node "$node" --rendezvous 10.9.9.1:7000 "$@"
}

# Checks that node 0 has the result, and that both have an exit code and a device that counts.
right_here() {
    [ "$node" = 1 ] || verified
    [ "$code" = 0 ] || fail "exit code $code"
    [ "$(rnr rxen0)" = "$before" ] || fail "RNR counters went from $before to $(rnr rxen0)"
}

for imm in --no-imm=false --no-imm; do
    together "four$imm"
    start --size 4M --iters 1 --warmup 0 "$imm"
    right_here
    together "late$imm"
    start --size 128K --iters 1 --warmup 0 "$imm" --receives 2 --slice 4K --late-ms 30
    right_here
    [ "$node" = 1 ] || stalled
done

# Nodes that were given different sizes.
together sizes
start --size "${VM_GUEST}M"
[ "$code" = 1 ] || fail "exit code $code"
says '--size is'
says 'give all nodes and ranks the same'

# The cable is cut in the middle of a run, for at least three seconds and until this end knows that the path is silent, and
# joined again. No device says so. Only what this end sends is lost: the end that finds the silence first is either of the
# two, and when it is the other one, its word comes through.
together cut
rm -f /tmp/cut /tmp/err
(
    sent=$(counter rxen0 sent_pkts)
    until [ "$(counter rxen0 sent_pkts)" -gt $((sent + 1000)) ]; do sleep 0.1; done
    [ "$node" = 1 ] || exit 0
    tc qdisc add dev n0 root netem loss 100%
    : >/tmp/cut
    sleep 3
    for _ in $(seq 100); do
        ! grep -qE "answers nothing|at the peer's end" /tmp/err || break
        sleep 0.1
    done
    tc qdisc delete dev n0 root
) &
silence=1s
PUSHGATE_LOG=info start --size 64K --iters 80 --recover "$(stretched 20000)"
silence=30s
right_here
if [ "$node" = 1 ]; then
    [ -e /tmp/cut ] || fail "the run ended before the cable was cut"
fi
says 'another link carries the queue pair'
grep -cF 'answers nothing' /tmp/err >"/run/both/silent.$VM_GUEST" || true
together silent
grep -qv '^0$' /run/both/silent.* || fail "neither end says: answers nothing"

# Strangers at the rendezvous before the ranks come: one sends something, one sends nothing. Both stay.
together strangers
if [ "$node" = 1 ]; then
    strangers=
    for words in 'GET / HTTP/1.1' ''; do
        rm -f /tmp/connected
        timeout "$(stretched 120)" bash -c '
            until exec 3<>/dev/tcp/10.9.9.1/7000; do sleep 0.1; done
            printf "$0" >&3
            : >/tmp/connected
            exec sleep "$1"' "$words" "$(stretched 120)" 2>/dev/null &
        strangers="$strangers $!"
        trap 'kill $strangers' EXIT
        until [ -e /tmp/connected ]; do
            kill -0 $! || fail "no stranger got through"
            sleep 0.05
        done
    done
fi
start --size 64K --iters 1 --tls
right_here

# A node with another secret is not let in, and both say so.
together secrets
PUSHGATE_SECRET="the secret of guest $VM_GUEST" start --size 64K --iters 1 --timeout "$(stretched 4000)"
[ "$code" = 1 ] || fail "exit code $code"
says 'secret'

# A bad cable. Packets are lost and pass each other: soft-RoCE must send again, and if it gives up, the run
# ends with a status. What the run reports as verified must be right.
together cable
tc qdisc add dev n0 root netem loss 1% delay 2ms 2ms reorder 25%
together bad-cable
patience=14
sent_again=$(again)
right=0
for turn in 1 2 3; do
    for imm in --no-imm=false --no-imm; do
        together "bad-cable$turn$imm"
        start --size 64K --iters 2 "$imm" --timeout "$(stretched 10000)"
        [ "$(rnr rxen0)" = "$before" ] || fail "RNR counters went from $before to $(rnr rxen0)"
        ! grep -q 'wrong elements' /tmp/err || fail "wrong sums"
        case $code in
            0) ;;
            1) grep -qE 'the RDMA link of rank|timed out|is lost|aborted' /tmp/err || fail "no status" ;;
            *) fail "exit code $code" ;;
        esac
        echo "$code" >"/run/both/$turn$imm.code.$VM_GUEST"
        together "after$turn$imm"
        # Both nodes must come to the same result here, or they would go different ways.
        grep -qv '^0$' "/run/both/$turn$imm".code.* || right=$((right + 1))
    done
    [ "$right" = 0 ] || break
done
[ "$right" != 0 ] || fail "no run got through a bad cable"
[ "$(again)" -gt "$sent_again" ] || fail "nothing was sent again: was the cable bad?"
