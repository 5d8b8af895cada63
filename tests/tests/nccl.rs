//! Tests the NCCL plugin under a caller in NCCL's manner, `nccl-caller`: one process for each
//! scenario, because each has settings of its own and may leave nothing behind.
//!
//! The plugin is the one that cargo built beside this test, or the file that `NCCL_CALLER_PLUGIN`
//! names. Transport and device are those of the environment.

#[path = "nccl/devices.rs"]
mod devices;
#[path = "nccl/recovering.rs"]
mod recovering;
#[path = "nccl/taken.rs"]
mod taken;
#[path = "nccl/transports.rs"]
mod transports;

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pushgate_tests::built::{nccl_caller, plugin};
use pushgate_tests::output;

const VERSIONS: [u32; 5] = [8, 9, 10, 11, 12];

/// Every version. Over RDMA in software, which is slow, the oldest and the newest: the others differ from them in nothing that
/// reaches the device.
fn versions() -> Vec<u32> {
    if over_rdma() { vec![VERSIONS[0], VERSIONS[4]] } else { VERSIONS.to_vec() }
}

/// A limit against a caller that hangs, not a measure of a machine's speed: a run takes seconds. A
/// caller that prints nothing ends before `cargo xtask test` ends the whole step for its silence
/// (10 minutes, stretched).
fn limit() -> Duration {
    3 * pushgate_tests::hang()
}

/// A number of repetitions: `n`, or `rdma` over RDMA in software, which takes 0.3 s for a
/// connection.
fn times(n: usize, rdma: usize) -> usize {
    if over_rdma() { rdma } else { n }
}

fn over_rdma() -> bool {
    std::env::var_os("PUSHGATE_QP").is_some_and(|qp| qp == "verbs")
}

fn command(arguments: &str) -> Command {
    let mut command = Command::new(nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
    command.args(arguments.split_whitespace()).arg("--plugin").arg(plugin());
    // A small window, so that there are messages beyond its size.
    command.env("PUSHGATE_NET_WINDOW_SIZE", "256K").stdin(Stdio::null());
    // A copier for the ranks of this command alone: tests that run side by side do not slow each other's copies.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let scope = format!("-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    command.env("_PUSHGATE_COPIER_SCOPE", scope);
    command
}

fn run_with(mut command: Command, variables: &[(&str, &str)]) -> String {
    command.envs(variables.iter().copied());
    let shown = format!("{command:?}");
    let output = output(&mut command, limit());
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}: {}\n{said}\n{errors}", output.status);
    print!("{said}");
    said.into_owned()
}

/// Settings that make the CPU executor play the GPU, and register memory as the GPU's.
const GPU: [(&str, &str); 2] = [("_PUSHGATE_NET_GPU", "cpu"), ("NCCL_CALLER_MEMORY", "cuda")];

/// What the caller prints, and what the plugin logs.
fn logged(mut command: Command) -> (String, String) {
    command.env("NCCL_CALLER_VERBOSE", "1");
    let shown = format!("{command:?}");
    let output = output(&mut command, limit());
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}: {}\n{said}\n{errors}", output.status);
    print!("{said}");
    (said.into_owned(), errors.into_owned())
}

/// Runs traffic of GPU memory with a plugin whose log must contain `says`; returns how many flushes
/// had to be waited for.
fn gpu_traffic(arguments: &str, variables: &[(&str, &str)], says: &str) -> u64 {
    let mut command = command(arguments);
    command.envs(GPU).envs(variables.iter().copied());
    let (said, log) = logged(command);
    assert!(log.contains(says), "{arguments}, {variables:?}: it does not say {says:?}: {log}");
    let flushes = said.trim_end().strip_suffix(" flushes").and_then(|s| s.rsplit(' ').next());
    flushes.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("how many flushes? {said}"))
}

fn run(arguments: &str) -> String {
    run_with(command(arguments), &[])
}

#[test]
fn p8_a_child_of_fork_is_refused_every_call_and_the_parents_connections_go_on() {
    for version in versions() {
        run(&format!("forked --version {version}"));
    }
    run_with(command("forked"), &GPU);
}

#[test]
fn p3_p4_p6_ranks_as_processes_get_every_byte_in_every_version() {
    let groups = times(200, 25);
    for version in versions() {
        run(&format!(
            "traffic --processes --version {version} --groups {groups} --in-flight 8 --seed {version}"
        ));
    }
}

#[test]
fn p3_p4_p6_ranks_as_threads_get_every_byte_in_every_version() {
    let groups = times(200, 25);
    for version in versions() {
        run(&format!("traffic --version {version} --groups {groups} --in-flight 32 --seed 3{version}"));
    }
}

#[test]
fn p3_p4_p6_what_is_not_registered_goes_through_the_window_in_slices_if_need_be() {
    run(&format!("traffic --unregistered --groups {} --in-flight 16 --seed 5", times(200, 25)));
}

#[test]
fn variables_for_nccl_are_set_where_a_gpu_copies_and_the_users_stay() {
    let told = |variables: &[(&str, &str)]| {
        let mut command = command("told");
        // Of the test's own environment.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NCCL_")) {
            command.env_remove(name);
        }
        run_with(command, variables)
    };
    let with = |more: &[(&'static str, &'static str)]| [&GPU[..], more].concat();
    const ANYWHERE: &str = "NCCL_MIN_NCHANNELS=8\nNCCL_NET_GDR_LEVEL=SYS\nNCCL_P2P_NET_CHUNKSIZE=524288\n";
    const ONE_HOST: &str = "NCCL_ALLOC_P2P_NET_LL_BUFFERS=1\n";
    let here = if over_rdma() { "" } else { ONE_HOST };
    assert_eq!(told(&GPU), format!("{here}{ANYWHERE}"));
    let own = with(&[("NCCL_MIN_NCHANNELS", "2"), ("NCCL_ALLOC_P2P_NET_LL_BUFFERS", "0")]);
    let kept =
        format!("{ONE_HOST}{ANYWHERE}").replace("CHANNELS=8", "CHANNELS=2").replace("BUFFERS=1", "BUFFERS=0");
    assert_eq!(told(&own), kept);
    assert_eq!(told(&with(&[("PUSHGATE_PATH", "bounce")])), "", "no GPU copies");
    // Over TCP they hold for host memory too, which NCCL's kernels push to.
    let tcp = format!("{ONE_HOST}{ANYWHERE}").replace("524288", "262144");
    for path in ["auto", "bounce", "push"] {
        let over_tcp = [("PUSHGATE_QP", "tcp"), ("PUSHGATE_HOST", "127.0.0.1"), ("PUSHGATE_PATH", path)];
        assert_eq!(told(&with(&over_tcp)), tcp, "path {path}");
    }
}

/// NCCL keeps its messages in host memory, where lines of its protocol LL128 may arrive by halves: the tuner must not take that.
#[test]
fn p3_the_path_of_a_gpu_without_gpudirect_rdma_is_bounce_and_no_other_one_is_taken() {
    let of_such_a_gpu = |path| {
        let mut command = command("told");
        command.env("_PUSHGATE_NET_GPU", "cpu-without-gpudirect-rdma").env("PUSHGATE_PATH", path);
        command.env("NCCL_CALLER_VERBOSE", "1");
        let output = output(&mut command, limit());
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let why = "the GPU has no GPUDirect RDMA by its driver, so NCCL keeps its messages in host memory";
    let (begins, log) = of_such_a_gpu("auto");
    assert!(begins && log.contains(&format!("path bounce: {why}")), "{log}");
    let (begins, log) = of_such_a_gpu("push");
    assert!(!begins && log.contains(&format!("expected auto or bounce: {why}")), "{log}");
}

/// The CPU executor plays the GPU: its worker pushes into windows and pulls out of them.
#[test]
fn p3_p4_p6_gpu_memory_is_pushed_and_pulled() {
    let (said, groups) = match over_rdma() {
        true => ("path push: the GPU pushes into the window, which the RDMA device sends; landing host", 15),
        false => ("path push: the GPU pushes into the window, and the receiver's pulls out of it", 150),
    };
    // Messages of at most half a window, and longer ones in slices.
    let all =
        [(8, "--max 120000"), (11, "--max 900000 --processes"), (11, "--max 900000"), (12, "--max 120000")];
    // Over RDMA a version's calls do the same, so fewer versions run there.
    for (version, how) in &all[..times(4, 2)] {
        let traffic = format!("traffic {how} --version {version} --groups {groups} --in-flight 8");
        let push = [("PUSHGATE_PATH", "push")];
        assert_eq!(gpu_traffic(&traffic, &push, said), 0, "the pull is the last there is to wait for");
    }
    if !over_rdma() {
        run_with(command("many --times 20"), &GPU);
        // Slices of half a MiB, several of them in the window at once.
        let mut long = command("traffic --processes --version 11 --groups 40 --in-flight 4 --max 9000000");
        long.env("PUSHGATE_NET_WINDOW_SIZE", "4M");
        run_with(long, &GPU);
        // Shares of the bound that are shorter than a slice: the first bytes of each window are used over and over.
        for how in ["--groups 40 --max 9000000", "--groups 150 --max 120000"] {
            let mut bound = command(&format!("traffic --processes --version 11 --in-flight 4 {how}"));
            bound.envs([("PUSHGATE_NET_WINDOW_SIZE", "4M"), ("PUSHGATE_NET_UNDER_WAY", "64K")]);
            run_with(bound, &GPU);
        }
    }
    // Sent from the host, received by a GPU's engine.
    let host = format!("traffic --processes --version 11 --groups {groups} --in-flight 8 --max 120000");
    run_with(command(&host), &GPU[..1]);
}

/// No RDMA device reads the GPU's memory over `local`.
#[test]
fn path_pull_is_refused_over_local() {
    let mut command = command("setting");
    command.envs(GPU).env("PUSHGATE_QP", "local");
    let said = run_with(command, &[("PUSHGATE_PATH", "pull")]);
    assert!(
        said.contains(
            "invalid path `pull` (from PUSHGATE_PATH): expected auto, push or bounce with qp = local"
        ),
        "{said}"
    );
}

/// GPU memory over RDMA, if the device can register it. The CPU executor's memory is the host's, so
/// any device can.
#[test]
#[ignore = "needs an RDMA device: cargo xtask vm --suite nccl-gpu"]
fn p3_p4_p6_gpu_memory_that_the_rdma_device_registers_is_written_and_read() {
    assert!(over_rdma(), "set PUSHGATE_QP=verbs: this test concerns RDMA alone");
    let push = [("PUSHGATE_PATH", "push"), ("PUSHGATE_LANDING", "gpu")];
    let pull = [("PUSHGATE_PATH", "pull")];
    let written = "landing gpu: it writes what arrives into the GPU's memory";
    for (variables, version, how, said) in [
        (&push[..], 8, "--max 120000", "path push: the GPU pushes"),
        (&push[..], 11, "--max 600000 --processes", written),
        (&pull[..], 12, "--max 600000", "path pull: the RDMA device reads the GPU's memory"),
        (&pull[..], 11, "--max 600000 --processes", written),
    ] {
        let traffic = format!("traffic {how} --version {version} --groups 15 --in-flight 8");
        assert!(gpu_traffic(&traffic, variables, said) > 5, "what the RDMA device wrote was not flushed");
    }
    // Each end does what its own GPU can.
    let traffic = "traffic --processes --version 11 --groups 15 --in-flight 8 --max 600000";
    let other = [push[0], push[1], ("NCCL_CALLER_RANK_1", "PUSHGATE_LANDING=host")];
    assert!(gpu_traffic(traffic, &other, written) > 5);
    // From the host to a GPU whose memory is written, and to one that pulls.
    for landing in ["gpu", "host"] {
        let other = format!("NCCL_CALLER_MEMORY=cuda PUSHGATE_LANDING={landing}");
        run_with(command(traffic), &[GPU[0], push[0], ("NCCL_CALLER_RANK_1", &other)]);
    }
    // Queue pairs for flushing, registrations and workers go with their connections.
    let mut many = command("many --times 2");
    many.envs(GPU).envs(push);
    run_with(many, &[]);
    // A descriptor that is no dma-buf is refused as GPU memory, and the log says what to do without
    // dma-bufs.
    let mut rules = command("rules");
    rules.envs([GPU[0], push[0], push[1]]);
    let (_, log) = logged(rules);
    assert!(
        log.contains("by the dma-buf that NCCL gave; set PUSHGATE_PATH=push and PUSHGATE_LANDING=host"),
        "{log}"
    );
    // Messages out of GPU memory can't go through host memory.
    let mut command = command(traffic);
    command.envs(GPU).envs(pull);
    command.env("NCCL_CALLER_RANK_1", "PUSHGATE_PATH=push PUSHGATE_LANDING=host");
    let output = output(command.env("NCCL_CALLER_VERBOSE", "1"), limit());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("set PUSHGATE_PATH=push or auto here"), "{errors}");
}

#[test]
fn p7_a_copier_that_is_killed_ends_the_requests_of_both_ranks_and_is_named() {
    let found = run_with(command("lost"), &GPU);
    assert!(found.contains("aborted"), "{found}");
}

#[test]
fn inspect_names_a_copier_that_is_stopped_under_ranks_over_local() {
    let mut lost = command("lost");
    lost.env("NCCL_CALLER_PUSHGATE", pushgate_tests::pushgate());
    let found = run_with(lost, &GPU);
    assert!(found.contains("aborted"), "{found}");
}

#[test]
fn gpu_memory_is_deregistered_when_the_pushes_out_of_it_have_ended() {
    // The copier is stopped for a while, so that there is something to wait for.
    let late = [GPU[0], GPU[1], ("NCCL_CALLER_FAULT", "stopped")];
    run_with(command("deregister"), &late);
    // The thread that deregisters checks the pushes itself when they take long, beside the thread
    // that posts and tests.
    run_with(command("traffic --version 11 --groups 10 --in-flight 4 --max 60000"), &late);
}

#[test]
fn the_calls_keep_nccls_rules_in_every_version() {
    for version in versions() {
        let said = run(&format!("rules --version {version}"));
        assert!(said.contains("speed"), "{said}");
    }
}

#[test]
fn p8_a_receive_shorter_than_its_message_is_an_error_and_not_a_cut() {
    for version in &[11, 8][..times(2, 1)] {
        run(&format!("truncation --version {version}"));
    }
}

#[test]
fn p8_a_send_after_one_that_was_longer_than_its_receive_fails_and_names_both_lengths() {
    run("long");
    run_with(command("long"), &[("PUSHGATE_QP", "tcp"), ("PUSHGATE_HOST", "127.0.0.1")]);
}

#[test]
fn p7_p8_garbage_for_handles_and_strangers_are_refused_and_hurt_nobody() {
    for version in &[12, 9][..times(2, 1)] {
        run(&format!("garbage --version {version}"));
    }
}

#[test]
fn a_thousand_connections_leave_nothing_behind() {
    let many = format!("many --times {}", times(1000, 10));
    run_with(command(&many), &[("PUSHGATE_NET_WINDOW_SIZE", "64K")]);
    run_with(command(&format!("many --times {} --version 8", times(50, 4))), &[]);
}

/// What `growth` says of an end that was not used: descriptors, and KiB of memory.
fn held(transport: &str, connections: u32) -> [f64; 2] {
    let mut growth = command(&format!("growth --times {connections}"));
    growth.envs([("PUSHGATE_QP", transport), ("PUSHGATE_HOST", "127.0.0.1")]);
    let output = output(&mut growth, limit());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let number = |unit| said.split(unit).next()?.rsplit(' ').next()?.parse().ok();
    [" descriptors", " KiB"].map(|unit| number(unit).unwrap_or_else(|| panic!("{said}")))
}

/// A window is as large as many messages, and most connections of a communicator carry few or none. The usual limit of
/// descriptors is 1,024.
#[test]
fn a_connection_that_was_not_used_holds_little_memory_over_tcp_and_few_descriptors() {
    let [descriptors, kib] = held("tcp", 32);
    // Half of the ends send, through windows of 4 MiB. The process's threads have some descriptors, too.
    assert!(kib < 512.0 && descriptors < 4.0, "{descriptors} descriptors, {kib} KiB");
    let [descriptors, _] = held("local", 32);
    assert!(descriptors < 4.0, "{descriptors} descriptors");
}

/// Ranks as processes with one thread each, and ranks as threads of one process with four each.
fn closed_in_flight(variables: &[(&str, &str)]) {
    // RDMA in software carries little, and takes 0.3 s for a connection.
    for (how, n, messages) in
        [("--processes --threads 1", times(10, 2), 32), ("--threads 4", times(10, 1), times(32, 4))]
    {
        let closing = format!("closing {how} --times {n} --in-flight {messages}");
        run_with(command(&closing), variables);
    }
}

#[test]
fn p7_connections_closed_with_messages_in_flight_take_every_post_and_leave_nothing() {
    closed_in_flight(&[]);
    if !over_rdma() {
        // Through a window that is not read in slices.
        closed_in_flight(&[("PUSHGATE_NET_WINDOW_SIZE", "4M")]);
    }
}

/// Messages go whole through a window that holds some of them.
#[test]
fn p7_gpu_connections_closed_with_messages_in_flight_take_every_post_and_leave_nothing() {
    closed_in_flight(&[GPU[0], GPU[1], ("PUSHGATE_NET_WINDOW_SIZE", "4M")]);
}

#[test]
fn p4_p6_a_message_whose_receive_is_not_posted_holds_up_no_other_tag() {
    for version in &[8, 11][..times(2, 1)] {
        run(&format!("tags --version {version} --groups {}", times(200, 40)));
    }
    run(&format!("tags --nccl-rules --groups {}", times(50, 10)));
}

#[test]
fn p4_p6_a_gpu_message_whose_receive_is_not_posted_holds_up_no_other_tag() {
    run_with(command(&format!("tags --groups {}", times(100, 20))), &GPU);
}

#[test]
fn p7_memory_is_deregistered_though_the_peer_that_reads_it_stands_still() {
    run("stopped");
}

/// As NCCL's abort closes them.
#[test]
fn p7_connections_to_a_rank_that_stands_still_are_closed_together_and_not_each_after_a_time_of_its_own() {
    std::thread::scope(|s| {
        for qp in ["local", "tcp"] {
            let set = [("PUSHGATE_QP", qp), ("PUSHGATE_HOST", "127.0.0.1"), ("PUSHGATE_RECOVER", "1s")];
            s.spawn(move || run_with(command("still --times 16"), &set));
        }
    });
}

/// With a thread of the plugin or NCCL's own to carry the connections, over `tcp`; over other queue pairs the first alone.
#[test]
fn p5_short_messages_that_are_done_arrive_though_their_connection_is_closed_at_once() {
    run("early");
    run_with(command("early"), &GPU);
    for threads in ["0", "2"] {
        let tcp =
            [("PUSHGATE_QP", "tcp"), ("PUSHGATE_HOST", "127.0.0.1"), ("PUSHGATE_NET_TCP_THREADS", threads)];
        run_with(command("early"), &tcp);
    }
}

/// The sender closes nothing, as a program that leaves `main`.
#[test]
fn p5_messages_that_are_done_arrive_though_their_sender_has_ended() {
    run("gone");
    run_with(command("gone"), &GPU);
}

#[test]
fn p5_messages_that_are_done_over_tcp_arrive_though_their_receives_are_posted_after_their_senders_end() {
    for threads in ["0", "2"] {
        let tcp =
            [("PUSHGATE_QP", "tcp"), ("PUSHGATE_HOST", "127.0.0.1"), ("PUSHGATE_NET_TCP_THREADS", threads)];
        run_with(command("gone"), &tcp);
        run_with(command("late"), &tcp);
    }
}

/// Where NCCL is told that a connection's messages are taken in their order.
#[test]
fn p4_p6_short_messages_over_tcp_leave_before_their_receives_are_posted() {
    for threads in ["0", "2"] {
        let tcp =
            [("PUSHGATE_QP", "tcp"), ("PUSHGATE_HOST", "127.0.0.1"), ("PUSHGATE_NET_TCP_THREADS", threads)];
        run_with(command("ahead"), &tcp);
        // The GPU's worker pushes the messages and pulls them.
        let push = [&GPU[..], &tcp[..], &[("PUSHGATE_PATH", "push")]].concat();
        run_with(command("traffic --processes --version 11 --in-flight 8 --groups 150 --max 20000"), &push);
    }
}

#[test]
fn p7_closing_a_connection_whose_peer_hangs_ends_though_messages_that_are_done_have_yet_to_arrive() {
    run_with(command("hanging"), &[("PUSHGATE_RECOVER", "1s")]);
}

#[test]
fn p7_a_peer_that_is_killed_ends_its_requests() {
    for version in &[11, 10][..times(2, 1)] {
        run(&format!("killed --version {version}"));
    }
}

#[test]
fn the_plugin_can_be_loaded_unloaded_and_loaded_again() {
    for version in &[11, 8][..times(2, 1)] {
        run(&format!("reload --version {version} --groups 50"));
    }
}

#[test]
fn a_wrong_setting_is_refused_by_its_name() {
    for (name, value, said) in [
        (
            "PUSHGATE_QP",
            "carrier-pigeon",
            "invalid qp `carrier-pigeon` (from PUSHGATE_QP): expected auto, local, verbs or tcp",
        ),
        ("PUSHGATE_NET_WINDOW_SIZE", "3M", "invalid net-window-size `3M` (from PUSHGATE_NET_WINDOW_SIZE)"),
        ("PUSHGATE_NO_SUCH_THING", "1", "unknown setting `PUSHGATE_NO_SUCH_THING` (from the environment)"),
        (
            "PUSHGATE_PROXY",
            "process",
            "invalid proxy `process` (from PUSHGATE_PROXY): expected thread in the NCCL plugin",
        ),
        (
            "PUSHGATE_RENDEZVOUS",
            "127.0.0.1:7000",
            "invalid rendezvous `127.0.0.1:7000` (from PUSHGATE_RENDEZVOUS)",
        ),
        ("PUSHGATE_CONFIG", "/nowhere/pushgate.toml", "/nowhere/pushgate.toml"),
    ] {
        for version in [10, 11] {
            let mut command = command(&format!("setting --version {version}"));
            // Not over the transport that the environment names.
            command.env("PUSHGATE_QP", "local");
            let found = run_with(command, &[(name, value)]);
            assert!(found.contains(said), "{name}={value}: {found}");
        }
    }
}

/// What the scenario `speed` prints: its figures, and the share of its run time that threads of the plugin took, percent.
fn speed(arguments: &str, variables: &[(&str, &str)]) -> (Vec<Vec<f64>>, f64) {
    let said = run_with(command(&format!("speed {arguments}")), variables);
    let (table, share) = said.trim_end().rsplit_once('\n').expect("a table and a line");
    let share = share.strip_prefix("the plugin's threads took ").and_then(|s| s.split_once(" % of "));
    let share =
        share.and_then(|(share, _)| share.parse().ok()).unwrap_or_else(|| panic!("which share? {said}"));
    let rows: Vec<Vec<f64>> = table
        .lines()
        .skip(2)
        .map(|line| line.split_whitespace().map(|f| f.parse().expect("a number")).collect())
        .collect();
    (rows, share)
}

#[test]
fn speed_is_measured_in_every_size_beside_a_copy() {
    let (rows, _) = speed(&format!("--times {}", times(50, 10)), &[]);
    let sizes: Vec<f64> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(sizes, [8.0, 4096.0, 65536.0, 524288.0]);
    for row in rows {
        assert_eq!(row.len(), 9);
        // A figure of 0 means that something did not happen.
        assert!(row[1] > 0.0 && row[2] > 0.0 && row[4] > 0.0 && row[7] > 0.0, "{row:?}");
    }
}

/// On one core a thread of the plugin would run only when it takes the core from the thread that polls.
#[test]
fn a_rank_that_polls_on_one_core_drives_its_connections_itself() {
    // Over RDMA in software, which is slow, the newest version alone.
    for version in if over_rdma() { &VERSIONS[4..] } else { &VERSIONS[..] } {
        let bound = format!("--cores 1 --version {version} --times {}", times(300, 10));
        let (_, share) = speed(&bound, &[]);
        // The ranks wait for each other in calls that are none of the plugin's, and a machine may be so busy that the thread
        // which polls does not run for a while: then the plugin's thread stands in.
        assert!(share < 40.0, "threads of the plugin took {share} % of the time of a rank that polls");
    }
    let (_, share) = speed("--cores 1 --times 10", &[("PUSHGATE_DRIVE", "thread")]);
    assert!(share > 0.0, "a thread that drives takes time");
}

#[test]
fn connections_under_one_thread_that_polls_get_their_shares() {
    for (cores, variables) in [(0, &[][..]), (1, &[]), (0, &[("PUSHGATE_DRIVE", "thread")])] {
        run_with(
            command(&format!("fair --times {} --in-flight 4 --cores {cores}", times(500, 12))),
            variables,
        );
    }
}

#[test]
fn nccls_rules_alone_leave_out_what_they_say() {
    // Over RDMA a version's calls do the same, so fewer versions run there.
    for version in &[11, 8][..times(2, 1)] {
        let said = run(&format!("rules --nccl-rules --version {version}"));
        assert!(said.contains("left out, NCCL never does it: more than 32 requests"), "{said}");
        assert!(!said.contains("not so here"), "{said}");
        run(&format!("traffic --nccl-rules --processes --version {version} --groups {}", times(50, 10)));
    }
    assert!(run("garbage --nccl-rules").starts_with("left out: garbage"));
    assert!(!run("truncation --nccl-rules").contains("not so here"));
    // What is left out with the option is tried without it.
    assert!(!run("rules").contains("left out"));
}

#[test]
fn a_table_that_is_not_there_is_named_with_those_that_are() {
    let output = output(&mut command("traffic --version 13"), limit());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("no table v13"), "{errors}");
    assert!(errors.contains("it has v8, v9, v10, v11, v12"), "{errors}");
}

#[test]
fn a_receive_that_nothing_fills_is_a_warning_in_nccls_log_whatever_drives_the_engine() {
    for drive in ["caller", "thread"] {
        let variables = [("PUSHGATE_STALL_REPORT", "200ms"), ("PUSHGATE_DRIVE", drive)];
        let said = run_with(command("stall"), &variables);
        assert!(said.contains("the sender has nothing to send"), "{drive}: {said}");
    }
}
