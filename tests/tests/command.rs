//! The programs as a user meets them: what wrong input is answered with, word by word, what help shows, and what
//! happens where standard output takes no more.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use pushgate::settings::PluginSettings;
use pushgate_tests::built::{example, scratch};
use pushgate_tests::{pushgate, skip};
use serde_json::Value;

// A build script has no tests of its own.
#[allow(dead_code)]
#[path = "../../build.rs"]
mod build;

/// A folder of this test program: settings files, a cache, an empty sysfs.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = scratch(env!("CARGO_TARGET_TMPDIR")).join("command");
        fs::create_dir_all(folder.join("empty")).unwrap();
        folder
    })
}

/// A program in an environment without settings.
fn program(name: &str) -> Command {
    let mut command = Command::new(if name == "pushgate" { pushgate().to_path_buf() } else { example(name) });
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    for name in ["PUSHGATE_CONFIG", "PUSHGATE_LOG", "PUSHGATE_PROBE_FILE", "COLUMNS"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// `pushgate` with these words below a limit that `ulimit` sets.
fn below(limit: &str, words: &str) -> (Option<i32>, String, String) {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-euc", &format!("ulimit {limit}; exec \"$0\" \"$@\"")]).arg(pushgate());
    run(shell.args(words.split_whitespace()).env_remove("PUSHGATE_CONFIG").stdin(Stdio::null()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), text(&stdout), text(&stderr))
}

/// What `pushgate` with these words prints; it succeeds.
#[track_caller]
fn prints(words: &str) -> String {
    let (code, out, err) = run(program("pushgate").args(words.split_whitespace()));
    assert_eq!((code, err.as_str()), (Some(0), ""), "{words}");
    out
}

// ------------------------------------------------------------------------------------------- wrong input

/// Runs a program with wrong input: it says these lines, prints nothing else and exits with 2.
#[track_caller]
fn refused(command: &mut Command, lines: &str) {
    let (code, out, err) = run(command);
    assert_eq!((err.as_str(), out.as_str()), (format!("{lines}\n").as_str(), ""));
    assert_eq!(code, Some(2), "{err}");
}

#[test]
fn a_wrong_variable_is_quoted_with_its_name_and_what_is_allowed() {
    for (name, value, says) in [
        ("PUSHGATE_QP", "smoke", "invalid qp `smoke` (from PUSHGATE_QP): expected auto, local, verbs or tcp"),
        ("PUSHGATE_DEVICE", "", "invalid device `` (from PUSHGATE_DEVICE): expected auto, cpu or cuda"),
        (
            "PUSHGATE_SLOTS",
            "1\n2",
            "invalid slots `1\\n2` (from PUSHGATE_SLOTS): expected a power of two, 2 to 65536",
        ),
        (
            "PUSHGATE_TIMEOUT",
            "30m",
            "invalid timeout `30m` (from PUSHGATE_TIMEOUT): expected 1ms to 24h, as in 500ms, 30s, 2min or 1h; a \
             number alone is milliseconds",
        ),
        (
            "PUSHGATE_RENDEZVOUS",
            "2001:db8::1:7000",
            "invalid rendezvous `2001:db8::1:7000` (from PUSHGATE_RENDEZVOUS): expected none or HOST:PORT \
             ([ADDRESS]:PORT for IPv6)",
        ),
        ("PUSHGATE_IB_PORT", "0", "invalid ib-port `0` (from PUSHGATE_IB_PORT): expected 1 to 255"),
        ("PUSHGATE_NO_IMM", "yes", "invalid no-imm `yes` (from PUSHGATE_NO_IMM): expected true or false"),
    ] {
        refused(program("pushgate").arg("config").env(name, value), &format!("pushgate: {says}"));
    }
}

#[test]
fn a_log_filter_that_cannot_be_read_is_refused() {
    for words in ["config", "bench allreduce --ranks 2"] {
        refused(
            program("pushgate").args(words.split_whitespace()).env("PUSHGATE_LOG", "pushgate_engine=loud"),
            "pushgate: invalid PUSHGATE_LOG `pushgate_engine=loud` (from PUSHGATE_LOG): expected levels (error, warn, info, \
             debug, trace, off), each alone or behind CRATE=, with commas between",
        );
    }
    for filter in ["", "off", "debug", "warn,pushgate_engine=debug"] {
        assert_eq!(run(program("pushgate").arg("config").env("PUSHGATE_LOG", filter)).0, Some(0), "{filter}");
    }
}

#[test]
fn an_unknown_variable_is_refused_with_the_nearest_name() {
    for (name, says) in [
        ("PUSHGATE_WINDOWSIZE", "did you mean `PUSHGATE_WINDOW_SIZE`?"),
        ("PUSHGATE_qp", "did you mean `PUSHGATE_QP`?"),
        ("PUSHGATE_HOTS", "did you mean `PUSHGATE_HOST`?"),
        ("PUSHGATE_LOGS", "did you mean `PUSHGATE_LOG`?"),
        ("PUSHGATE_PIGEON", "`pushgate config` lists the settings"),
    ] {
        let says = format!("pushgate: unknown setting `{name}` (from the environment): {says}");
        refused(program("pushgate").arg("devices").env(name, "1"), &says);
    }
}

#[test]
fn bytes_that_are_no_utf8_are_refused_in_names_and_values() {
    let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    refused(
        program("pushgate").arg("config").env(os(b"PUSHGATE_PIG\xffEON"), "1"),
        "pushgate: unknown setting `PUSHGATE_PIG\u{fffd}EON` (from the environment): `pushgate config` lists the \
         settings",
    );
    refused(
        program("pushgate").arg("config").env("PUSHGATE_QP", os(b"lo\xffcal")),
        "pushgate: invalid qp `lo\u{fffd}cal` (from PUSHGATE_QP): expected auto, local, verbs or tcp, in UTF-8",
    );
}

#[test]
fn a_wrong_flag_is_quoted_with_its_name_and_what_is_allowed() {
    let size = "a power of two, 64 to 512M; bytes, K, M and G are 1024-based";
    let time = "1ms to 24h, as in 500ms, 30s, 2min or 1h; a number alone is milliseconds";
    for (words, name, value, allowed) in [
        ("config --qp smoke", "qp", "smoke", "auto, local, verbs or tcp"),
        ("config --window-size 3M", "window-size", "3M", size),
        ("devices --window-size 1MB", "window-size", "1MB", size),
        ("config --slots 100", "slots", "100", "a power of two, 2 to 65536"),
        ("config --timeout soon", "timeout", "soon", time),
        ("config --stuck 25h", "stuck", "25h", time),
        ("config --stall-report never", "stall-report", "never", &format!("0 or {time}")),
        ("config --no-imm=maybe", "no-imm", "maybe", "true or false"),
        ("config --proxy-cpu +1", "proxy-cpu", "+1", "auto, none or a core's number"),
        (
            "config --host 0.0.0.0",
            "host",
            "0.0.0.0",
            "auto or an IP address of this host (fe80::1%eth0 for a link-local one)",
        ),
        (
            "config --ib-dev ../x",
            "ib-dev",
            "../x",
            "auto, near, a device's name as in rxe0 or mlx5_0, or up to 4 names with commas between them (32 in the NCCL plugin); whole names, the port is ib-port",
        ),
        ("config --ib-mtu 1500", "ib-mtu", "1500", "auto, 256, 512, 1024, 2048 or 4096"),
        ("proxy --proxy-socket @", "proxy-socket", "@", "a path, or @ and a name"),
        ("bench gate --runs 0", "runs", "0", "1 to 1000"),
        ("bench gate --seconds 61", "seconds", "61", "0.001 to 60"),
        ("bench push --bytes 7", "bytes", "7", "8 to 40 in steps of 8, or a multiple of 16 up to 256M"),
        ("bench push --blocks none", "blocks", "none", "1 to 4096"),
        ("bench peers --peers 1,0", "peers", "1,0", "numbers of 1 to 4096"),
        ("bench rdma --size 7", "size", "7", "8 to 256M in steps of 8"),
        (
            "bench osu-bw -d H X",
            "buffers",
            "H X",
            "H H, D D, H D or D H; before them cuda or cpu, or nothing",
        ),
        ("bench osu-bw -m 9:8", "message-size", "9:8", "MAX or MIN:MAX, 0 to 256M"),
        ("bench osu-bw -W 0", "messages", "0", "1 to 4096"),
        (
            "bench osu-bw --rank 1",
            "rank",
            "1",
            "none without --rendezvous HOST:PORT: both ranks are started here then",
        ),
        (
            "bench osu-bw --window bar",
            "window",
            "bar",
            "memory or staging with qp = local (its peer maps the window; use qp = verbs)",
        ),
        ("bench osu-bw --proxy process --qp verbs", "proxy", "process", "thread with qp = verbs"),
        ("model --gen 7", "gen", "7", "one of 1, 2, 3, 4, 5, 6"),
        ("model --lanes x", "lanes", "x", "a whole number"),
        ("model --bytes 0", "bytes", "0", "1 to 1024G, as 4096, 64K or 1M"),
        ("model --store-width 48", "store-width", "48", "a power of two from 4 to MPS (256)"),
    ] {
        refused(
            program("pushgate").args(words.split_whitespace()),
            &format!("pushgate: invalid {name} `{value}` (from --{name}): expected {allowed}"),
        );
    }
    // An empty word is an argument too.
    refused(
        program("pushgate").args(["config", "--window-dev", ""]),
        "pushgate: invalid window-dev `` (from --window-dev): expected auto, or a device's path",
    );
}

#[test]
fn a_wrong_settings_file_is_refused_with_its_line() {
    let file = folder().join("wrong.toml");
    let name = file.display();
    for (content, says) in [
        (
            "slots = 64\n\nqp = \"smoke\"",
            format!("invalid qp `smoke` (from {name}:3): expected auto, local, verbs or tcp"),
        ),
        ("qp = [1, 2]", format!("invalid qp `[1, 2]` (from {name}:1): expected auto, local, verbs or tcp")),
        ("ib_port = 1.5", format!("invalid ib-port `1.5` (from {name}:1): expected 1 to 255")),
        (
            "# x\nwindowsize = 1",
            format!("unknown setting `windowsize` (from {name}:2): did you mean `window_size`?"),
        ),
        (
            "[pushgate]\nqp = \"local\"",
            format!("unknown setting `pushgate` (from {name}:1): `pushgate config` lists the settings"),
        ),
        (
            "slots = 64\nqp = local",
            format!(
                "invalid settings file {name}: TOML parse error at line 2, column 6\n  |\n2 | qp = local\n  |      \
                 ^^^^^\nstring values must be quoted, expected literal string"
            ),
        ),
        (
            "slots = 64\nslots = 32",
            format!(
                "invalid settings file {name}: TOML parse error at line 2, column 1\n  |\n2 | slots = 32\n  | ^^^^^\n\
                 duplicate key"
            ),
        ),
    ] {
        fs::write(&file, content).unwrap();
        refused(
            program("pushgate").arg("config").env("PUSHGATE_CONFIG", &file),
            &format!("pushgate: {says}"),
        );
    }
}

/// What the exit code is, `command_host.rs` says.
#[test]
fn a_file_or_folder_that_is_not_there_is_named_with_the_reason() {
    let empty = folder().join("empty");
    let empty = empty.to_str().unwrap();
    let gone = "No such file or directory (os error 2)";
    for (words, config, says) in [
        (
            vec!["config"],
            Some("/nonexistent/x.toml"),
            format!("cannot read the settings file /nonexistent/x.toml (from PUSHGATE_CONFIG): {gone}"),
        ),
        (vec!["model", "--params", "/nonexistent/x.toml"], None, format!("cannot read /nonexistent/x.toml: {gone}")),
        (vec!["topo", "--topology", "/nonexistent/x"], None, format!("/nonexistent/x cannot be read: {gone}")),
        (
            vec!["topo", "--sysfs", "/nonexistent"],
            None,
            "/nonexistent: no such folder; --sysfs takes the root of a sysfs".into(),
        ),
        (
            vec!["topo", "--sysfs", empty, "--proc", empty, "gpu0", "mlx5_0"],
            None,
            "`gpu0` is no PCI function here: give an address like 0000:17:00.0 or a name; no GPU, NIC or window is \
             known"
                .into(),
        ),
    ] {
        let mut command = program("pushgate");
        let (code, out, err) = run(command.args(&words).envs(config.map(|file| ("PUSHGATE_CONFIG", file))));
        assert_eq!((err.as_str(), out.as_str()), (format!("pushgate: {says}\n").as_str(), ""), "{words:?}");
        assert!(matches!(code, Some(1 | 2)), "{words:?}: {code:?}");
    }
}

#[test]
fn an_unknown_flag_or_subcommand_is_refused_with_the_nearest() {
    refused(
        program("pushgate").args(["config", "--window-sise", "1M"]),
        "error: unexpected argument '--window-sise' found\n\n  tip: a similar argument exists: '--window-size'\n\n\
         Usage: pushgate config --window-size <BYTES>\n\nFor more information, try '--help'.",
    );
    refused(
        program("pushgate").arg("confg"),
        "error: unrecognized subcommand 'confg'\n\n  tip: a similar subcommand exists: 'config'\n\n\
         Usage: pushgate <COMMAND>\n\nFor more information, try '--help'.",
    );
    refused(
        program("pushgate")
            .args([OsStr::new("config"), OsString::from_vec(b"--qp=\xff".to_vec()).as_os_str()]),
        "error: invalid UTF-8 was detected in one or more arguments\n\n\
         Usage: pushgate config [OPTIONS]\n\nFor more information, try '--help'.",
    );
}

#[test]
fn the_examples_refuse_wrong_input_alike() {
    for (words, says) in [
        ("--qp smoke", "invalid qp `smoke` (from --qp): expected auto, local, verbs or tcp"),
        ("--device tpu", "invalid device `tpu` (from --device): expected auto, cpu or cuda"),
        ("--size 13", "invalid size `13` (from --size): expected a multiple of 8, as in 4096 or 16M"),
    ] {
        refused(program("allreduce").args(words.split_whitespace()), &format!("allreduce: {says}"));
    }
    refused(
        program("allreduce").env("PUSHGATE_SLOT", "64"),
        "allreduce: unknown setting `PUSHGATE_SLOT` (from the environment): did you mean `PUSHGATE_SLOTS`?",
    );
    refused(
        program("custom_kernel").arg("--fast"),
        "error: unexpected argument '--fast' found\n\nUsage: custom_kernel\n\nFor more information, try '--help'.",
    );
    refused(
        program("custom_kernel").env("PUSHGATE_QP", "smoke"),
        "custom_kernel: invalid qp `smoke` (from PUSHGATE_QP): expected auto, local, verbs or tcp",
    );
}

#[test]
fn a_kernel_that_does_not_compile_is_shown_with_the_compilers_lines() {
    let (script, compiler) = (folder().join("script"), folder().join("compiler"));
    fs::write(
        &script,
        "#!/bin/sh\n[ \"$1\" != --version ] || exec echo 1.0\necho 'custom_kernel.cu:7:1: error: expected }' >&2\necho '    7 | x' >&2\nexit 1\n",
    )
    .unwrap();
    // Another process writes the file: what this one has open for writing, a child that another test starts
    // may have open too, and then nothing can execute the file.
    let status = Command::new("install").args(["-m", "755"]).args([&script, &compiler]).status().unwrap();
    assert!(status.success());
    let mut command = program("custom_kernel");
    command.env("PUSHGATE_DEVICE", "cpu").env("CXX", &compiler).env("XDG_CACHE_HOME", folder().join("cache"));
    let (code, _, err) = run(&mut command);
    assert_eq!(code, Some(1), "{err}");
    let lines: Vec<&str> = err.lines().collect();
    assert!(lines[0].starts_with("custom_kernel: custom_kernel.cu does not compile with "), "{err}");
    assert!(
        lines.contains(&"custom_kernel.cu:7:1: error: expected }") && lines.contains(&"    7 | x"),
        "{err}"
    );
    assert!(!err.contains("\\n") && !err.contains("Compile {"), "{err}");
}

// ---------------------------------------------------------------------------------------- standard output

/// Commands that print, and end by themselves within a moment.
fn printing() -> Vec<Command> {
    let empty = folder().join("empty");
    let topo = format!("topo --sysfs {0} --proc {0}", empty.display());
    let mut all: Vec<Command> = [
        "config",
        "config --json",
        "devices",
        "model",
        "model --json",
        "model --params-help",
        &topo,
        "bench gate --seconds 0.001 --runs 1",
        "bench peers --peers 1,70 --seconds 0.01 --runs 1 --device cpu",
        "bench osu-latency -m 1:8 -i 1 -x 0 --device cpu",
        "bench osu-latency -m 1:8 -i 1 -x 0 --device cpu --processes 1",
        "bench allreduce --ranks 2 --size 4K --iters 1 --warmup 0 --device cpu",
        "completions bash",
        "manual",
        "--help",
        "--version",
        "bench push --help-all",
    ]
    .iter()
    .map(|words| {
        let mut command = program("pushgate");
        command.args(words.split_whitespace());
        command
    })
    .collect();
    let mut example = program("allreduce");
    example.args(["--ranks", "2", "--size", "4K", "--iters", "1", "--device", "cpu"]);
    all.push(example);
    let mut kernel = program("custom_kernel");
    kernel.env("PUSHGATE_DEVICE", "cpu");
    all.push(kernel);
    all
}

#[test]
fn a_reader_that_has_gone_ends_a_command_quietly() {
    for mut command in printing() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{command:?}");
    }
}

#[test]
fn a_full_disk_is_one_sentence() {
    for mut command in printing() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let name = Path::new(command.get_program()).file_name().unwrap().to_str().unwrap().to_owned();
        let output = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        let says =
            format!("{name}: cannot write to standard output: No space left on device (os error 28)\n");
        assert_eq!((text(&output.stderr), output.status.code()), (says, Some(1)), "{command:?}");
    }
}

// --------------------------------------------------------------------------------- help, version, settings

#[test]
fn help_shows_the_settings_that_matter_and_help_all_the_others_apart() {
    let apart = "Settings without effect here";
    for (words, shown, hidden) in [
        (
            "bench push",
            &["--window-size", "--proxy-cpu", "--ib-dev"][..],
            &["--landing", "--rendezvous", "--proxy-serves"][..],
        ),
        ("bench gate", &["--seconds"], &["--qp", "--window-size"]),
        ("bench osu-bw", &["--rendezvous", "--window-size"], &["--landing", "--net-window-size"]),
        ("bench allreduce", &["--rendezvous", "--op", "--window-size"], &["--landing", "--net-window-size"]),
        ("chaos", &["--qp", "--proxy", "--timeout", "--ib-dev", "--rendezvous"], &["--landing"]),
        ("devices", &["--help-all"], &["--qp", "--window-size"]),
        ("doctor", &["--ib-dev", "--window"], &["--stuck", "--landing"]),
        ("nccl-check", &["--path", "--qp", "--timeout", "--transports"], &["--slots", "--rendezvous"]),
        ("probe", &["--device"], &["--qp", "--timeout"]),
        ("ranks", &["--rendezvous", "--timeout", "--join"], &["--landing", "--slots"]),
        (
            "proxy",
            &["--proxy-socket", "--stall-report", "--proxy-serves", "--status"],
            &["--qp", "--timeout"],
        ),
        ("config", &["--landing", "--qp"], &[]),
    ] {
        let help = prints(&format!("{words} --help"));
        let has = |help: &str, flag: &str| {
            help.lines().any(|line| line.split_whitespace().any(|word| word == flag))
        };
        for flag in shown {
            assert!(has(&help, flag), "{words} {flag}:\n{help}");
        }
        for flag in hidden {
            assert!(!has(&help, flag), "{words} {flag}:\n{help}");
        }
        assert!(!help.contains(apart), "{words}:\n{help}");
        if hidden.is_empty() {
            continue;
        }
        let all = prints(&format!("{words} --help-all"));
        let others = all.split_once(apart).unwrap_or_else(|| panic!("{words}:\n{all}")).1;
        for flag in hidden {
            assert!(has(others, flag), "{words} {flag}:\n{all}");
        }
        assert_eq!(prints(&format!("{words} -h")), help);
    }
}

#[test]
fn help_wraps_at_the_terminals_width() {
    for (name, words) in [
        ("pushgate", "bench push --help"),
        ("pushgate", "config -h"),
        ("pushgate", "bench allreduce --help-all"),
    ] {
        for columns in [60, 90] {
            let mut command = program(name);
            let (code, out, _) =
                run(command.args(words.split_whitespace()).env("COLUMNS", columns.to_string()));
            assert_eq!(code, Some(0));
            for line in out.lines() {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
        }
    }
}

#[test]
fn every_program_says_its_version() {
    let version = |name: &str| run(program(name).arg("--version")).1;
    for name in ["allreduce", "custom_kernel", "outside"] {
        assert_eq!(version(name), format!("{name} {}\n", pushgate::VERSION));
    }
    // The library is not compiled anew for a commit that changes the command alone.
    let command = version("pushgate");
    for said in [pushgate::VERSION, command.strip_prefix("pushgate ").unwrap().trim_end()] {
        let mut words = said.split(' ');
        assert_eq!(words.next(), Some(env!("CARGO_PKG_VERSION")));
        // A commit, where this is a checkout, and whether the sources are as committed.
        let rest = words.collect::<Vec<_>>().join(" ");
        if let Some(commit) = rest.strip_prefix("(commit ").and_then(|rest| rest.strip_suffix(')')) {
            let digits = commit.strip_suffix(", changed").unwrap_or(commit);
            assert!(digits.len() >= 12 && digits.bytes().all(|b| b.is_ascii_hexdigit()), "{rest}");
        } else {
            assert_eq!(rest, "");
        }
    }
}

#[test]
fn a_commit_is_that_of_the_projects_own_repository() {
    if Command::new("git").arg("--version").output().is_err() {
        return skip("there is no git");
    }
    let repository = folder().join("repository");
    let _ = fs::remove_dir_all(&repository);
    let unpacked = repository.join("pushgate");
    fs::create_dir_all(&unpacked).unwrap();
    let git = |words: &str| {
        let mut command = Command::new("git");
        command
            .args(words.split(' '))
            .current_dir(&repository)
            .env_remove("GIT_DIR")
            .env_remove("GIT_WORK_TREE");
        let (code, out, err) = run(&mut command);
        assert_eq!(code, Some(0), "{words}: {err}");
        out.trim().to_owned()
    };
    git("init --quiet");
    assert_eq!(build::commit(&repository), None, "nothing is committed yet");
    git("-c user.name=a -c user.email=a@b commit --quiet --allow-empty -m x");
    let commit = git("rev-parse --short=12 HEAD");
    assert_eq!(build::commit(&repository), Some(commit.clone()));
    fs::write(repository.join("Cargo.toml"), "").unwrap();
    assert_eq!(build::commit(&repository), Some(format!("{commit}, changed")));
    assert_eq!(build::commit(&unpacked), None, "a folder of another repository");
}

#[test]
fn custom_kernel_has_help() {
    let (code, out, err) = run(program("custom_kernel").arg("--help"));
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains("Usage: custom_kernel") && out.contains("PUSHGATE_DEVICE=cpu"), "{out}");
}

#[test]
fn config_shows_value_source_and_unit() {
    let file = folder().join("right.toml");
    fs::write(&file, "# ours\ntimeout = \"2min\"\nslots = 64\n").unwrap();
    let run = |words: &str| {
        let mut command = program("pushgate");
        command.args(words.split(' ')).env("PUSHGATE_CONFIG", &file).env("PUSHGATE_WINDOW_SIZE", "2048K");
        let (code, out, err) = run(&mut command);
        assert_eq!((code, err.as_str()), (Some(0), ""));
        out
    };
    let table = run("config --qp verbs --slots 32");
    let mut lines = table.lines();
    let columns = ["setting", "value", "source", "unit", "default", "allowed"];
    assert_eq!(lines.next().unwrap().split_whitespace().collect::<Vec<_>>(), columns);
    let rows: HashMap<&str, Vec<&str>> = lines
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .map(|cells: Vec<_>| (cells[0], cells))
        .collect();
    assert_eq!(rows.len(), PluginSettings::keys().count());
    let name = file.display().to_string();
    for (setting, value, source, unit) in [
        ("timeout", "120000", format!("{name}:2"), "ms"),
        ("window-size", "2M", "PUSHGATE_WINDOW_SIZE".into(), "bytes"),
        ("slots", "32", "--slots".into(), "-"),
        ("qp", "verbs", "--qp".into(), "-"),
        ("ack-timeout", "14", "default".into(), "4.096 us x 2^N"),
        ("no-imm", "false", "default".into(), "-"),
    ] {
        assert_eq!(rows[setting][1..4], [value, &source, unit], "{table}");
    }
    let all: Value = serde_json::from_str(&run("config --json --no-imm")).unwrap();
    let of = |name: &str| all.as_array().unwrap().iter().find(|row| row["setting"] == name).unwrap().clone();
    assert_eq!((&of("timeout")["value"], &of("timeout")["unit"]), (&120_000.into(), &"ms".into()));
    assert_eq!(
        (&of("timeout")["source"], &of("timeout")["default"]),
        (&format!("{name}:2").into(), &30_000.into())
    );
    assert_eq!(
        (&of("window-size")["value"], &of("window-size")["unit"]),
        (&(2 << 20).into(), &"bytes".into())
    );
    assert_eq!((&of("no-imm")["value"], &of("no-imm")["source"]), (&true.into(), &"--no-imm".into()));
    assert_eq!((&of("ib-mtu")["value"], &of("qp")["unit"]), (&"auto".into(), &Value::Null));
}

// ------------------------------------------------------------------------------------------- documentation

/// A command of ours in a line of the documentation: the program, its words before the first flag, its flags.
#[derive(Debug)]
struct Documented {
    program: &'static str,
    words: Vec<String>,
    flags: Vec<String>,
}

/// The commands of ours in the fenced blocks of a page, whatever starts them.
fn documented(page: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            inside = !inside;
            continue;
        }
        let words = line.split_whitespace().take_while(|word| !["#", "|", "&&", ";"].contains(word));
        let words: Vec<&str> = if inside { words.collect() } else { Vec::new() };
        // The command whose arguments are read.
        let mut open: Option<Documented> = None;
        for (at, word) in words.iter().enumerate() {
            let starts = ["pushgate", "allreduce"].into_iter().find(|name| name == word);
            let is_program = open.is_none() || words[at - 1] == "--";
            match (&mut open, starts.filter(|_| is_program)) {
                (_, Some(program)) => {
                    found.extend(open.replace(Documented { program, words: vec![], flags: vec![] }));
                }
                // What follows is another program's, but for `cargo run --example allreduce -- --flags`.
                (Some(_), None) if *word == "--" && words[at - 1] != "allreduce" => found.extend(open.take()),
                (Some(command), None) if word.starts_with('-') && word.len() > 1 && *word != "--" => {
                    let flag = word.split('=').next().unwrap();
                    command.flags.push(flag.trim_end_matches(|c: char| !c.is_alphanumeric()).into());
                }
                (Some(command), None) if command.flags.is_empty() && *word != "--" => {
                    command.words.push(word.to_string());
                }
                _ => {}
            }
        }
        found.extend(open);
    }
    found
}

#[test]
fn every_flag_of_a_documented_command_exists() {
    let root = pushgate_tests::built::root();
    let Ok(pages) = fs::read_dir(root.join("docs")) else { return skip("this bundle has no documentation") };
    let pages = pages.flatten().map(|entry| entry.path()).chain([root.join("README.md")]);
    let mut help: HashMap<(&str, Vec<String>), Vec<String>> = HashMap::new();
    let mut checked = HashMap::from([("pushgate", 0), ("allreduce", 0)]);
    for path in pages.filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        for command in documented(&fs::read_to_string(&path).unwrap()) {
            // The subcommand is the longest row of words that has help.
            let words = (0..=command.words.len().min(2)).rev().map(|n| command.words[..n].to_vec());
            let flags = words.into_iter().find_map(|words| {
                let known = help.entry((command.program, words.clone())).or_insert_with(|| {
                    let ask = |flag| run(program(command.program).args(&words).arg(flag));
                    let answers = [ask("--help-all"), ask("--help")];
                    let text = answers
                        .into_iter()
                        .find(|(code, ..)| *code == Some(0))
                        .map_or(String::new(), |a| a.1);
                    let flag =
                        |word: &str| word.split(['=', ',', '[', '`', ')', ':']).next().unwrap().to_owned();
                    text.split_whitespace().filter(|word| word.starts_with('-')).map(flag).collect()
                });
                (!known.is_empty()).then(|| known.clone())
            });
            let flags = flags.unwrap_or_else(|| panic!("{}: {command:?} has no help", path.display()));
            for flag in &command.flags {
                assert!(flags.contains(flag), "{}: {command:?}: no {flag}", path.display());
                *checked.get_mut(command.program).unwrap() += 1;
            }
        }
    }
    // The test is of use only if it finds commands.
    assert!(checked["pushgate"] >= 40 && checked["allreduce"] >= 1, "{checked:?}");
}

#[test]
fn commands_of_ours_are_found_in_the_documentation() {
    let page = "pushgate no --block\n```\n$ A=b pushgate run -n 4 --hosts a -- pushgate bench allreduce --size=1M  # --not\n\
                cargo run --example allreduce -- --ranks 2\nmpirun -x A pushgate bench push --json | b --c\n\
                apt install pushgates --yes\n```\n";
    let found: Vec<String> = documented(page)
        .iter()
        .map(|c| format!("{} {}: {}", c.program, c.words.join(" "), c.flags.join(" ")))
        .collect();
    assert_eq!(
        found,
        [
            "pushgate run: -n --hosts",
            "pushgate bench allreduce: --size",
            "allreduce : --ranks",
            "pushgate bench push: --json"
        ]
    );
}

// --------------------------------------------------------------------------------------- pages and shells

#[test]
fn the_manual_has_a_page_for_every_subcommand() {
    let page = prints("manual");
    assert!(page.contains(".TH pushgate 1") && page.contains("pushgate\\-bench(1)"), "{page}");
    assert!(page.ends_with(".SH SEE ALSO\npushgate(4), the kernel module\n"), "{page}");
    let pages = folder().join("man");
    let _ = fs::remove_dir_all(&pages);
    fs::create_dir_all(&pages).unwrap();
    assert_eq!(prints(&format!("manual --folder {}", pages.display())), "");
    for name in [
        "pushgate",
        "pushgate-config",
        "pushgate-bench",
        "pushgate-bench-push",
        "pushgate-chaos",
        "pushgate-doctor",
        "pushgate-nccl-check",
        "pushgate-nixl-check",
        "pushgate-run",
    ] {
        let page =
            fs::read_to_string(pages.join(format!("{name}.1"))).unwrap_or_else(|e| panic!("{name}.1: {e}"));
        assert!(page.contains(".TH"), "{name}");
    }
    assert_eq!(fs::read_to_string(pages.join("pushgate.1")).unwrap(), page);
    let (_, _, err) = run(program("pushgate").args(["manual", "--folder", "/nonexistent"]));
    assert!(err.starts_with("pushgate: cannot write manual pages into /nonexistent: "), "{err}");
}

#[test]
fn shells_complete_flags_and_their_values() {
    let script = folder().join("completions.bash");
    fs::write(&script, prints("completions bash")).unwrap();
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let ask = format!(
            "source {}; COMP_WORDS=({line}); [ -n '{last}' ] || COMP_WORDS+=(''); COMP_CWORD={}; \
             _pushgate pushgate '{last}' '{}'; echo \"${{COMPREPLY[*]}}\"",
            script.display(),
            words.len() - 1,
            words[words.len() - 2],
            last = words[words.len() - 1],
        );
        let (code, out, err) = run(Command::new("bash").args(["-c", &ask]));
        assert_eq!(code, Some(0), "{err}");
        out.trim().to_owned()
    };
    assert_eq!(complete("pushgate conf"), "config");
    assert_eq!(complete("pushgate config --window-s"), "--window-size");
    assert_eq!(complete("pushgate config --qp "), "auto local verbs tcp");
    for shell in ["fish", "zsh"] {
        assert!(prints(&format!("completions {shell}")).contains("window-size"), "{shell}");
    }
}

/// The kernel ends a process with a signal that makes a file, or shared memory, longer than this limit.
#[test]
fn below_a_limit_of_file_sizes_each_command_says_which_limit_it_is() {
    let (code, _, err) = below("-f 100", "bench latency --device cpu --runs 1 --seconds 0.01");
    assert!(code.is_some_and(|code| code != 0), "{code:?} {err}");
    assert!(err.contains("the limit of file sizes") && err.contains("ulimit -f"), "{err}");
    let (code, out, err) = below("-f 100", "doctor --qp local");
    assert!(code.is_some_and(|code| code != 0), "{code:?} {err}");
    assert!(out.contains("the limit of file sizes") && out.contains("ulimit -f"), "{out}");
}

#[test]
fn a_proxy_that_could_serve_nobody_by_its_limit_of_open_files_does_not_start() {
    let socket = folder().join("few-files");
    let (code, out, err) = below("-n 48", &format!("proxy --proxy-socket {}", socket.display()));
    assert!(code.is_some_and(|code| code != 0) && out.is_empty(), "{code:?} {out}");
    assert!(
        err.contains("a proxy that serves one program needs ")
            && err.contains("the limit of open files is 48"),
        "{err}"
    );
    assert!(!socket.exists());
}

/// Which call meets the limit depends on it, and on which of the two ranks comes first.
#[test]
fn at_any_limit_of_open_files_a_queue_pair_is_made_or_the_limit_is_said() {
    for limit in (18..40).step_by(2) {
        let words = "bench latency --device cpu --runs 1 --seconds 0.001";
        let (code, _, err) = below(&format!("-n {limit}"), words);
        let said = err.contains(&format!("the limit of open files is {limit}"));
        assert!(code == Some(0) || code == Some(1) && said, "{limit}: {code:?} {err}");
    }
}

#[test]
fn a_limit_that_this_user_can_not_raise_names_the_administrator() {
    let (code, _, err) = below("-n 24", "bench latency --device cpu --runs 1 --seconds 0.01");
    assert!(code.is_some_and(|code| code != 0), "{code:?} {err}");
    assert!(err.contains("the limit of open files is 24, and an administrator alone can raise it"), "{err}");
}
