# Functions shared by the suites that run the bench allreduce. Every run has a limit, so that a hang fails the
# suite at that point. They do with the shell's own commands what these can do: in two emulated machines on two cores
# a program takes a fifth of a second to start.
export NO_COLOR=1
# How long the programs themselves wait for their peers: the default, stretched.
export PUSHGATE_TIMEOUT=$(stretched 30000)

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# The time in hundredths of a second.
now() {
    read -r up _ </proc/uptime
    echo "${up%.*}${up#*.}"
}

counter() {
    read -r count <"/sys/class/infiniband/$1/ports/1/hw_counters/$2"
    echo "$count"
}

# The device's own counts of receivers that were not ready: answers sent, answers received, and failures after
# them. They are read here because the bench allreduce's own count may be wrong.
rnr() {
    # For 10 ms the kernel returns the values that it read before.
    sleep 0.05
    for name in send_rnr_err rcvd_rnr_err retry_rnr_exceeded_err; do
        read -r count <"/sys/class/infiniband/$1/ports/1/hw_counters/$name"
        printf '%s ' "$count"
    done
}

# Prints every two seconds how far the program has come, if that has changed: output is how the host tells
# slowness from a hang.
progress() {
    seen=0
    while sleep 2; do
        size=$(wc -c </tmp/out)
        [ "$size" = "$seen" ] || echo "... $(tail -n 1 /tmp/out)"
        seen=$size
    done
}

# run SECONDS PROGRAM ARGUMENT...: sets code; the program's output is in /tmp/out and /tmp/err. After this
# many seconds, stretched, the program counts as hanging.
run() {
    begin=$(now)
    code=0
    limit=$(stretched "$1")
    shift
    : >/tmp/out
    progress &
    ticker=$!
    timeout -k 2 "$limit" "$@" >>/tmp/out 2>/tmp/err || code=$?
    kill "$ticker"
    wait "$ticker" || true
    echo "-- exit code $code in $(($(now) - begin))0 ms: ${1##*/} ${*#"$1 "}"
    cat /tmp/out /tmp/err
    [ "$code" != 124 ] && [ "$code" != 137 ] || fail "it still ran after $limit s"
    ! grep -q panicked /tmp/err || fail "a panic"
}

says() {
    grep -qF -e "$1" /tmp/err || fail "it does not say: $1"
}

# is_right TRANSPORT: checks the last line of the bench allreduce: right sums over that transport, nothing dropped.
is_right() {
    [ "$code" = 0 ] || fail "exit code $code"
    last=$(tail -n 1 /tmp/out)
    for word in '"verified":true,' '"dropped":0,' '"qp":"'"$1"'",'; do
        case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
    done
}

# verified [TRANSPORT]: checks that the bench allreduce is right, and saw no RNR by its own count.
verified() {
    is_right "${1:-verbs}"
    case $last in *'"rnr":0,'*) ;; *) fail 'its last line has no "rnr":0,' ;; esac
}

# right DEVICE ARGUMENT...: checks that the bench allreduce is right and that the device counted no RNR. Out of place
# alone: an emulated processor has no time for both.
right() {
    before=$(rnr "$1")
    run 120 "$BIN_PUSHGATE" bench allreduce --json --out-of-place --device cpu --qp verbs --ib-dev "$@"
    verified
    after=$(rnr "$1")
    [ "$after" = "$before" ] || fail "RNR counters of $1 went from $before to $after"
}

stalled() {
    ! tail -n 1 /tmp/out | grep -qF '"credit_stalls":0,' || fail "no sender ever waited for credit"
}

# chaos ARGUMENT...: runs `pushgate chaos`, and checks that links were replaced, and nothing was lost, doubled or wrong.
chaos() {
    run 300 "$BIN_PUSHGATE" chaos --json --device cpu "$@"
    [ "$code" = 0 ] || fail "chaos $*"
    last=$(tail -n 1 /tmp/out)
    for word in '"lost":0,' '"doubled":0,' '"wrong":0}'; do
        case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
    done
    case $last in *'"recovered":0,'*) fail "no link was replaced" ;; esac
}
