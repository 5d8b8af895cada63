# Four hosts, each a network namespace, behind one switch: 50 us, 1 % loss and 1 Gbit/s out of each.
ip link add switch0 type bridge
ip link set switch0 up

for host in 1 2 3 4; do
    ip netns add "host$host"
    ip link add "port$host" type veth peer name eth0 netns "host$host"
    ip link set "port$host" master switch0 up
    ip -n "host$host" link set lo up
    ip -n "host$host" address add "10.7.0.$host/24" dev eth0
    ip -n "host$host" link set eth0 up
    ip netns exec "host$host" tc qdisc add dev eth0 root netem delay 50us loss 1% rate 1gbit
done

# Two hosts of two GPUs (whose four ranks are hosts here), and four hosts of one: everything arrives, and every byte is right.
for ring in 2x2x8x256Kx2 4x1x2x256Kx2; do
    run 300 "$BIN_PUSHGATE" bench nccl-trace --ring "$ring" --plugin "$BIN_DIR/deps/libnccl_net_pushgate.so" --qp tcp --runs 1 \
        --check-all --json --timeout 120s \
        --within 'ip netns exec host1 env PUSHGATE_HOST=10.7.0.1' --within 'ip netns exec host2 env PUSHGATE_HOST=10.7.0.2' \
        --within 'ip netns exec host3 env PUSHGATE_HOST=10.7.0.3' --within 'ip netns exec host4 env PUSHGATE_HOST=10.7.0.4'
    [ "$code" = 0 ] || fail "exit code $code"
    # The bare sockets, and the plugin.
    [ "$(grep -c '"received":' /tmp/out)" = 2 ] || fail "not two ways"
    sed -E 's/.*"best_ms":([0-9.]*).*"way":"([a-z]*)".*/'"$ring"' \2: \1 ms/' /tmp/out
    # The network was what it is said to be: the cables lost packets. One cable alone may lose none of some 300.
    for host in 1 2 3 4; do ip netns exec "host$host" tc -s qdisc show dev eth0; done | grep -E 'dropped [1-9]' ||
        fail "no packet was lost"
done
for host in 1 2 3 4; do ip netns delete "host$host"; done
ip link delete switch0
