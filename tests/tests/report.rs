//! Tests `pushgate report` as a program on this host, with a GPU or without.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pushgate::settings::PluginSettings;
use pushgate_tests::built;
use roxmltree::{Document, ParsingOptions};

fn limit() -> Duration {
    2 * pushgate_tests::hang()
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pushgate-report-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The command in this folder, in an environment without settings and without findings.
fn pushgate(folder: &Folder, args: &[&str]) -> Command {
    let mut command = Command::new(built::pushgate());
    command
        .args(args)
        .current_dir(&folder.0)
        .env("XDG_CACHE_HOME", folder.0.join("cache"))
        .stdin(Stdio::null());
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command.env_remove("PUSHGATE_CONFIG").env_remove("PUSHGATE_LOG").env_remove("PUSHGATE_PROBE_FILE");
    command
}

fn run(mut command: Command) -> (Output, String) {
    let start = Instant::now();
    let output = command.output().unwrap();
    assert!(start.elapsed() < limit(), "took {:?}", start.elapsed());
    let err = String::from_utf8(output.stderr.clone()).unwrap();
    (output, err)
}

fn page(folder: &Folder, name: &str) -> String {
    let page = fs::read_to_string(folder.0.join(name)).unwrap();
    let options = ParsingOptions { allow_dtd: true, ..Default::default() };
    Document::parse_with_options(&page, options).unwrap();
    assert!(page.len() < 1 << 20 && !page.contains("<script"));
    page
}

#[test]
fn a_report_is_written_and_never_over_another_file() {
    let folder = Folder::new("writes");
    let (output, err) = run(pushgate(&folder, &["report"]));
    assert!(output.status.success(), "{err}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("pushgate-report.html: "), "{said}");
    let first = page(&folder, "pushgate-report.html");
    let host = rustix::system::uname();
    assert!(first.contains(&*host.nodename().to_string_lossy()));
    assert!(first.contains("no probe has measured this host: run <code>pushgate probe</code>"));
    for check in ["memlock", "memfd"] {
        assert!(first.contains(check), "{check}");
    }

    fs::write(folder.0.join("pushgate-report.html"), "mine").unwrap();
    let (output, err) = run(pushgate(&folder, &["report"]));
    assert!(!output.status.success() && err.contains("pushgate-report.html is there: --force"), "{err}");
    assert_eq!(fs::read_to_string(folder.0.join("pushgate-report.html")).unwrap(), "mine");
    let (output, err) = run(pushgate(&folder, &["report", "--force", "--redact", "--slots", "64"]));
    assert!(output.status.success(), "{err}");
    let redacted = page(&folder, "pushgate-report.html");
    assert!(
        redacted.contains("<p>Host (host), ") && redacted.contains(">slots</th><td class=\"warned\">64<")
    );
    let kept: Vec<_> = fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(kept, ["pushgate-report.html"], "something was left behind");

    std::os::unix::fs::symlink("/dev/null", folder.0.join("null")).unwrap();
    let (output, err) = run(pushgate(&folder, &["report", "--force", "--out", "null"]));
    assert!(!output.status.success() && err.contains("null is a link: name the file itself"), "{err}");
    assert!(folder.0.join("null").is_symlink());

    for (out, word) in [(".", "is a folder"), ("no/such/folder.html", "can't be written")] {
        let (output, err) = run(pushgate(&folder, &["report", "--out", out]));
        assert!(!output.status.success() && err.contains(word), "{err}");
    }
}

#[test]
fn a_report_takes_the_files_that_are_named() {
    let folder = Folder::new("files");
    let shape = "version = 1\n[[root_complex]]\nname = \"left\"\n\
                 [[device]]\naddress = \"ffff:01:00.0\"\nparent = \"left\"\nrole = \"switch\"\nspeed = 32.0\nwidth = 16\n\
                 [[device]]\naddress = \"ffff:02:00.0\"\nparent = \"ffff:01:00.0\"\nspeed = 32.0\nwidth = 16\n\
                 [[device]]\naddress = \"ffff:03:00.0\"\nparent = \"ffff:01:00.0\"\nspeed = 32.0\nwidth = 16\n\
                 [[gpu]]\naddress = \"ffff:02:00.0\"\nindex = 0\nname = \"<script>\"\n\
                 [[nic]]\nname = \"mlx5_0\"\naddress = \"ffff:03:00.0\"\n";
    fs::write(folder.0.join("shape.toml"), shape).unwrap();
    let (output, err) = run(pushgate(&folder, &["probe", "--device", "cpu", "--out", "found.toml"]));
    assert!(output.status.success(), "{err}");
    let args = ["report", "--topology", "shape.toml", "--findings", "found.toml", "--out", "new.html"];
    let (output, err) = run(pushgate(&folder, &args));
    assert!(output.status.success(), "{err}");
    let whole = page(&folder, "new.html");
    for word in [
        "&lt;script&gt;",
        "mlx5_0",
        "gpu0 to mlx5_0: time of a message",
        "points measured",
        "copies by this CPU",
    ] {
        assert!(whole.contains(word), "{word}");
    }
    // The findings' file is named by PUSHGATE_PROBE_FILE instead of an option.
    let mut command = pushgate(&folder, &["report", "--out", "by-variable.html"]);
    command.env("PUSHGATE_PROBE_FILE", folder.0.join("found.toml"));
    let (output, err) = run(command);
    assert!(output.status.success(), "{err}");
    assert!(page(&folder, "by-variable.html").contains("points measured"));

    // A file that was named must exist and be right; kept findings may be missing.
    fs::write(folder.0.join("found.toml"), "format = 9").unwrap();
    for args in [["--findings", "found.toml"], ["--findings", "none.toml"], ["--topology", "found.toml"]] {
        let args = ["report", "--out", "other.html", args[0], args[1]];
        let (output, err) = run(pushgate(&folder, &args));
        assert!(!output.status.success() && err.contains(args[4]), "{err}");
        assert!(!folder.0.join("other.html").exists());
    }
    let mut command = pushgate(&folder, &["report", "--out", "other.html"]);
    command.env("PUSHGATE_PROBE_FILE", folder.0.join("found.toml"));
    let (output, err) = run(command);
    assert!(output.status.success(), "{err}");
    let text = page(&folder, "other.html");
    assert!(text.contains("has format 9") && text.contains("run <code>pushgate probe</code>"));
}
