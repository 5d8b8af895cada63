//! Tests the NCCL plugin's tables for one-sided operations (RMA, formerly GIN) under a caller that does what NCCL's proxy does,
//! `nccl-caller rma`: one process for each scenario and table, because each may leave nothing behind.
//!
//! The plugin is the one that cargo built beside this test, or the file that `NCCL_CALLER_PLUGIN` names. The transport is that
//! of the environment.

use std::process::{Command, Stdio};
use std::time::Duration;

use pushgate_tests::built::{nccl_caller, plugin};
use pushgate_tests::output;

const TABLES: [&str; 6] = ["gin11", "gin12", "rma13", "rma14", "rma15", "rma16"];

/// Settings that make the CPU executor play the GPU.
const GPU: [(&str, &str); 1] = [("_PUSHGATE_NET_GPU", "cpu")];

/// A limit against a caller that hangs, not a measure of a machine's speed.
fn limit() -> Duration {
    3 * pushgate_tests::hang()
}

fn over_rdma() -> bool {
    std::env::var_os("PUSHGATE_QP").is_some_and(|qp| qp == "verbs")
}

/// A number of repetitions or bytes: `n`, or `rdma` over RDMA in software, which is slow.
fn times(n: usize, rdma: usize) -> usize {
    if over_rdma() { rdma } else { n }
}

/// The tables that are tried: over RDMA in software one, because it is slow and the tables do the same there.
fn tables() -> &'static [&'static str] {
    if over_rdma() { &["rma14"] } else { &TABLES }
}

fn command(arguments: &str) -> Command {
    let mut command = Command::new(nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
    command.arg("rma").args(arguments.split_whitespace()).arg("--plugin").arg(plugin());
    // Off by default.
    command.env("NCCL_GIN_TYPE", "2").stdin(Stdio::null());
    command
}

fn run_with(arguments: &str, variables: &[(&str, &str)]) -> String {
    let mut command = command(arguments);
    command.envs(variables.iter().copied());
    let shown = format!("{command:?}");
    let output = output(&mut command, limit());
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}: {}\n{said}\n{errors}", output.status);
    print!("{said}");
    said.into_owned()
}

fn run(arguments: &str) -> String {
    run_with(arguments, &[])
}

#[test]
fn p3_p4_p6_every_byte_of_puts_and_gets_arrives_where_it_belongs_in_every_version() {
    let longest = times((5 << 20) + 1, 1 << 20);
    for table in tables() {
        run(&format!("bytes --processes --table {table} --max {longest}"));
    }
    run(&format!("bytes --table rma14 --ranks 4 --max {}", times(1 << 20, 65539)));
    if !over_rdma() {
        run("bytes --table gin12 --ranks 4 --max 65539 --processes");
    }
    // Loopback alone.
    run("bytes --table rma13 --ranks 1 --max 65539");
}

#[test]
fn p3_p4_p6_a_put_of_64_mib_arrives() {
    run(&format!("bytes --processes --table rma14 --max {}", times(64 << 20, 8 << 20)));
}

#[test]
#[ignore = "takes 8 GiB of memory"]
fn p3_p4_p6_a_put_of_1_gib_arrives() {
    run("bytes --processes --table rma14 --max 1073741824");
}

#[test]
fn p3_p4_p6_gpu_memory_is_put_into_and_got_from() {
    run_with("bytes --gpu --processes --table rma14 --max 1048576", &GPU);
    if !over_rdma() {
        run_with("bytes --gpu --processes --table gin12 --max 1048576", &GPU);
        run_with("bytes --gpu --ranks 4 --table rma16 --max 65539", &GPU);
    }
    run_with("order --gpu --processes --table rma14", &GPU);
    run_with("random --gpu --processes --ranks 3 --table rma15 --times 150", &GPU);
}

#[test]
fn p3_a_signal_is_seen_after_the_bytes_of_all_earlier_puts_of_its_context() {
    for table in tables() {
        run(&format!("order --processes --table {table} --rounds {}", times(10, 2)));
    }
    run("order --table rma15 --ranks 3 --rounds 4");
}

#[test]
fn p3_p6_random_operations_leave_what_a_model_says() {
    for (seed, table) in tables().iter().enumerate() {
        run(&format!("random --processes --ranks {} --table {table} --seed {seed}", 2 + seed % 3));
    }
    for seed in 10..times(16, 10) {
        run(&format!("random --ranks 4 --table rma14 --seed {seed}"));
    }
}

#[test]
fn p4_a_full_queue_completes_and_one_operation_more_is_refused() {
    for table in tables() {
        run(&format!("depth --processes --table {table}"));
    }
}

#[test]
fn groups_and_contexts_are_made_by_one_thread_while_another_makes_progress() {
    for table in tables() {
        run(&format!("contexts --processes --table {table}"));
    }
    if !over_rdma() {
        run("contexts --ranks 3 --table rma14");
    }
}

#[test]
fn p6_what_many_ranks_add_to_one_signal_at_once_is_added_once() {
    for table in tables() {
        run(&format!("signals --processes --ranks 4 --table {table}"));
    }
    if !over_rdma() {
        run("signals --ranks 4 --table rma14 --rounds 10");
        run_with("signals --gpu --processes --ranks 3 --table rma14", &GPU);
    }
}

#[test]
fn p3_p6_p7_what_is_asked_of_a_rank_that_calls_nothing_is_done() {
    let max = times(1 << 20, 65539);
    for table in tables() {
        // GIN has no gets.
        if !table.starts_with("gin") {
            run(&format!("passive --processes --table {table} --max {max}"));
        }
    }
    run("passive --table rma16 --ranks 3 --max 65539");
    run_with("passive --gpu --processes --ranks 3 --table rma14 --max 65539", &GPU);
}

#[test]
fn p3_p4_a_put_that_comes_before_its_target_is_registered_waits_and_lands() {
    for table in tables() {
        run(&format!("late --processes --table {table}"));
    }
}

#[test]
fn p7_a_coll_comm_that_waits_for_a_registration_says_so() {
    run_with("stalls --processes --table rma14 --rounds 1", &[("PUSHGATE_STALL_REPORT", "20ms")]);
}

#[test]
fn p8_a_put_to_memory_that_its_target_has_deregistered_fails_where_it_was_put() {
    for table in tables() {
        run(&format!("deregistered --processes --table {table}"));
    }
    run("deregistered --table rma14");
}

#[test]
fn p8_wrong_arguments_of_every_call_are_refused_and_nothing_happens() {
    for table in tables() {
        run(&format!("wrong --processes --table {table}"));
    }
    run("wrong --table rma15 --ranks 3");
}

#[test]
fn p8_a_child_of_fork_is_refused_every_call_and_the_parents_operations_go_on() {
    for table in tables() {
        run(&format!("forked --ranks 1 --table {table}"));
    }
}

#[test]
fn p7_groups_closed_with_operations_in_flight_do_not_hang_and_leave_nothing() {
    run(&format!("closing --processes --table rma14 --rounds {}", times(3, 1)));
    if !over_rdma() {
        run_with("closing --gpu --processes --table rma14 --rounds 2", &GPU);
        run("closing --processes --table gin12 --rounds 3");
        run("closing --ranks 3 --table rma16 --rounds 2");
    }
}

#[test]
fn a_rank_that_closes_after_the_end_of_its_operations_is_no_error_at_the_others() {
    for table in tables() {
        run(&format!("leaving --processes --ranks 3 --table {table}"));
    }
}

#[test]
fn p7_a_peer_that_is_killed_ends_its_operations_and_the_others_go_on() {
    for table in tables() {
        run(&format!("lost --processes --ranks 3 --table {table}"));
    }
}

#[test]
fn p7_a_rank_that_cannot_let_another_one_connect_ends_the_operations_of_all() {
    run("exhausted --processes --ranks 3 --table rma14");
}

#[test]
fn connecting_to_64_or_1023_peers_opens_nothing_before_an_operation() {
    for table in &["rma14", "gin11"][..times(2, 1)] {
        run(&format!("growth --ranks 1 --table {table} --times 64"));
    }
    if !over_rdma() {
        run("growth --ranks 1 --table rma14 --times 1023");
    }
}

#[test]
fn speed_is_measured_beside_a_copy() {
    let said = run(&format!(
        "speed --processes --table rma14 --times {} --max {}",
        times(500, 20),
        times(64 << 20, 1 << 20)
    ));
    assert!(said.contains("us from a put of 8 bytes") && said.contains("ratio"), "{said}");
}

#[test]
fn init_fails_without_a_warning_where_nothing_asks_for_the_table() {
    for table in ["gin11", "rma14"] {
        let mut command = command(&format!("bytes --ranks 1 --table {table}"));
        command.env_remove("NCCL_GIN_TYPE").env("NCCL_CALLER_VERBOSE", "1");
        let output = output(&mut command, limit());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{errors}");
        assert!(errors.contains("init answered 5: NCCL would pass the plugin over: []"), "{errors}");
        assert!(errors.contains("PUSHGATE_NET_RMA=true offers it"), "{errors}");
    }
}

#[test]
fn a_table_that_is_not_there_is_named_with_those_that_are() {
    let mut command = Command::new(nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")));
    command.args(["rma", "bytes", "--table", "rma14", "--plugin", "libc.so.6"]).stdin(Stdio::null());
    let output = output(&mut command, limit());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("no ncclRmaPlugin_v14"), "{errors}");
    assert!(errors.contains("it has none of RMA or GIN"), "{errors}");
}
