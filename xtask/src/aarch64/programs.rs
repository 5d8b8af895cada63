//! The Rust code for 64-bit ARM: built whole, and its tests run under QEMU's emulation of a process.
//!
//! QEMU emulates the processor and hands system calls on to this host's kernel. On a host of x86 it shows no reordering that
//! x86 forbids: what runs here shows that the code is right for ARM's instructions, layouts and system calls, not for its
//! memory model.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::pages;
use super::toolchain::Toolchain;
use crate::bench::{Bench, both};
use crate::output::say;
use crate::package::{Arch, For, natives};
use crate::programs::{self, Kind, Program};
use crate::{process, steps, test_programs};

/// What is built, and of what the unit tests run.
const PACKAGES: &[&str] = &[
    "pushgate",
    "pushgate-abi",
    "pushgate-c",
    "pushgate-cli",
    "pushgate-core",
    "pushgate-driver-shim",
    "pushgate-engine",
    "pushgate-gpu-kernels",
    "pushgate-link",
    "pushgate-link-tcp",
    "pushgate-link-verbs",
    "pushgate-net-plugin",
    "pushgate-nixl-plugin",
    "pushgate-rdma-core-sys",
    "pushgate-tests",
];

/// Integration tests of these packages that run.
const TESTS: &[&str] = &["device_api", "endpoint", "inlines", "nccl"];

/// How much longer than here a test may take.
const SLOWER: u32 = 4;

/// Tests that the emulation can't run, by their programs. QEMU does not know process_vm_readv and process_vm_writev, by which one
/// process reads another's memory, and takes MADV_POPULATE and MADV_WIPEONFORK for done. The namespace has one user.
const SKIPPED: &[(&str, &[&str])] = &[
    // Payload out of a region, which the peer reads.
    (
        "endpoint",
        &[
            "p3::p3_a_put_out_of_a_region_reaches_host_and_device_before_its_signal",
            "p3::p3_a_relay_goes_by_the_longest_stretch_of_the_landing_ring",
            "p3::p3_p5_a_send_out_of_a_region_lands_in_a_posted_buffer_and_then_completes",
            "p4::p4_messages_of_nothing_out_of_a_region_take_one_receive_after_the_other",
            "p4::p4_p5_sends_out_of_a_region_wait_for_room_in_the_landing_ring",
            "p6::p6_puts_to_the_same_bytes_land_in_their_order",
            "p7::p7_p8_where_the_peer_cannot_read_a_region_send_is_refused_with_a_sentence",
            "p8::p8_a_region_stays_until_nobody_reads_what_goes_out_of_it",
            "p8::p8_a_turn_ends_when_the_engine_has_copied_enough",
            "p8::p8_only_memory_of_this_process_goes_out_of_a_region",
        ],
    ),
    ("device_api", &["one_sided::a_send_out_of_a_region_arrives"]),
    ("pushgate_link", &["process_memory::tests::"]),
    ("nccl_net_pushgate", &["send::tests::a_message_over_the_longest_goes_out_of_its_region_in_slices"]),
    (
        "plugin_PUSHGATE",
        &[
            "gate::tests::p8_a_gate_that_is_closed_lets_no_batch_begin_",
            "unruly::p7_memory_is_free_once_a_peer_without_a_number_here_was_killed_within_a_copy",
            "unruly::p8_memory_stays_registered_while_a_peer_copies_",
        ],
    ),
    // Its copier of the CPU reads its clients.
    (
        "pushgate_gpu_kernels",
        &[
            "copier::tests::p3_a_queue_goes_on_where_the_queue_before_it_has_left_the_rings",
            "copier::tests::p3_copies_both_ways_are_complete_when_their_marks_are_seen",
            "copier::tests::p8_a_command_outside_of_what_a_client_registered_ends_that_client_alone",
        ],
    ),
    // Its GPU of the CPU is served by that copier.
    (
        "nccl",
        &[
            "gpu_memory",
            "_gpu_message",
            "_gpu_connections_",
            "copier",
            "where_a_gpu_copies",
            "p4_p6_short_messages_over_tcp_leave_before_their_receives_are_posted",
            "p5_messages_that_are_done_arrive_though_their_sender_has_ended",
            "p5_short_messages_that_are_done_arrive_though_their_connection_is_closed_at_once",
            "recovering::p6_p7_links_of_two_processes_that_break_again_and_again_lose_and_double_nothing",
            "transports::",
        ],
    ),
    // Minutes.
    (
        "pushgate",
        &["mesh::tcp::tests::p6_frames_come_once_and_in_order_though_connections_break_again_and_again"],
    ),
    ("nccl", &["a_rank_that_polls_on_one_core_", "a_thousand_connections_"]),
    // Pages that a fork wipes.
    ("nccl", &["p8_a_child_of_fork_"]),
    // Threads that end a moment later than here are counted.
    ("pushgate_driver_shim", &["closing::tests::p7_p8_peers_whose_closes_hang_"]),
    // Another user.
    ("pushgate", &["_of_another_user_", "_another_user_has_taken_"]),
    ("pushgate_gpu_kernels", &["_of_another_user_", "_another_user_has_taken_"]),
    ("nccl_net_pushgate", &["handshake::tests::p7_p8_strangers_of_another_user_"]),
    // Valgrind runs the host's own programs.
    ("pushgate_link_verbs", &["many_tests::"]),
    // Pages that are populated.
    ("device_api", &["process::"]),
    ("pushgate_driver_shim", &["memory::tests::p8_memory_of_another_user_with_holes_"]),
];

/// Tests that take half a minute and more under emulation, and show there what they show here.
const LONG: &[(&str, &[&str])] = &[
    ("device_api", &["waits::p7_waits_end_with_a_time_out"]),
    (
        "nccl",
        &[
            "a_connection_that_was_not_used_holds_little_memory_over_tcp_and_few_descriptors",
            // Ranks as processes do the same.
            "p3_p4_p6_ranks_as_threads_get_every_byte_in_every_version",
        ],
    ),
    // Much that is made and compared byte by byte.
    (
        "plugin_PUSHGATE",
        &[
            "tests::p6_transfers_and_notifications_survive_links_that_break_under_them_",
            "tests::p8_memory_is_not_touched_after_its_transfer_is_released_",
        ],
    ),
    ("pushgate_cli", &["top::screen::tests::at_any_width_a_row_has_its_whole_process_number_"]),
    ("pushgate", &["mesh::tcp::tests::p7_ranks_that_never_come_or_answer_end_the_set_up_at_the_timeout"]),
    (
        "pushgate_link_tcp",
        &[
            "tests::p5_p6_streams_that_break_at_any_byte_and_are_replaced_",
            "tests::mutated::p7_p8_changed_frames_write_nothing_elsewhere_fill_no_memory_and_stop_no_other_link",
        ],
    ),
    ("pushgate_link_verbs", &["verbs_link::tests::a_device_is_looked_at_as_often_for_many_links_as_for_few"]),
];

/// Unit tests that run with pages of 64 KiB: of what maps memory, and of rings and records in it.
const PAGES: [(&str, &str); 3] = [
    ("pushgate_core", ""),
    // Descriptors whose close waits are connections of TCP, and the guest's kernel is built without it.
    ("pushgate_driver_shim", "--skip closing:: --skip bell::tests::p8_a_descriptor_sent_with_a_ring_"),
    ("pushgate_link", ""),
];

/// Builds the Rust code and runs its tests.
pub fn run(bench: &mut Bench, tools: &Toolchain, emulator: &Path) -> Result<()> {
    let enter = bench.paths.scratch("aarch64")?.join("enter.sh");
    fs::write(&enter, super::ENTER)?;
    let arm =
        Arm { emulator: emulator.into(), enter, compilers: tools.compilers(), libraries: tools.libraries() };
    let cargo = |subcommand| {
        natives::cargo(&bench.paths, Arch::Aarch64, Some((tools, For::Tests)), subcommand, bench.guard)
    };
    let build = |subcommand, packages: &[&str], what: &[&str]| -> Result<Vec<Program>> {
        let (mut cargo, _) = cargo(subcommand)?;
        cargo.args(packages.iter().flat_map(|package| ["--package", package])).args(what);
        programs::build_by(cargo, bench.guard)
    };
    let named = TESTS.iter().flat_map(|name| ["--test", name]);
    let tests = build("test", PACKAGES, &["--no-run", "--lib"].into_iter().chain(named).collect::<Vec<_>>())?;
    let commands = ["--lib", "--bin", "pushgate", "--bin", "nccl-caller", "--example", "allreduce"];
    let commands = build("zigbuild", PACKAGES, &commands)?;
    let command = |name: &str| -> Result<PathBuf> {
        let found = commands.iter().find(|program| program.name == name);
        let found = found.with_context(|| format!("cargo has not built {name}"))?;
        Ok(found.path.clone())
    };
    if let Err(why) = process::run(arm.command(Path::new("true"), &bench.paths.root), bench.guard) {
        let needs = "programs for 64-bit ARM were built and none was run: a user namespace with a binfmt_misc of its own";
        bench.skips.push(format!("{needs} needs Linux 6.7: {why:#}"));
        return Ok(());
    }
    let plugin = cargo("zigbuild")?.1.join("libnccl_net_pushgate.so");
    let bundle = bundle(bench, [command("pushgate")?, command("nccl-caller")?, plugin])?;

    let result = |program: &Path, arguments: &[&str]| -> Result<()> {
        let mut run = arm.command(program, &bench.paths.root);
        run.args(arguments);
        let output = process::capture(run, true, bench.guard)?;
        steps::check_result(output.lines().last().unwrap_or_default())
    };
    result(&command("allreduce")?, &["--device", "cpu", "--size", "1M", "--json"])?;
    let ranks =
        ["bench", "allreduce", "--ranks", "4", "--size", "1M", "--iters", "1", "--device", "cpu", "--json"];
    // A proxy of its own refuses memory without pages, and QEMU populates none.
    for more in [&[][..], &["--qp", "tcp"]] {
        result(&command("pushgate")?, &[&ranks[..], more].concat())?;
    }

    let test = |program: &Program, qp: Option<&str>| {
        let mut run = arm.command(&program.path, &program.package);
        bench.add_variables(&mut run, SLOWER);
        // As many as end in minutes.
        run.env("PROPTEST_CASES", "16");
        run.env("_PUSHGATE_TEST_BUNDLE", &bundle).envs(qp.map(|qp| ("PUSHGATE_TEST_QP", qp)));
        let left_out = SKIPPED.iter().chain(LONG).filter(|(name, _)| *name == program.name);
        let skipped = left_out.flat_map(|(_, tests)| *tests);
        let of_rings = steps::RING_TESTS.iter().filter(|_| qp.is_some());
        run.args(skipped.chain(of_rings).flat_map(|test| ["--skip", test]));
        run
    };
    let mut all = Vec::new();
    for program in tests.iter().filter(|program| program.kind == Kind::Test) {
        all.push(test(program, None));
        if program.name == "endpoint" {
            all.push(test(program, Some("tcp")));
        }
    }
    say!("aarch64: tests that QEMU can't run, or not soon, are left out; {} names them", file!());
    // Many tests wait, and leave a core.
    let (paths, guard) = (&bench.paths, bench.guard);
    let (kernel, ()) =
        both(|| pages::kernel(paths, tools, guard), || test_programs::run(Vec::new(), all, 2, guard))?;

    let found = |name: &str| -> Result<PathBuf> {
        let found = tests.iter().find(|program| program.kind == Kind::Test && program.name == name);
        Ok(found.with_context(|| format!("cargo has not built the tests of {name}"))?.path.clone())
    };
    let on_pages = PAGES.map(|(name, arguments)| Ok((name, found(name)?, arguments.to_owned())));
    let mut jobs = on_pages.into_iter().collect::<Result<Vec<_>>>()?;
    jobs.push(("pushgate", command("pushgate")?, ranks.join(" ")));
    pages::run(bench, tools, &kernel, &jobs)
}

/// How programs for ARM are run.
struct Arm {
    emulator: PathBuf,
    enter: PathBuf,
    compilers: PathBuf,
    libraries: PathBuf,
}

/// Has programs for ARM in this namespace find their loader and libraries ($0) where they look.
const LIBRARIES: &str = r#"(cd "$0" && mount -t overlay -o lowerdir=.:/usr/lib none /usr/lib) && exec "$@""#;

impl Arm {
    /// A command that runs a program, and what this starts, for ARM or for this host. Compilers that it finds are for ARM.
    fn command(&self, program: &Path, dir: &Path) -> Command {
        let mut command = process::command("unshare", dir);
        command.args(["--user", "--map-root-user", "--mount", "sh"]).arg(&self.enter).arg(&self.emulator);
        command.args(["sh", "-c", LIBRARIES]).arg(&self.libraries).arg(program);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = [self.compilers.clone()].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(places).expect("they were one variable before"));
        command
    }
}

/// A folder in which tests find programs and sources, so that they build none.
fn bundle(bench: &Bench, [command, caller, plugin]: [PathBuf; 3]) -> Result<PathBuf> {
    let folder = bench.paths.scratch("aarch64/bundle")?;
    let links = [
        ("source", bench.paths.root.clone()),
        ("pushgate", command),
        ("nccl-caller", caller),
        ("libnccl-net-pushgate.so", plugin),
    ];
    for (name, to) in links {
        if !to.exists() {
            bail!("cargo has not built {}", to.display());
        }
        let _ = fs::remove_file(folder.join(name));
        symlink(to, folder.join(name))?;
    }
    Ok(folder)
}
