# Queue pairs over software iWARP, which rdma_cm connects: the demonstration. The device has no counters of receivers that
# were not ready, for iWARP answers nobody so.
dummy s0 10.9.8.1/24
siw siw0 s0

for ranks in 2 4; do
    run 120 "$EXAMPLE_ALLREDUCE" --json --out-of-place --device cpu --qp verbs --ib-dev siw0 --ranks "$ranks" --size 4M --iters 1
    [ "$code" = 0 ] || fail "exit code $code"
    last=$(tail -n 1 /tmp/out)
    for word in '"verified":true,' '"dropped":0,' '"qp":"verbs",'; do
        case $last in *"$word"*) ;; *) fail "its last line has no $word" ;; esac
    done
done

without siw0 s0
