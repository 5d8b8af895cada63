# Software iWARP between two machines. One link has one RDMA device at a time: of two, rdma_cm takes the one that
# was made first.
without rxen0
siw siwn0 n0
rdma link show siwn0/1 | grep 'state ACTIVE'
if [ "$VM_GUEST" = 1 ]; then
    rping -s -a "$VM_GUEST_IP" -C 20 -v >/run/out/rping.txt 2>&1 &
    server=$!
    listening 7174
    together rping
    wait "$server"
    ib_write_bw -d siwn0 -R -F -s 65536 -n 100 >/run/out/server.txt 2>&1 &
    server=$!
    listening 18515
    together write
    wait "$server"
else
    together rping
    rping -c -a "$VM_PEER_IP" -C 20 -v
    together write
    ib_write_bw -d siwn0 -R -F -s 65536 -n 100 "$VM_PEER_IP"
fi
together done
without siwn0
rxe rxen0 n0
