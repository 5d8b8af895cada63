# SPDX-License-Identifier: MIT OR Apache-2.0
# What the tests of packages share. They run as root in a small Debian without Rust, in which /given has the packages, the
# examples and the program nccl-caller.

# Every file and folder outside of what package managers keep for themselves.
state() {
    find / -xdev \( -path /proc -o -path /dev -o -path /given -o -path /tmp -o -path /run -o -path /root/.cache -o -path /root/.rpmdb \
        -o -path /var/lib/dpkg -o -path /var/lib/rpm -o -path /var/lib/apt -o -path /var/cache -o -path /var/log \
        -o -path /etc/ld.so.cache -o -path '/etc/*-' -o -path /etc/.pwd.lock \) -prune \
        -o -printf '%y %m %u %g %p %l\n' | sort
    # Groups and users that stay would be lines here.
    cat /etc/group /etc/passwd
}

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# Uses what is installed below a prefix: use PREFIX LIBDIR
use() {
    if command -v cargo rustc; then
        fail "there is a Rust compiler here"
    fi
    "$1/bin/pushgate" --version
    # The program's own CPU executor, with what it carries.
    PUSHGATE_DEVICE=cpu timeout 120 "$1/bin/pushgate" bench push --runs 1 --seconds 0.05 --bytes 4K >/tmp/bench 2>&1 ||
        fail "pushgate bench push: $(cat /tmp/bench)"
    for page in man1/pushgate.1 man3/pushgate_context_create.3 man4/pushgate.4; do
        MANWIDTH=80 man -l "$1/share/man/$page.gz" >/tmp/page 2>/tmp/warnings || fail "no page $page: $(cat /tmp/warnings)"
        [ -s /tmp/page ] && [ ! -s /tmp/warnings ] || fail "the page $page has warnings: $(cat /tmp/warnings)"
    done
    bash -n "$1/share/bash-completion/completions/pushgate"
    # A program in C, by pkg-config alone.
    PKG_CONFIG_PATH=$2/pkgconfig
    export PKG_CONFIG_PATH
    rm -rf /tmp/put && mkdir /tmp/put
    # shellcheck disable=SC2046
    cc -std=c99 -Wall -Wextra -Werror "$1/share/doc/pushgate/examples/c/put.c" $(pkg-config --cflags --libs pushgate) -o /tmp/put/put
    LD_LIBRARY_PATH=$2 PUSHGATE_DEVICE=cpu timeout 120 /tmp/put/put "$1/share/doc/pushgate/examples/c/put.cu" | sort >/tmp/put/said
    printf 'rank 0: all 65536 bytes of rank 1 are right\nrank 1: all 65536 bytes of rank 0 are right\n' |
        diff - /tmp/put/said || fail "put"
    # Device headers for kernels of the program's own.
    echo '#include <pushgate/device.cuh>' >/tmp/put/device.cc
    # shellcheck disable=SC2046
    g++ -std=c++17 -Wall -Werror -Wno-unknown-pragmas -c $(pkg-config --cflags pushgate) /tmp/put/device.cc -o /tmp/put/device.o
    plugin "$2/libnccl-net-pushgate.so"
}

# Drives an NCCL plugin as NCCL does.
plugin() {
    PUSHGATE_QP=local timeout 300 /given/nccl-caller traffic --groups 40 --max 100000 --plugin "$1" >/tmp/caller 2>&1 ||
        fail "nccl-caller: $(cat /tmp/caller)"
}

# Compares the state with that before: clean BEFORE
clean() {
    rm -rf /tmp/put /tmp/bench /tmp/page /tmp/warnings /tmp/caller
    state >/tmp/after
    diff "$1" /tmp/after || fail "something is left behind"
}
