chaos_of_two rdma 30 --qp verbs --ib-dev rxen0 --ack-timeout 20 --seed 336
chaos_of_two tcp 12 --qp tcp --seed 158

# Hosts that were given different seeds would check other contents than are sent.
together seeds
run 120 "$BIN_PUSHGATE" chaos --device cpu --qp tcp --rank "$((VM_GUEST - 1))" --rendezvous 10.9.9.1:7000 --seed "$VM_GUEST" --seconds 1
[ "$code" = 1 ] || fail "exit code $code"
says 'give all hosts the same'
