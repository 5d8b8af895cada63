//! Files that a user names: one without an end is refused before the machine runs out of memory.

use std::fs::File;
use std::process::{Command, Stdio};
use std::thread;

use pushgate_tests::built;
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Runs the command in 4 GiB of address space and returns its standard error.
fn refused(args: &[&str], config: Option<&str>) -> String {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 4194304; exec \"$0\" \"$@\""]).arg(built::pushgate()).args(args);
    for key in pushgate::settings::PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG").env_remove("PUSHGATE_PROBE_FILE");
    command.envs(config.map(|file| ("PUSHGATE_CONFIG", file))).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    said
}

#[test]
fn p8_a_file_without_an_end_is_refused_by_its_name_with_the_bound_and_the_remedy() {
    let bound = "longer than the 4194304 bytes that are read at most: name another file";
    for (args, config) in [
        (&["bench", "local", "--device", "cpu"][..], Some("/dev/zero")),
        (&["model", "--params", "/dev/zero"], None),
        (&["topo", "--topology", "/dev/zero"], None),
        (&["topo", "--from-nccl", "/dev/zero"], None),
    ] {
        let said = refused(args, config);
        assert!(said.contains("/dev/zero") && said.contains(bound), "{args:?}: {said}");
    }
    // Findings are refused sooner, because a file of findings must be a regular file.
    let said = refused(&["report", "--findings", "/dev/zero", "--out", "/nonexistent/page"], None);
    assert!(said.contains("/dev/zero") && said.contains("no regular file"), "{said}");
}

#[test]
fn p7_a_pipe_that_nobody_closes_does_not_hold_a_command_for_ever() {
    let [without, with] = ["without", "with"].map(|writer| {
        let path =
            std::env::temp_dir().join(format!("pushgate-files-{}-{writer}-writer", std::process::id()));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path.to_str().unwrap().to_owned()
    });
    // Writes nothing.
    let writer = File::options().read(true).write(true).open(&with).unwrap();
    // Each command reads until its limit, so they run at once.
    let [model, bench, report] = thread::scope(|s| {
        let model = s.spawn(|| refused(&["model", "--params", &without], None));
        let bench = s.spawn(|| refused(&["bench", "local", "--device", "cpu"], Some(&with)));
        let report =
            s.spawn(|| refused(&["report", "--findings", &with, "--out", "/nonexistent/page"], None));
        [model, bench, report].map(|t| t.join().unwrap())
    });
    drop(writer);
    for path in [&without, &with] {
        std::fs::remove_file(path).unwrap();
    }
    assert!(model.contains(&without) && model.contains("name a regular file"), "{model}");
    assert!(bench.contains(&with) && bench.contains("name a regular file"), "{bench}");
    assert!(report.contains(&with) && report.contains("no regular file"), "{report}");
}
