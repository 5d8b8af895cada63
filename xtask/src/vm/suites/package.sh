# Installs the Debian package in a disposable copy of this system: the root is read-only, so what dpkg and
# dkms write goes to a layer in memory, which is examined afterwards.
. /run/vm/settings
release=$(uname -r)
root=/run/root layers=/run/layers

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

says() {
    grep -qF -e "$1" /tmp/said || fail "it does not say: $1"
}

# layer NAME LOWER WHERE: mounts LOWER with a layer of its own on top.
layer() {
    mkdir -p "$layers/$1/upper" "$layers/$1/work"
    mount -t overlay -o "lowerdir=$2,upperdir=$layers/$1/upper,workdir=$layers/$1/work" overlay "$3" ||
        fail "no layer over $2"
}

modprobe overlay
mkdir -p "$layers" "$root"
mount -t tmpfs -o size=1500m tmpfs "$layers"
layer root / "$root"
# A system that has the guest's kernel and its headers installed.
layer usr "$HEADERS_DIR/usr:/usr" "$root/usr"
mkdir -p "$root/usr/lib/modules"
layer modules "$KERNEL_DIR/lib/modules:$HEADERS_DIR/lib/modules" "$root/usr/lib/modules"
# dkms is a bash script that uses process substitution.
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
for folder in proc sys dev; do mount --rbind "/$folder" "$root/$folder"; done
for folder in run tmp; do mount -t tmpfs tmpfs "$root/$folder"; done
cp "$PACKAGE" "$KMOD_DIR/pushgate.ko" "$TEST_DRIVER" "$root/tmp"
package=/tmp/${PACKAGE##*/}

# udev's tools do nothing in a chroot, unless told that they are not in one.
inside() {
    env -u MODPROBE_OPTIONS SYSTEMD_IGNORE_CHROOT=1 DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"
}

# step WORD...: prints and runs the words, and keeps the output for `says`.
step() {
    echo "-- $*"
    code=0
    "$@" >/tmp/said 2>&1 || code=$?
    cat /tmp/said
    [ "$code" = 0 ] || fail "exit code $code"
}

# compare LAYER LOWER...: lists what the layer holds beyond what was there before.
compare() {
    layer=$1
    shift
    (cd "$layers/$layer/upper" && find . ! -type d) | while read -r file; do
        file=${file#./} kind=new
        # An overlay's mark for a file that was removed.
        [ ! -c "$layers/$layer/upper/$file" ] || kind=gone
        for lower in "$@"; do
            if [ "$kind" = new ] && { [ -e "$lower/$file" ] || [ -h "$lower/$file" ]; }; then
                kind=changed
                ! cmp -s "$lower/$file" "$layers/$layer/upper/$file" || kind=
            fi
        done
        [ -z "$kind" ] || echo "$kind: $layer $file"
    done
}

left() {
    compare root /
    compare usr "$HEADERS_DIR/usr" /usr
    compare modules "$KERNEL_DIR/lib/modules" "$HEADERS_DIR/lib/modules"
}

inside /lib/systemd/systemd-udevd --daemon

# Without headers everything else is installed, and the output says what is missing.
headers=$root/usr/src/linux-headers-$release
mount -t tmpfs tmpfs "$headers"
step inside dpkg --install "$package"
says "kernel headers for this kernel do not seem to be installed"
says "linux-headers-$release installed, this builds it: dkms autoinstall -k $release"
inside pushgate --help | grep -q 'Usage: pushgate' || fail "pushgate --help"
! inside modinfo pushgate 2>/dev/null || fail "a module without headers?"
# Removed while the module is in use: the module stays loaded, and the output says so.
insmod "$root/tmp/pushgate.ko"
exec 9<>/dev/pushgate
step inside dpkg --remove pushgate
says "the module stays loaded, for it is in use; once it is not, this removes it: rmmod pushgate"
[ -d /sys/module/pushgate ] || fail "the module was removed under an open file"
# Purged after that: the group stays too, because a new group with its number would get the devices.
step inside dpkg --purge pushgate
says "this removes both: rmmod pushgate && delgroup pushgate"
inside getent group pushgate || fail "the group is gone, and the devices belong to its number"
exec 9>&-
rmmod pushgate
inside delgroup --quiet pushgate
umount "$headers"

# With headers, dkms builds the module.
step inside dpkg --install "$package"
inside dkms status pushgate | tee /tmp/said
says "$release, x86_64: installed"
inside modprobe pushgate
[ "$(inside modinfo -n pushgate)" = "/lib/modules/$release/updates/dkms/pushgate.ko" ] || fail "modprobe takes another"
for slot in 10 11 12 13; do
    echo pushgate >"/sys/bus/pci/devices/0000:00:$slot.0/driver_override"
    echo "0000:00:$slot.0" >/sys/bus/pci/drivers_probe
done
inside udevadm settle
for node in /dev/pushgate /dev/pushgate0 /dev/pushgate3; do
    who=$(inside stat -c '%U:%G %a' "$node")
    [ "$who" = "root:pushgate 660" ] || fail "$node is $who"
done
group=$(inside getent group pushgate | cut -d: -f3)
# opens GROUP: whether a user who is also in that group may open the devices.
opens() {
    inside setpriv --reuid 4711 --regid 4711 --groups "$1" sh -c ': <>/dev/pushgate && : <>/dev/pushgate0' 2>/tmp/said
}
opens "$group" || fail "a member of the group may not open them: $(cat /tmp/said)"
! opens 4711 || fail "a user who is not in the group may open them"
says "Permission denied"
# The module that dkms built works like the repository's.
KMOD_DIR=/tmp inside "/tmp/${TEST_DRIVER##*/}" --exact calls::a_device_says_what_it_offers --ignored --nocapture |
    tee /tmp/said
says "test result: ok. 1 passed"
# The manual as a reader sees it: sections, a table, names with underscores.
MANWIDTH=100 inside man 4 pushgate >/tmp/said
for words in PUSHGATE_IOC_SLICE_ALLOC staging_user_bytes ENOSPC "pages that outlive a process"; do says "$words"; done
MANWIDTH=100 inside man 1 pushgate >/tmp/said
for words in "pushgate-bench" "Exit status"; do says "$words"; done
MANWIDTH=100 inside man 1 pushgate-bench-push >/tmp/said
says "--window-size"
inside bash -n /usr/share/bash-completion/completions/pushgate || fail "the completions are no bash"
inside test -r /usr/include/pushgate/device.cuh
echo '#include <uapi/pushgate.h>' | inside gcc -fsyntax-only -x c -
printf '#include <pushgate/device.cuh>\n' | inside g++ -std=c++17 -fsyntax-only -x c++ -
# A program in C, with nothing but what the package has.
inside pkg-config --modversion pushgate >/tmp/said || fail "pkg-config does not know it"
printf '#include <pushgate/pushgate.h>\nint main(void) { return pushgate_interface() != PUSHGATE_INTERFACE; }\n' >"$root/tmp/in-c.c"
inside sh -c 'gcc -std=c99 /tmp/in-c.c $(pkg-config --cflags --libs pushgate) -o /tmp/in-c && /tmp/in-c' || fail "a program in C"
readelf -d "$root/tmp/in-c" | tee /tmp/said | grep NEEDED
says "libpushgate.so.0.2"
MANWIDTH=100 inside man 3 pushgate_kernel_launch >/tmp/said
for words in "#include <pushgate/pushgate.h>" "struct pushgate_kernel **running" "RETURN VALUE"; do says "$words"; done

step inside dpkg --remove pushgate
[ ! -d /sys/module/pushgate ] || fail "the module is still loaded although it is not in use"
[ ! -e /dev/pushgate ] || fail "there is still a device"
step inside dpkg --purge pushgate
! inside getent group pushgate || fail "the group is still there"
! inside dpkg-query --show pushgate 2>/dev/null || fail "dpkg still knows the package"

# Without what other programs keep: dpkg's records, man's index, the key with which dkms signs modules, the
# list of groups from before the last change, the database that rpm opens for dkms where rpm is installed, and the loader's
# cache of libraries.
left | sort | tee /run/out/left.txt | grep -vE \
    -e '^(new|changed): root var/(lib/dpkg/|log/dpkg\.log$|cache/man/)' \
    -e '^new: root var/lib/dkms/mok\.(key|pub)$' \
    -e '^(new|changed): root etc/(group|gshadow)-$' \
    -e '^(new|changed): root root/\.rpmdb/' \
    -e '^(new|changed): root (etc/ld\.so\.cache|var/cache/ldconfig/aux-cache)$' >/tmp/said || true
cat /tmp/said
[ ! -s /tmp/said ] || fail "that is left behind"
