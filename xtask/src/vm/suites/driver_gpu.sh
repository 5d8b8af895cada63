# A GPU of the host stores into a BAR of this guest; proxy and peer are two ranks over soft-RoCE.
load
for size in 64 4096 16384 65536; do
    echo "-- $size bytes"
    outside 256 "$size" 16 1
    [ "$interrupts" -ge 8 ] || fail "$interrupts interrupts woke the proxy in 16 bursts"
done
echo '-- 4 MiB in messages of 16384 bytes, one kernel'
outside 256 16384 1 1
dmesg_is_clean
