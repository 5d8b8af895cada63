//! The suites that run in the virtual machine.

/// One suite of the table.
pub struct Suite {
    /// What `--suite` calls it. Lower case and dashes.
    pub name: &'static str,
    /// How many machines it runs in: 1 or 2.
    pub guests: u8,
    /// Seconds that its script may take in the guest.
    pub limit: u64,
    /// Whether the step `vm` of `cargo xtask test` runs it.
    pub default: bool,
    /// What it shows, for `--list`.
    pub about: &'static str,
    /// What must be built on the host first: calls of cargo, `build` or `test`, to which `--release`
    /// (and `--no-run`) is added.
    pub build: &'static [&'static [&'static str]],
    /// Run in the guest as root by `/bin/sh -eu`, in the repository's root, which is read-only. With
    /// two guests it runs in both. Results go to /run/out. It finds
    ///
    /// * the functions of lib.sh;
    /// * `BIN_DIR`, cargo's release folder;
    /// * a variable for each program built: `BIN_x`, `EXAMPLE_x` and `TEST_x` (an integration test,
    ///   or the unit tests of crate x), in capitals with underscores for dashes;
    /// * `VM_GUEST`, 1 or 2, and with two guests `VM_GUEST_IP`, `VM_PEER_IP`. (The names that begin
    ///   with PUSHGATE are settings, and the library refuses those that it does not know.)
    pub script: &'static str,
}

/// All suites, in the order in which they run.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "rdma-smoke",
        guests: 1,
        limit: 60,
        default: true,
        about: "a soft-RoCE device is active and carries writes between two processes",
        build: &[],
        script: r#"
rdma link show rxe0/1 | grep 'state ACTIVE'
ibv_devinfo -d rxe0 | tee /run/out/devinfo.txt
grep -q 'active_mtu:.*4096' /run/out/devinfo.txt
ls /dev/infiniband/rdma_cm /dev/infiniband/uverbs0
ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 -F >/run/out/server.txt 2>&1 &
listening 18515
ib_write_bw -d rxe0 -x 1 -s 65536 -n 200 -F 10.9.0.1
wait $!
"#,
    },
    Suite {
        name: "rdma-smoke-pair",
        guests: 2,
        limit: 90,
        default: false,
        about: "the same between two machines, by sends over UDP",
        build: &[],
        script: r#"
rdma link show rxen0/1 | grep 'state ACTIVE'
if [ "$VM_GUEST" = 1 ]; then
    ib_send_bw -d rxen0 -x 1 -s 65536 -n 200 -F &
    listening 18515
    together server
    wait $!
else
    together server
    ib_send_bw -d rxen0 -x 1 -s 65536 -n 200 -F "$VM_PEER_IP" >/run/out/client.txt 2>&1
fi
"#,
    },
    Suite {
        name: "verbs-bench",
        guests: 1,
        limit: 400,
        default: false,
        about: "the verbs queue pair beside perftest, in turns: bandwidth and latency",
        build: &[&["build", "-p", "pushgate", "--bin", "pushgate"]],
        script: r#"
# Each end has a core of its own, as the threads of ours have: two that poll must not share one.
# perftest's own figures, in MiB/s and in ticks of the processor's clock: what it makes microseconds
# with, it guesses anew each time.
theirs() {
    what=$1
    shift
    taskset -c 1 "$@" >/run/out/server.txt 2>&1 &
    listening 18515
    taskset -c 0 "$@" 10.9.0.1 >/run/out/client.txt 2>&1 || { cat /run/out/client.txt; exit 1; }
    wait $!
    awk -v what="$what" '$1 + 0 > 0 && NF >= 5 {
        print what, what == "ib_write_bw" ? $4 * 1.048576 : $5
    }' /run/out/client.txt >>/run/out/figures.txt
}
ours() {
    what=$1
    shift
    "$BIN_PUSHGATE" bench rdma --ib-dev rxe0 --gid-index 1 --runs 1 "$@" >/run/out/ours.txt
    cat /run/out/ours.txt
    awk -v what="$what" '{ print what, $5 } /clock/ { print "clock", $(NF - 1) }' \
        /run/out/ours.txt >>/run/out/figures.txt
}
# About as long as ours: who polls for longer on a busy host loses its cores for a while.
options="-d rxe0 -x 1 -m 4096 -F"
for turn in 1 2 3 4 5; do
    theirs ib_write_bw ib_write_bw $options -s 65536 -n 600 -t 16
    ours bw bw --size 64K --depth 16 --seconds 0.6
    theirs ib_send_lat ib_send_lat $options -s 64 -n 5000 -C
    ours lat lat --size 64 --seconds 0.15
    theirs ib_write_lat ib_write_lat $options -s 64 -n 5000 -C
    ours lat-no-imm lat --size 64 --no-imm --seconds 0.15
    # As many bytes as ours sends for 64: record and counts are in the same packet.
    theirs ib_send_lat_168 ib_send_lat $options -s 168 -n 5000 -C
    theirs ib_write_lat_168 ib_write_lat $options -s 168 -n 5000 -C
done
awk '
    { values[$1, ++n[$1]] = $2 }
    function median(what,    i, j, swap, count) {
        count = n[what]
        if (count < 5) { print "only " count + 0 " figures of " what; failed = 1; return 1 }
        for (i = 1; i < count; i++)
            for (j = i + 1; j <= count; j++)
                if (values[what, j] < values[what, i]) {
                    swap = values[what, i]; values[what, i] = values[what, j]; values[what, j] = swap
                }
        return values[what, int((count + 1) / 2)]
    }
    # `median` has sorted them.
    function best(what, most) { return values[what, most ? n[what] : 1] }
    function row(title, mine, their, unit, most, aim,    m, t) {
        m = median(mine); t = median(their) / unit
        printf "%-40s %8.2f %8.2f %6.3f   ", title, m, t, m / t
        m = best(mine, most); t = best(their, most) / unit
        printf "%8.2f %8.2f %6.3f   %s\n", m, t, m / t, aim
    }
    END {
        mhz = median("clock")
        printf "%-40s %8s %8s %6s   %8s %8s %6s   aim\n", "5 runs: median, then best",
            "ours", "perftest", "ratio", "ours", "perftest", "ratio"
        row("64 KiB, MB/s: ib_write_bw", "bw", "ib_write_bw", 1, 1, ">= 0.95")
        row("64 B, us one way: ib_send_lat", "lat", "ib_send_lat", mhz, 0, "<= 1.5")
        row("64 B, no imm: ib_write_lat", "lat-no-imm", "ib_write_lat", mhz, 0, "<= 1.2")
        row("64 B beside ib_send_lat of 168", "lat", "ib_send_lat_168", mhz, 0, "")
        row("64 B, no imm, ib_write_lat of 168", "lat-no-imm", "ib_write_lat_168", mhz, 0, "")
        exit failed
    }' /run/out/figures.txt
"#,
    },
];

/// The names of all suites.
pub fn names() -> impl Iterator<Item = &'static str> {
    SUITES.iter().map(|suite| suite.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::STEPS;

    #[test]
    fn names_are_unique_and_plain() {
        let mut sorted: Vec<_> = names().collect();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), SUITES.len());
        // They become names of files and stand in scripts.
        assert!(sorted.iter().all(|n| n.chars().all(|c| c.is_ascii_lowercase() || c == '-')));
    }

    #[test]
    fn every_suite_can_run() {
        for suite in SUITES {
            assert!((1..=2).contains(&suite.guests), "{}", suite.name);
            assert!(!suite.default || suite.guests == 1, "{}: the step boots one machine", suite.name);
            let is_known = |call: &&[&str]| matches!(call[0], "build" | "test");
            assert!(suite.build.iter().all(is_known), "{}", suite.name);
        }
    }

    #[test]
    fn limits_fit_into_the_step() {
        let budget = STEPS.iter().find(|step| step.name == "vm").unwrap().budget;
        let limits = SUITES.iter().filter(|suite| suite.default).map(|suite| suite.limit);
        assert!(limits.clone().all(|limit| limit < budget));
        // It is killed at twice its budget.
        assert!(limits.sum::<u64>() + super::super::guest::BOOT.as_secs() < 2 * budget);
    }
}
