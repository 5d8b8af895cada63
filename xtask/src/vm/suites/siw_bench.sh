# Queue pairs that rdma_cm connects, beside perftest with -R: over software iWARP, then over soft-RoCE. Both ends poll.
dummy s0 10.9.8.1/24
siw siw0 s0

# rounds NAME COUNT: five turns; COUNT is that of perftest's messages.
rounds() {
    for turn in 1 2 3 4 5; do
        theirs "$1_ib_write_bw" ib_write_bw -s 65536 -n "$2" -t 16
        ours "$1-bw" bw --size 64K --depth 16 --seconds 0.6
        theirs "$1_ib_write_lat" ib_write_lat -s 64 -n "$2" -C
        ours "$1-lat" lat --size 64 --no-imm --seconds 0.3
        # As many bytes as pushgate sends for 64: record and counts are in the same packet.
        theirs "$1_ib_write_lat_168" ib_write_lat -s 168 -n "$2" -C
    done
}
OURS="--ib-dev siw0"
THEIRS="-d siw0 -R -F"
ADDRESS=10.9.8.1
rounds siw 500
OURS="--ib-dev rxe0 --rdma-cm on"
THEIRS="-d rxe0 -x 1 -m 4096 -R -F"
ADDRESS=10.9.0.1
rounds rxe 1500
table <<'ROWS'
siw, 64 KiB, MB/s: ib_write_bw -R|siw-bw|siw_ib_write_bw|bandwidth|>= 0.9
siw, 64 B, us: ib_write_lat -R|siw-lat|siw_ib_write_lat|ticks|<= 1.3
siw, 64 B, us: ib_write_lat -R of 168|siw-lat|siw_ib_write_lat_168|ticks|
rxe, 64 KiB, MB/s: ib_write_bw -R|rxe-bw|rxe_ib_write_bw|bandwidth|>= 0.9
rxe, 64 B, us: ib_write_lat -R|rxe-lat|rxe_ib_write_lat|ticks|<= 1.3
rxe, 64 B, us: ib_write_lat -R of 168|rxe-lat|rxe_ib_write_lat_168|ticks|
ROWS
without siw0 s0
