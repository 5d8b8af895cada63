# Measures the verbs queue pair beside perftest, in turn. Each end has a core of its own, as the threads of
# pushgate's bench have: two ends that poll must not share a core. theirs: perftest's own figures, in MiB/s
# and in ticks of the processor's clock; the clock rate with which perftest makes microseconds is estimated
# again each time.
theirs() {
    what=$1
    shift
    taskset -c 1 "$@" >/run/out/server.txt 2>&1 &
    listening 18515
    taskset -c 0 "$@" 10.9.0.1 >/run/out/client.txt 2>&1 || { cat /run/out/client.txt; exit 1; }
    wait $!
    awk -v what="$what" '$1 + 0 > 0 && NF >= 5 {
        print what, what == "ib_write_bw" ? $4 * 1.048576 : $5
    }' /run/out/client.txt >>/run/out/figures.txt
}
ours() {
    what=$1
    shift
    "$BIN_PUSHGATE" bench rdma --ib-dev rxe0 --gid-index 1 --runs 1 "$@" >/run/out/ours.txt
    cat /run/out/ours.txt
    awk -v what="$what" '{ print what, $5 } /clock/ { print "clock", $(NF - 1) }' \
        /run/out/ours.txt >>/run/out/figures.txt
}
# These take about as long as pushgate's runs: a program that polls for longer on a busy host loses its cores
# for a while.
options="-d rxe0 -x 1 -m 4096 -F"
for turn in 1 2 3 4 5; do
    theirs ib_write_bw ib_write_bw $options -s 65536 -n 600 -t 16
    ours bw bw --size 64K --depth 16 --seconds 0.6
    theirs ib_send_lat ib_send_lat $options -s 64 -n 5000 -C
    ours lat lat --size 64 --seconds 0.15
    theirs ib_write_lat ib_write_lat $options -s 64 -n 5000 -C
    ours lat-no-imm lat --size 64 --no-imm --seconds 0.15
    # As many bytes as pushgate sends for 64: record and counts are in the same packet.
    theirs ib_send_lat_168 ib_send_lat $options -s 168 -n 5000 -C
    theirs ib_write_lat_168 ib_write_lat $options -s 168 -n 5000 -C
    # Records that follow their payload at once, and records that wait for its completion.
    for order in assume wait; do
        ours bw-$order bw --size 64K --depth 16 --no-imm --write-order $order --seconds 0.6
        ours lat-$order lat --size 4K --no-imm --write-order $order --seconds 0.15
    done
done
awk '
    { values[$1, ++n[$1]] = $2 }
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
    function row(title, mine, their, unit, most, aim,    m, t) {
        m = median(mine); t = median(their) / unit
        printf "%-40s %8.2f %8.2f %6.3f   ", title, m, t, m / t
        m = best(mine, most); t = best(their, most) / unit
        printf "%8.2f %8.2f %6.3f   %s\n", m, t, m / t, aim
    }
    END {
        mhz = median("clock")
        printf "%-40s %8s %8s %6s   %8s %8s %6s   aim\n", "5 runs: median, then best",
            "ours", "perftest", "ratio", "ours", "perftest", "ratio"
        row("64 KiB, MB/s: ib_write_bw", "bw", "ib_write_bw", 1, 1, ">= 0.95")
        row("64 B, us one way: ib_send_lat", "lat", "ib_send_lat", mhz, 0, "<= 1.5")
        row("64 B, no imm: ib_write_lat", "lat-no-imm", "ib_write_lat", mhz, 0, "<= 1.2")
        row("64 B beside ib_send_lat of 168", "lat", "ib_send_lat_168", mhz, 0, "")
        row("64 B, no imm, ib_write_lat of 168", "lat-no-imm", "ib_write_lat_168", mhz, 0, "")
        print "no imm: write-order wait beside assume (not perftest)"
        row("64 KiB, MB/s", "bw-wait", "bw-assume", 1, 1, "")
        row("4 KiB, us one way", "lat-wait", "lat-assume", 1, 0, "")
        exit failed
    }' /run/out/figures.txt
