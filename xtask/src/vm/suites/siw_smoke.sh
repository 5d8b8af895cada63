# Software iWARP between two processes: rdma_cm connects, and writes and sends arrive.
dummy s0 10.9.8.1/24
siw siw0 s0
rdma link show siw0/1 | grep 'state ACTIVE'
ibv_devinfo -d siw0 | tee /run/out/devinfo.txt
grep -q 'transport:.*iWARP' /run/out/devinfo.txt

rping -s -a 10.9.8.1 -C 20 -v >/run/out/rping.txt 2>&1 &
server=$!
# Over iWARP a port of rdma_cm's is one of TCP's.
listening 7174
rping -c -a 10.9.8.1 -C 20 -v
wait "$server"
[ "$(grep -c 'server ping data' /run/out/rping.txt)" = 20 ]

# perftest_pair PROGRAM OPTION...: one process serves, the other asks for a connection by rdma_cm.
perftest_pair() {
    "$@" -d siw0 -R -F >"/run/out/$1.txt" 2>&1 &
    server=$!
    listening 18515
    "$@" -d siw0 -R -F 10.9.8.1
    wait "$server"
}
perftest_pair ib_write_bw -s 65536 -n 200
perftest_pair ib_send_lat -s 64 -n 200

without siw0 s0
