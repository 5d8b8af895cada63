# Has this namespace's kernel start programs for 64-bit ARM by QEMU ($1), then runs the rest of the arguments. Since Linux
# 6.7 a user namespace has a table of its own: the host's stays as it is.
set -eu
table=/proc/sys/fs/binfmt_misc
mount -t binfmt_misc none "$table"
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
# F: the program is opened now, by its path here.
printf '%s' ":pushgate-aarch64:M::$magic:$mask:$1:F" >"$table/register"
shift
exec "$@"
