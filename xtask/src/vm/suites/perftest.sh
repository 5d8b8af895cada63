# Measures pushgate beside perftest, in turn, over one RDMA device of the guest: OURS, options of `pushgate bench rdma`; THEIRS,
# options of perftest's programs; ADDRESS, that of the device. Each end has a core of its own, as the threads of
# pushgate's bench have: two ends that poll must not share a core. The figures go to /run/out/figures.txt.

# client PROGRAM OPTION...: one try of perftest's client. One that hangs is ended, and there is no other try; it takes seconds
# else. `tried` is how it ended.
client() {
    tried=0
    timeout 60 taskset -c 0 "$@" $THEIRS "$ADDRESS" >/run/out/client.txt 2>&1 || tried=$?
    # 124 or 143: it was ended.
    [ $tried = 0 ] || [ $tried = 124 ] || [ $tried = 143 ]
}

# both PROGRAM OPTION...: one try of perftest's server and client.
both() {
    taskset -c 1 "$@" $THEIRS >/run/out/server.txt 2>&1 &
    server=$!
    case $THEIRS in
    # A listener of rdma_cm shows nowhere over RoCE, and over iWARP before it answers: until then a client is refused.
    *-R*) within 60 "$1: no client was served" client "$@" ;;
    *) listening 18515 && client "$@" ;;
    esac && [ $tried = 0 ] && wait $server && return
    kill $server 2>/dev/null
    wait $server
    return 1
}

# theirs NAME PROGRAM OPTION...: perftest's own figures, in MiB/s and in ticks of the processor's clock; the clock rate with
# which perftest makes microseconds is estimated again each time. With rdma_cm its two ends wait for each other for ever now and
# then: they are started anew.
theirs() {
    what=$1
    shift
    both "$@" || both "$@" || both "$@" || { cat /run/out/server.txt /run/out/client.txt; exit 1; }
    awk -v what="$what" '$1 + 0 > 0 && NF >= 5 {
        print what, what ~ /_bw$/ ? $4 * 1.048576 : $5
    }' /run/out/client.txt >>/run/out/figures.txt
}

# ours NAME OPTION...
ours() {
    what=$1
    shift
    "$BIN_PUSHGATE" bench rdma $OURS --runs 1 "$@" >/run/out/ours.txt
    cat /run/out/ours.txt
    awk -v what="$what" '{ print what, $5 } /clock/ { print "clock", $(NF - 1) }' \
        /run/out/ours.txt >>/run/out/figures.txt
}

# table: prints the medians of five runs, then the best, of the rows that stdin names: title, our name, perftest's name, whether
# it is a latency in ticks (or a bandwidth, or a latency in our own unit), the aim; separated by `|`.
table() {
    awk -F '|' '
    NR == FNR { split($0, word, " "); values[word[1], ++n[word[1]]] = word[2]; next }
    function median(what,    i, j, swap, count) {
        count = n[what]
        if (count < 5) { print "only " count + 0 " figures of " what; failed = 1; return 1 }
        for (i = 1; i < count; i++)
            for (j = i + 1; j <= count; j++)
                if (values[what, j] < values[what, i]) {
                    swap = values[what, i]; values[what, i] = values[what, j]; values[what, j] = swap
                }
        return values[what, int((count + 1) / 2)]
    }
    # `median` has sorted the values.
    function best(what, most) { return values[what, most ? n[what] : 1] }
    !headed++ {
        mhz = median("clock")
        printf "%-40s %8s %8s %6s   %8s %8s %6s   aim\n", "5 runs: median, then best",
            "ours", "perftest", "ratio", "ours", "perftest", "ratio"
    }
    NF < 5 { print; next }
    {
        most = $4 == "bandwidth"; unit = $4 == "ticks" ? mhz : 1
        m = median($2); t = median($3) / unit
        printf "%-40s %8.2f %8.2f %6.3f   ", $1, m, t, m / t
        m = best($2, most); t = best($3, most) / unit
        printf "%8.2f %8.2f %6.3f   %s\n", m, t, m / t, $5
    }
    END { exit failed }' /run/out/figures.txt -
}
