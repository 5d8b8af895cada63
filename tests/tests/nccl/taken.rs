//! Whether NCCL takes the plugin's profiler and tuner, and what the plugin does where NCCL takes others. These tests are the
//! same over any transport.

use std::path::{Path, PathBuf};
use std::process::Command;

use pushgate_tests::built::{nccl_caller, plugin};

use super::{GPU, command, logged, run_with};

#[test]
fn an_nccl_that_tells_of_no_launches_is_warned_of_once() {
    let warned = |arguments: &str, variables: &[(&str, &str)]| {
        let mut command = command(arguments);
        command.env_remove("NCCL_PROFILER_PLUGIN").env("_PUSHGATE_NET_GPU", "cpu");
        command.envs(variables.iter().copied());
        let (_, log) = logged(command);
        let lines: Vec<_> = log.lines().filter(|line| line.contains("does not tell this plugin")).collect();
        assert!(lines.len() <= 1, "{log}");
        lines.first().map(|line| (*line).to_owned()).unwrap_or_default()
    };
    let other = [("NCCL_PROFILER_PLUGIN", "/nowhere/libprofiler.so")];
    assert!(warned("queue", &[]).contains("it has loaded another profiler"));
    assert!(warned("queue", &other).contains("NCCL_PROFILER_PLUGIN is /nowhere/libprofiler.so"));
    assert_eq!(warned("queue --times 1", &other), "", "NCCL tells of its launches");
    assert_eq!(warned("queue", &[("PUSHGATE_PATH", "bounce")]), "", "no kernel copies");
    // An NCCL before 2.28 can't tell.
    let push = [("PUSHGATE_PATH", "push")];
    assert!(warned("queue --version 10", &push).contains("it is older than 2.28"));
    assert_eq!(warned("queue --version 10", &[]), "", "the path is bounce");
}

#[test]
fn nccl_before_2_28_gets_host_memory_unless_the_user_says_push() {
    for (version, path) in [(8, "bounce"), (9, "bounce"), (10, "bounce"), (11, "push"), (12, "push")] {
        let mut command = command(&format!("queue --version {version}"));
        command.env("_PUSHGATE_NET_GPU", "cpu");
        let (_, log) = logged(command);
        assert!(log.contains(&format!("path {path}: ")), "v{version}: {log}");
    }
}

#[test]
fn the_profiler_that_the_user_names_to_nccl_is_displaced_where_the_gpu_copies() {
    let said = |named: &str, gpu: bool| {
        let mut command = command("queue");
        command.env("NCCL_PROFILER_PLUGIN", named).envs(gpu.then_some(GPU[0]));
        logged(command).1
    };
    assert!(said("none", true).contains("NCCL_PROFILER_PLUGIN=none is unset"));
    assert!(!said("none", false).contains("is unset"), "nothing is copied by a kernel");
    let missing = said("/nowhere/libprofiler.so", true);
    assert!(missing.contains("NCCL_PROFILER_PLUGIN stays /nowhere/libprofiler.so: "), "{missing}");
    let own = plugin();
    let itself = said(own.to_str().unwrap(), true);
    assert!(itself.contains("that is this plugin itself"), "{itself}");
}

#[test]
fn what_another_tuner_costs_is_said_once() {
    let said = |tuner: Option<&str>, gpu: bool| {
        let mut command = command("many --times 3");
        command.env_remove("NCCL_TUNER_PLUGIN").envs(tuner.map(|name| ("NCCL_TUNER_PLUGIN", name)));
        command.envs(gpu.then_some(GPU).into_iter().flatten());
        let (_, log) = logged(command);
        ["NCCL takes another tuner", "NCCL takes no tuner"].map(|text| log.matches(text).count())
    };
    assert_eq!(said(Some("libnccl-tuner-mine.so"), true), [1, 0]);
    assert_eq!(said(Some("none"), true), [0, 1]);
    assert_eq!(said(Some("/opt/libnccl-net-pushgate.so"), true), [0; 2]);
    assert_eq!(said(None, true), [0; 2]);
    assert_eq!(said(Some("none"), false), [0; 2], "the tuner is for GPU memory");
}

/// The second profiler's source, where there are sources.
fn source_of_profiler() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("plugins/profiler.cc")
}

/// Builds the profiler of tests/plugins with one table; returns where it is.
fn second_profiler(version: u32) -> PathBuf {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libnccl-profiler-test{version}.so"));
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or("c++".into()));
    compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]).arg(format!("-DVERSION={version}"));
    let output = compiler.arg("-o").arg(&library).arg(source_of_profiler()).output().expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

#[test]
fn a_second_profiler_gets_every_event_beside_the_plugins_own() {
    if !source_of_profiler().exists() {
        return pushgate_tests::skip("the sources of the tests are not here");
    }
    let told = |ours: u32, theirs: u32, gpu: bool, variable: &str| {
        let mut command = command(&format!("profiler --times {ours}"));
        command.env(variable, second_profiler(theirs)).envs(gpu.then_some(GPU).into_iter().flatten());
        let (said, log) = logged(command);
        let mask = if gpu { 0xf00 } else { 0xa00 };
        assert!(said.contains(&format!("mask {mask:#x}")) && !said.contains("warning"), "{said}");
        assert!(log.contains(&format!("the second profiler second (v{theirs}) gets every event")), "{log}");
        log.lines().filter_map(|line| line.strip_prefix("second: ")).map(str::to_owned).collect::<Vec<_>>()
    };
    let all = |copies: bool| {
        let copies = |what: &str| copies.then(|| format!("{what} 0x1000"));
        let head = ["init test 2 2 0", "start 0x200", "start 0x800", "start 0x800", "record 0x200 23"];
        let tail = ["stop 0x800", "stop 0x200", "stop 0x800", "finalize 1"];
        let own = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        [own(&head), copies("start").into_iter().collect(), copies("stop").into_iter().collect(), own(&tail)]
            .concat()
    };
    for (ours, theirs) in [(5, 5), (6, 5), (6, 6)] {
        for gpu in [false, true] {
            // v5 has no event of copies without a kernel.
            let told = told(ours, theirs, gpu, "PUSHGATE_PROFILER_PLUGIN");
            assert_eq!(told, all(theirs == 6), "v{ours}, the other v{theirs}, GPU {gpu}");
        }
        // The one that the user names to NCCL, whose place the plugin takes.
        assert_eq!(told(ours, theirs, true, "NCCL_PROFILER_PLUGIN"), all(theirs == 6), "v{ours}, v{theirs}");
    }
}

#[test]
fn a_second_profiler_that_cannot_be_loaded_is_named_and_nothing_else_fails() {
    let named = |name: &str| {
        let mut command = command("profiler --times 6");
        command.envs(GPU);
        run_with(command, &[("PUSHGATE_PROFILER_PLUGIN", name)])
    };
    let own = plugin();
    for (name, why) in [
        ("/nowhere/libprofiler.so", "/nowhere/libprofiler.so"),
        ("no-such", "libnccl-profiler-no-such.so"),
        (nccl_caller(env!("CARGO_BIN_EXE_nccl-caller")).to_str().unwrap(), "profiler-plugin"),
        (own.to_str().unwrap(), "that is this plugin itself"),
    ] {
        let said = named(name);
        assert!(
            said.contains("warning: profiler-plugin") || said.contains("NCCL goes on without"),
            "{name}: {said}"
        );
        assert!(said.contains(why) && said.contains("mask 0xf00"), "{name}: {said}");
    }
}

#[test]
fn broadcasts_whose_launches_are_not_told_find_the_worker() {
    let said = |second: Option<PathBuf>| {
        let mut command = command("broadcasts");
        command.envs(GPU).env("_PUSHGATE_WORKER_FAULT", "refused:2:1");
        command.envs(second.map(|library| ("PUSHGATE_PROFILER_PLUGIN", library)));
        run_with(command, &[])
    };
    let check = |said: &str| {
        let calls: Vec<_> = said.lines().filter(|line| line.starts_with('"')).collect();
        assert_eq!((calls[0], calls[2]), ("\"AllReduce\" None", "\"Broadcast\" None"), "{said}");
        assert!(calls[1].starts_with("\"Broadcast\" Some("), "{said}");
    };
    check(&said(None));
    if source_of_profiler().exists() {
        check(&said(Some(second_profiler(6))));
    }
}

#[test]
fn a_launch_that_takes_ll_brings_no_worker_where_ll_lands_in_host_memory() {
    for version in [5, 6] {
        let workers = |more: &[(&str, &str)]| {
            let mut command = command(&format!("launches --times {version}"));
            command.envs(GPU);
            let said = run_with(command, more);
            assert!(!said.contains("warning"), "{said}");
            let lines =
                said.lines().filter_map(|line| line.split_once(": ")).filter(|(_, w)| w.ends_with("worker"));
            lines.map(|(what, worker)| (what.to_owned(), worker == "worker")).collect::<Vec<_>>()
        };
        let expect = |without: &[&str], workers: &[(String, bool)]| {
            assert_eq!(workers.len(), 7, "{workers:?}");
            for (what, worker) in workers {
                assert_eq!(*worker, !without.contains(&what.as_str()), "v{version}: {what}");
            }
        };
        expect(&["LL", "LL again"], &workers(&[]));
        // LL messages arrive in GPU memory, or the user chose a protocol.
        expect(&[], &workers(&[("NCCL_ALLOC_P2P_NET_LL_BUFFERS", "0")]));
        expect(&[], &workers(&[("NCCL_PROTO", "LL,Simple")]));
    }
}
