# These take about as long as pushgate's runs: a program that polls for longer on a busy host loses its cores
# for a while.
OURS="--ib-dev rxe0 --gid-index 1"
THEIRS="-d rxe0 -x 1 -m 4096 -F"
ADDRESS=10.9.0.1
for turn in 1 2 3 4 5; do
    theirs ib_write_bw ib_write_bw -s 65536 -n 600 -t 16
    ours bw bw --size 64K --depth 16 --seconds 0.6
    theirs ib_send_lat ib_send_lat -s 64 -n 5000 -C
    ours lat lat --size 64 --seconds 0.15
    theirs ib_write_lat ib_write_lat -s 64 -n 5000 -C
    ours lat-no-imm lat --size 64 --no-imm --seconds 0.15
    # As many bytes as pushgate sends for 64: record and counts are in the same packet.
    theirs ib_send_lat_168 ib_send_lat -s 168 -n 5000 -C
    theirs ib_write_lat_168 ib_write_lat -s 168 -n 5000 -C
    # Records that follow their payload at once, and records that wait for its completion.
    for order in assume wait; do
        ours bw-$order bw --size 64K --depth 16 --no-imm --write-order $order --seconds 0.6
        ours lat-$order lat --size 4K --no-imm --write-order $order --seconds 0.15
    done
done
table <<'ROWS'
64 KiB, MB/s: ib_write_bw|bw|ib_write_bw|bandwidth|>= 0.95
64 B, us one way: ib_send_lat|lat|ib_send_lat|ticks|<= 1.5
64 B, no imm: ib_write_lat|lat-no-imm|ib_write_lat|ticks|<= 1.2
64 B beside ib_send_lat of 168|lat|ib_send_lat_168|ticks|
64 B, no imm, ib_write_lat of 168|lat-no-imm|ib_write_lat_168|ticks|
no imm: write-order wait beside assume (not perftest)
64 KiB, MB/s|bw-wait|bw-assume|bandwidth|
4 KiB, us one way|lat-wait|lat-assume|own|
ROWS
